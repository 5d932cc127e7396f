"""DiLoCo: see docs/recipes/diloco.md.

torchrun --nproc-per-node 4 examples/recipes/diloco.py
"""

from __future__ import annotations

from typing import Any

import torch
from task import train
from torch import nn

import averagers


def recipe(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> Any:
    averager = averagers.PeriodicModelAverager(
        50, warmup_steps=num_steps // 5, mixer=averagers.Nesterov(lr=0.7, momentum=0.9)
    )
    return averagers.attach(optimizer, averager)


if __name__ == "__main__":
    train(recipe)
