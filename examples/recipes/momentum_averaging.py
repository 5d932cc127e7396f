"""Averaging the moments too: see docs/recipes/momentum_averaging.md.

torchrun --nproc-per-node 4 examples/recipes/momentum_averaging.py
"""

from __future__ import annotations

from typing import Any

import torch
from task import train
from torch import nn

import averagers


def recipe(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> Any:
    averager = averagers.PeriodicModelAverager(8)
    return averagers.attach(optimizer, averager, optimizer_state={"exp_avg": 3, "exp_avg_sq": 6})


if __name__ == "__main__":
    train(recipe)
