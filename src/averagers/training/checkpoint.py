"""`DistributedState`: an averager in a distributed checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from averagers.arguments import check_averager_state
from averagers.engine import ScheduledAverager
from averagers.errors import InvalidTypeError, InvalidValueError
from averagers.reduction.anchor import Anchor
from averagers.reduction.groups import Group
from averagers.reduction.pytorch import PYTORCH
from averagers.reduction.reducer import Selection
from averagers.reduction.selection import shaped_like

_SHARED_ENTRIES = ("step", "configuration", "once_trainable")


@final
class DistributedState(Stateful):
    """What ``torch.distributed.checkpoint`` saves and loads of an averager: its step, anchors and residuals.

    An averager's own ``state_dict()`` is this rank's alone. Here every tensor has a name that tells whose it is. The
    anchor of all ranks is saved once, as the parameters are: whole, or as the same ``DTensor`` shards; it loads onto
    any number of ranks onto which the parameters do. What belongs to smaller groups or to single ranks (the anchors of
    inner levels, residuals of error feedback) loads onto the same number of ranks only: on another one ``load`` says
    which entry is missing. Where weights of steps were given, those since the last round are not saved.

    Args:
        averager: An averager.
        params: What it averages, with names: ``model.named_parameters()``.

    Raises:
        InvalidTypeError: ``averager`` is not one of averagers, or ``params`` is not what it averages.
        InvalidValueError: a parameter has no name, or two have the same.

    Example:
        >>> state = {"model": model, "averager": averagers.DistributedState(averager, model.named_parameters())}
        >>> _ = torch.distributed.checkpoint.save(state, checkpoint_id=path)
        >>> torch.distributed.checkpoint.load(state, checkpoint_id=path)
    """

    def __init__(self, averager: ScheduledAverager, params: Iterable[Any]) -> None:
        if not isinstance(averager, ScheduledAverager):
            raise InvalidTypeError(
                "averager must be a PeriodicModelAverager or HierarchicalModelAverager of averagers, got "
                f"{type(averager).__name__}"
            )
        self._averager = averager
        self._params = list(params) if isinstance(params, Iterator) else params
        names = [one.name for one in averager.anchors_of(self._params)[0].listing.descriptions]
        unnamed = next((name for name in names if name.startswith("#")), None)
        if unnamed is not None:
            raise InvalidValueError(
                f"params must have names, because ranks may hold different ones: give model.named_parameters(), got "
                f"{unnamed}"
            )
        twice = [name for name, times in Counter(names).items() if times > 1]
        if twice:
            raise InvalidValueError(f"params must have different names, got {twice[0]} twice")

    def state_dict(self) -> dict[str, Any]:
        """Return the entries; their tensors are the averager's own memory, into which a checkpoint is loaded."""
        plain = self._averager.state_dict()
        state: dict[str, Any] = {name: plain[name] for name in _SHARED_ENTRIES}
        selection, levels = self._averager.anchors_of(self._params)
        for level, (group, anchor) in enumerate(levels):
            if anchor is not None:
                state[f"anchor_{level}.moved_at"] = anchor.moved_at
                is_top = level == len(levels) - 1
                state.update(_anchor_entries(f"anchor_{level}", selection, anchor, group, is_top=is_top))
                state.update(_residual_entries(f"residual_{level}", anchor, group))
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the entries of a checkpoint, whose tensors are in place already.

        Raises:
            StateDictError: an entry is missing or wrong, or the configuration is another one.
        """
        _, levels = self._averager.anchors_of(self._params)
        for _, anchor in levels:
            if anchor is not None:
                anchor.moved_at = None  # should the checkpoint be refused: their memory is not what it was
        plain = self._averager.state_dict()
        state = {name: state_dict[name] for name in _SHARED_ENTRIES if name in state_dict}
        state["weights"] = [None] * len(plain["weights"])
        check_averager_state(state, plain["configuration"], len(plain["weights"]))
        for level, (_, anchor) in enumerate(levels):
            if anchor is not None:
                anchor.moved_at = state_dict[f"anchor_{level}.moved_at"]
        self._averager.load_state_dict({**self._averager.state_dict(), **state})


def _anchor_entries(
    prefix: str, selection: Selection, anchor: Anchor, group: Group, *, is_top: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield the anchor of each tensor under a name that all who hold the same have in common."""
    for flat, tensor, whole, description in zip(
        anchor.values, selection.tensors, selection.wholes, selection.listing.descriptions, strict=True
    ):
        if flat is None:
            continue
        values = shaped_like(PYTORCH.operations.reals(tensor), flat)
        if tensor.is_complex():
            values = torch.view_as_complex(values)
        if is_top and isinstance(whole, DTensor):
            mesh, placements = whole.device_mesh, whole.placements
            sharded = DTensor.from_local(
                values, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
            )
            yield f"{prefix}.{description.name}", sharded
        elif is_top and group.size == dist.get_world_size():
            yield f"{prefix}.{description.name}", values
        else:
            yield f"{prefix}.of {group.size} ranks from rank {group.ranks[0]}.{description.name}", values


def _residual_entries(prefix: str, anchor: Anchor, group: Group) -> Iterator[tuple[str, Tensor]]:
    """Yield what this rank alone has left out so far."""
    for bucket, residuals in enumerate(anchor.residuals):
        for place, residual in residuals.items():
            yield f"{prefix}.rank {group.rank} in groups of {group.size}.{bucket}.{place}", residual
