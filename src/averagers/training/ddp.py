"""Gradients for post-local SGD: DDP over all ranks during the warm-up, within a subgroup afterwards."""

# No `from __future__ import annotations` here: DDP compares the annotations of a hook with the types themselves.

from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from averagers.errors import InvalidTypeError, InvalidValueError
from averagers.reduction.groups import Group, node_of_each_rank
from averagers.reduction.pytorch import PYTORCH
from averagers.safety.agreement import Statement, agree


@final
class PostLocalSGDState:
    """State of `post_local_sgd_hook`: reads the averager's step, so there is nothing to keep or save.

    Args:
        averager: Whose warm-up decides; it has ``step``, ``warmup_steps`` and ``process_group``.
        subgroup: The ranks that average gradients after the warm-up. None means the ranks on this node,
            told by the host names, which all ranks of the averager exchange here. A subgroup of one
            rank sends no gradients.

    Attributes:
        averager: The averager.
        subgroup: The process group of the subgroup.

    Raises:
        InvalidTypeError: an argument is of the wrong type.
        InvalidValueError: this rank is not in the averager's process group, or not in ``subgroup``.

    Example:
        >>> ddp_model = torch.nn.parallel.DistributedDataParallel(model, forward_sync_buffers=False)
        >>> state = averagers.PostLocalSGDState(averager)
        >>> ddp_model.register_comm_hook(state, averagers.post_local_sgd_hook)
    """

    def __init__(self, averager: Any, subgroup: dist.ProcessGroup | None = None) -> None:
        for name in ("step", "warmup_steps", "process_group"):
            if not hasattr(averager, name):
                raise InvalidTypeError(
                    f"averager must be an averager with a warm-up, got {type(averager).__name__} without {name}"
                )
        ranks = PYTORCH.groups.members(PYTORCH.groups.resolve(averager.process_group))
        if ranks is None:
            raise InvalidValueError("this rank is not in the averager's process group, and cannot share its gradients")
        self.averager = averager
        self._node: Group | None = None
        if subgroup is None:
            self._node = _open_node_group(averager.process_group, ranks)
            self.subgroup: dist.ProcessGroup = self._node.handle
        elif PYTORCH.groups.members(PYTORCH.groups.resolve(subgroup)) is None:
            raise InvalidValueError("this rank is not in subgroup: give each rank the subgroup that it belongs to")
        else:
            self.subgroup = subgroup

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group that averages gradients at the averager's step."""
        averager = self.averager
        group: dist.ProcessGroup = averager.process_group if averager.step < averager.warmup_steps else self.subgroup
        return group

    def close(self) -> None:
        """Release the group of this node's ranks, if it was made here; the hook cannot be used any more."""
        if self._node is not None:
            PYTORCH.groups.release(self._node)
            self._node = None

    def __repr__(self) -> str:
        return f"PostLocalSGDState({self.averager!r}, subgroup of {self.subgroup.size()})"


def post_local_sgd_hook(state: PostLocalSGDState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients among all ranks during the averager's warm-up, then in the subgroup.

    For ``DistributedDataParallel.register_comm_hook``, beside an averager that runs after each
    ``optimizer.step()``. With gradient accumulation every backward reads the same step, so that the
    warm-up ends for hook and averager at once. Two things of DDP still wait for all ranks at every
    step, whatever the hook does: buffers are broadcast at each forward unless DDP is built with
    ``forward_sync_buffers=False``, and ``find_unused_parameters=True`` compares the parameters used.

    Args:
        state: What decides among whom.
        bucket: DDP's bucket; its flat buffer is averaged in place.

    Returns:
        A future of the averaged buffer.
    """
    gradients = bucket.buffer()
    group = state.group
    if group.size() == 1:
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(gradients)
        return done
    gradients.div_(group.size())
    work = dist.all_reduce(gradients, group=group, async_op=True)
    averaged: torch.futures.Future[Tensor] = work.get_future().then(lambda future: future.value()[0])
    return averaged


def _open_node_group(process_group: dist.ProcessGroup, ranks: tuple[int, ...]) -> Group:
    """Return a group of the ranks that run on this rank's node."""
    groups = PYTORCH.groups
    caller_group = groups.borrow(process_group, timeout_s=None)
    nodes = node_of_each_rank(caller_group)
    own = nodes[ranks.index(dist.get_rank())]
    members = tuple(rank for rank, node in zip(ranks, nodes, strict=True) if node == own)
    # A group for gradients alone: a round must never meet them, nor take them along when it fails.
    number = agree(caller_group, Statement({"call": "PostLocalSGDState"}), groups.serial).wish
    groups.serial = number + 1
    return groups.open(process_group, members, timeout_s=None, anew=number, purpose="gradients")
