"""PyTorch as the engine sees it."""

from __future__ import annotations

from averagers.reduction.groups import TorchGroups
from averagers.reduction.interface import Framework
from averagers.reduction.reducer import TorchReducer

PYTORCH = Framework(groups=TorchGroups(), new_reducer=TorchReducer)
