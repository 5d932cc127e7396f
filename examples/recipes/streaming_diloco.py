"""Streaming DiLoCo: see docs/recipes/streaming_diloco.md.

torchrun --nproc-per-node 4 examples/recipes/streaming_diloco.py
"""

from __future__ import annotations

from typing import Any

import torch
from task import train
from torch import nn

import averagers


def recipe(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> Any:
    averager = averagers.PeriodicModelAverager(
        40,
        mixer=averagers.Nesterov(lr=0.7, momentum=0.9),
        codec=averagers.Int4(),
        fragments=4,
        overlap=averagers.Delayed(steps=5, keep=0.5),
    )
    return averagers.attach(optimizer, averager)


if __name__ == "__main__":
    train(recipe)
