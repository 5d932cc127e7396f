"""A second device on a machine that has none: memory of the CPU behind tensors that may not meet the CPU's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from averagers.mixing.overlap import Flight
from averagers.reduction.pytorch import PYTORCH
from averagers.reduction.reducer import Reducer

DEVICE = torch.device("meta", 0)
"""Its name; torch needs no driver for it."""

_CROSSING = {"aten::copy_", "aten::_to_copy", "aten::_foreach_copy_"}


class _Elsewhere(torch.Tensor):
    """A tensor on the second device."""

    is_meta = False  # type: ignore[assignment]  # it has values

    @staticmethod
    def __new__(cls, memory: torch.Tensor) -> Any:
        shape, stride, offset = memory.shape, memory.stride(), memory.storage_offset()
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, strides=stride, storage_offset=offset, dtype=memory.dtype, device=DEVICE
        )

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory

    def data_ptr(self) -> int:
        return self.memory.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})


def _run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on memory of the CPU, if its tensors are on one device, or it copies between them."""
    found: list[torch.Tensor] = []
    tree_map_only(torch.Tensor, found.append, [args, kwargs])
    known = {id(tensor.memory if isinstance(tensor, _Elsewhere) else tensor): tensor for tensor in found}
    is_elsewhere = any(isinstance(tensor, _Elsewhere) for tensor in found)
    is_mixed = is_elsewhere and any(not isinstance(tensor, _Elsewhere) and tensor.dim() for tensor in found)
    name = function._schema.name
    assert not is_mixed or name in _CROSSING, f"{name} was given tensors on two devices"
    if kwargs.get("device") is not None:
        is_elsewhere = torch.device(kwargs["device"]).type == DEVICE.type
        kwargs = {**kwargs, "device": torch.device("cpu")}
    bare_args, bare_kwargs = tree_map_only(_Elsewhere, lambda one: one.memory, [args, kwargs])

    def placed(result: torch.Tensor) -> torch.Tensor:
        if id(result) in known:  # written in place
            return known[id(result)]
        return _Elsewhere(result) if is_elsewhere else result

    return tree_map_only(torch.Tensor, placed, function(*bare_args, **bare_kwargs))


class _Factory(TorchDispatchMode):
    """Makes new tensors where they are asked for."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})


@pytest.fixture
def second_device(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Let replicas average on ``DEVICE``; returns what lets a thread of theirs make tensors there."""
    operations: Any = type(PYTORCH.operations)
    monkeypatch.setattr(operations, "ordinary_types", operations.ordinary_types | {_Elsewhere})
    monkeypatch.setattr(Reducer, "check", lambda *arguments: None)  # replicas meet on any device, without saying so
    begin = Flight.begin

    def begin_there(flight: Flight, work: Callable[[], Any], *, after: Flight | None) -> None:
        def work_there() -> Any:
            with _Factory():
                return work()

        begin(flight, work_there, after=after)

    monkeypatch.setattr(Flight, "begin", begin_there)
    return _Factory
