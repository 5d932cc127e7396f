"""The framework that a shared test runs on: modules that stand for it, in the test and on its ranks.

``lib`` is ``torch`` or ``tensorplay``, ``dist`` its ``distributed`` package, ``averagers`` what its users import.
"""

from __future__ import annotations

import importlib
from typing import Any

MODULES = {
    "torch": {"lib": "torch", "dist": "torch.distributed", "averagers": "averagers"},
    "tensorplay": {"lib": "tensorplay", "dist": "tensorplay.distributed", "averagers": "averagers.tensorplay"},
}

_in_use = ["torch"]


def use(name: str) -> None:
    """Let the modules below stand for this framework's from now on."""
    _in_use[0] = name


def current() -> str:
    """Return the name of the framework in use."""
    return _in_use[0]


class _Module:
    """Stands for a module of the framework in use."""

    def __init__(self, role: str) -> None:
        self._role = role

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(MODULES[current()][self._role]), name)


lib = _Module("lib")
dist = _Module("dist")
averagers = _Module("averagers")


def bits(tensor: Any) -> bytes:
    """Return the tensor's elements as bytes, which tell -0.0 from 0.0 and one NaN from another."""
    plain = tensor.detach().clone().contiguous().reshape(-1)
    if not plain.numel():
        return b""
    return bytes((lib.view_as_real(plain) if plain.is_complex() else plain).reshape(-1).view(lib.uint8).tolist())


def num_groups() -> int:
    """Return how many process groups this rank has."""
    if current() == "torch":
        return len(importlib.import_module("torch.distributed.distributed_c10d")._world.pg_map)
    return len(importlib.import_module("tensorplay.distributed.distributed_core")._groups)
