"""`DistributedState`: an averager in a distributed checkpoint."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from averagers.arguments import check_averager_state
from averagers.engine import ScheduledAverager
from averagers.errors import InvalidTypeError, InvalidValueError
from averagers.mixing.mixers import Mixing
from averagers.reduction.anchor import Anchor
from averagers.reduction.groups import Group
from averagers.reduction.pytorch import PYTORCH
from averagers.reduction.selection import Selection, named_tensors, shaped_like
from averagers.training.attach import Attachment
from averagers.training.optimizer import ModelAveragingOptimizer

_SHARED_ENTRIES = ("step", "configuration", "once_trainable", "num_rounds", "one_model_at")
_SIZES = "period_group_size_dict"


@final
class DistributedState(Stateful):
    """What ``torch.distributed.checkpoint`` saves and loads of an averager: its step, anchors and residuals.

    An averager's own ``state_dict()`` is this rank's alone. Here every tensor has a name that tells whose it is. The
    anchor of all ranks is saved once, as the parameters are: whole, or as the same ``DTensor`` shards; it loads onto
    any number of ranks onto which the parameters do. What belongs to smaller groups or to single ranks (the anchors of
    inner levels, residuals of error feedback) loads onto the same number of ranks only: on another one ``load`` says
    which entry is missing. Where weights of steps were given, those since the last round are not saved.

    Args:
        averager: An averager, to which the loop gives the parameters in the order of ``named_params``; or what
            `attach` returned, or a `ModelAveragingOptimizer`, whose order is known.
        named_params: The names of what is averaged: ``model.named_parameters()``.

    Raises:
        InvalidTypeError: ``averager`` is none of these, or ``named_params`` no parameters.
        InvalidValueError: a parameter has no name, two have the same, or they are not what is averaged.

    Example:
        >>> state = {"model": model, "averager": averagers.DistributedState(averager, model.named_parameters())}
        >>> _ = torch.distributed.checkpoint.save(state, checkpoint_id=path)
        >>> torch.distributed.checkpoint.load(state, checkpoint_id=path)
    """

    def __init__(
        self, averager: ScheduledAverager | Attachment | ModelAveragingOptimizer, named_params: Iterable[Any]
    ) -> None:
        source = getattr(averager, "averager", averager)
        if not isinstance(source, ScheduledAverager):
            raise InvalidTypeError(
                "averager must be a PeriodicModelAverager or HierarchicalModelAverager of averagers, or what attach "
                f"returned, got {type(source).__name__}"
            )
        if source.has_overlap or source.has_fragments:
            raise InvalidValueError(
                "averager has overlap or fragments, and a distributed checkpoint holds neither rounds under way nor "
                "anchors in fragments: save its state_dict() on each rank"
            )
        self._averager = source
        named = list(named_params) if isinstance(named_params, Iterator) else named_params
        self._params: Callable[[], Any] = getattr(averager, "params", lambda: named)
        selection, _ = source.anchors_of(self._params())
        name_of = {id(tensor): name for name, tensor, _ in named_tensors(named, Tensor)}
        self._names = [
            name_of.get(id(whole), description.name)
            for whole, description in zip(selection.wholes, selection.listing.descriptions, strict=True)
        ]
        unnamed = next((name for name in self._names if name.startswith("#")), None)
        if unnamed is not None:
            raise InvalidValueError(
                "named_params must name everything that is averaged, because ranks may hold different parameters: give "
                f"model.named_parameters(); tensor {unnamed} has no name"
            )
        twice = [name for name, times in Counter(self._names).items() if times > 1]
        if twice:
            raise InvalidValueError(f"named_params must have different names, got {twice[0]} twice")

    def state_dict(self) -> dict[str, Any]:
        """Return the entries; their tensors are the averager's own memory, into which a checkpoint is loaded."""
        plain = self._averager.state_dict()
        state: dict[str, Any] = {name: plain[name] for name in _SHARED_ENTRIES}
        selection, levels = self._averager.anchors_of(self._params())
        for level, (group, anchored) in enumerate(levels):
            if anchored is not None:
                anchor, mixing = anchored
                state[f"anchor_{level}.moved_at"] = anchor.moved_at
                is_top = level == len(levels) - 1
                for prefix, tensors in _tensors(selection, anchor, mixing).items():
                    for name, whole, tensor in zip(self._names, selection.wholes, tensors, strict=True):
                        if tensor is not None:
                            state |= _entry(f"{prefix}_{level}", name, tensor, whole, group, is_top=is_top)
                state.update(_residual_entries(f"residual_{level}", anchor, group))
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the entries of a checkpoint, whose tensors are in place already.

        Raises:
            StateDictError: an entry is missing or wrong, or the configuration is another one.
        """
        _, levels = self._averager.anchors_of(self._params())
        anchors = {level: anchored[0] for level, (_, anchored) in enumerate(levels) if anchored is not None}
        for anchor in anchors.values():
            anchor.moved_at = None  # should the checkpoint be refused: their memory is not what it was
        plain = self._averager.state_dict()
        state = {name: state_dict[name] for name in _SHARED_ENTRIES if name in state_dict}
        # These are this rank's alone, and were not saved.
        state["weights"] = [None] * len(plain["weights"])
        state["num_steps_since"] = [1] * len(plain["weights"])
        own = plain["configuration"]
        if _SIZES in own and _periods(state.get("configuration")) == _periods(own):
            # What belongs to groups of one size has that in its name.
            state["configuration"] = {**state["configuration"], _SIZES: own[_SIZES]}
        check_averager_state(state, own, len(plain["weights"]))
        for level, anchor in anchors.items():
            anchor.moved_at = state_dict[f"anchor_{level}.moved_at"]
        self._averager.load_state_dict({**self._averager.state_dict(), **state})


def _periods(configuration: Any) -> list[int] | None:
    """Return the periods of a hierarchy; None of anything else."""
    sizes = configuration.get(_SIZES) if isinstance(configuration, Mapping) else None
    return None if sizes is None else list(ast.literal_eval(sizes))


def _tensors(selection: Selection, anchor: Anchor, mixing: Mixing | None) -> dict[str, list[Tensor | None]]:
    """Return the anchor of each tensor, and what moves it, in the tensor's shape; None of those without."""
    reals = PYTORCH.operations.reals
    values = [
        None if flat is None else shaped_like(reals(tensor), flat)
        for tensor, flat in zip(selection.tensors, anchor.values, strict=True)
    ]
    buffers = () if mixing is None else mixing.buffers()
    if buffers is None:
        raise InvalidValueError(
            "averager has mixer=Outer, whose optimizer a distributed checkpoint does not hold: use Nesterov, or save "
            "the averager's state_dict() on each rank"
        )
    if not buffers:
        return {"anchor": values}
    rest = iter(buffers)
    return {"anchor": values, "momentum": [None if one is None else next(rest) for one in values]}


def _entry(prefix: str, name: str, values: Tensor, whole: Tensor, group: Group, *, is_top: bool) -> dict[str, Tensor]:
    """Return ``values`` under a name that all who hold the same have in common."""
    if whole.is_complex():
        values = torch.view_as_complex(values)
    if is_top and isinstance(whole, DTensor):
        if values.device.type != whole.device_mesh.device_type:
            raise InvalidValueError(
                f"averager has offload={values.device.type!r}, and the anchor of a DTensor on "
                f"{whole.device_mesh.device_type} cannot be saved as such from there: save the averager's state_dict() "
                "on each rank, or leave offload out"
            )
        mesh, placements = whole.device_mesh, whole.placements
        shape, stride = whole.shape, whole.stride()
        values = DTensor.from_local(values, mesh, placements, run_check=False, shape=shape, stride=stride)
    elif not is_top or group.size < dist.get_world_size():
        prefix += f".of {group.size} ranks from rank {group.ranks[0]}"
    return {f"{prefix}.{name}": values}


def _residual_entries(prefix: str, anchor: Anchor, group: Group) -> Iterator[tuple[str, Tensor]]:
    """Yield what this rank alone has left out so far."""
    for bucket, residuals in enumerate(anchor.residuals):
        for place, residual in residuals.items():
            yield f"{prefix}.rank {group.rank} in groups of {group.size}.{bucket}.{place}", residual
