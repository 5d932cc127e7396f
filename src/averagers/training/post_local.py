"""`PostLocalSGD`: data parallel first, then averaging, as one object."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from averagers.errors import InvalidTypeError
from averagers.training.attach import attach, check_pair
from averagers.training.ddp import PostLocalSGDState, post_local_sgd_hook


@final
class PostLocalSGD:
    """Data parallel during the averager's warm-up, and averaging afterwards.

    Gives ``ddp_model`` a hook that averages gradients among all ranks until the averager's warm-up ends, and within a
    node after it, and attaches the averager to ``optimizer``. Every rank must build it.

    Args:
        ddp_model: Built with ``forward_sync_buffers=False``, else DDP still sends buffers to all ranks.
        optimizer: Of its parameters.
        averager: Whose warm-up decides.
        subgroup: The ranks that average gradients after the warm-up; None for those of this node.
        optimizer_state: What each round does with entries of the optimizer's state, see `attach`.

    Attributes:
        ddp_model: The model.
        handle: What `attach` returned.
        state: What decides for the hook.

    Raises:
        InvalidTypeError: an argument is of the wrong type.
        InvalidValueError: the averager already serves an optimizer, or a rank is not in its group.

    References:
        Lin et al., `Don't use large mini-batches, use local SGD <https://arxiv.org/abs/1808.07217>`_.

    Example:
        >>> ddp_model = torch.nn.parallel.DistributedDataParallel(model, forward_sync_buffers=False)
        >>> averager = averagers.PeriodicModelAverager(period=16, warmup_steps=500)
        >>> training = averagers.PostLocalSGD(ddp_model, optimizer, averager)
        >>> training.finish()  # after the last step
    """

    def __init__(
        self,
        ddp_model: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        averager: Any,
        *,
        subgroup: dist.ProcessGroup | None = None,
        optimizer_state: Mapping[str, str | int] | None = None,
    ) -> None:
        if not isinstance(ddp_model, DistributedDataParallel):
            raise InvalidTypeError(f"ddp_model must be a DistributedDataParallel, got {type(ddp_model).__name__}")
        check_pair(optimizer, averager)
        self.ddp_model = ddp_model
        self.state = PostLocalSGDState(averager, subgroup)
        self.handle = attach(optimizer, averager, optimizer_state=optimizer_state)
        ddp_model.register_comm_hook(self.state, post_local_sgd_hook)

    def finish(self) -> None:
        """End the run: average once more among all ranks, if the last step did not."""
        self.handle.finish()

    def join(self) -> None:
        """End the run on a rank that is out of data, while others may not be: see ``averager.join``."""
        self.handle.join()

    def remove(self) -> None:
        """Take the averager off the optimizer; DDP keeps its hook."""
        self.handle.remove()

    def __enter__(self) -> PostLocalSGD:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.handle.__exit__(kind, error, traceback)
