"""SlowMo: see docs/recipes/slowmo.md.

torchrun --nproc-per-node 4 examples/recipes/slowmo.py
"""

from __future__ import annotations

from typing import Any

import torch
from task import train
from torch import nn

import averagers


def recipe(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> Any:
    num_rounds = num_steps // 12
    averager = averagers.PeriodicModelAverager(12, mixer=averagers.SlowMo(momentum=0.6, num_rounds=num_rounds))
    return averagers.attach(optimizer, averager)  # from which it reads the learning rate


if __name__ == "__main__":
    train(recipe)
