"""Sparse payloads: see docs/recipes/sparse.md.

torchrun --nproc-per-node 4 examples/recipes/sparse.py
"""

from __future__ import annotations

from typing import Any

import torch
from task import train
from torch import nn

import averagers


def recipe(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> Any:
    averager = averagers.PeriodicModelAverager(15, codec=averagers.TopK(keep=64, error_feedback=0.95))
    return averagers.attach(optimizer, averager)


if __name__ == "__main__":
    train(recipe)
