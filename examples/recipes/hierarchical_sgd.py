"""Hierarchical SGD: see docs/recipes/hierarchical_sgd.md.

torchrun --nproc-per-node 4 examples/recipes/hierarchical_sgd.py
"""

from __future__ import annotations

from typing import Any

import torch
from task import train
from torch import nn

import averagers


def recipe(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> Any:
    world_size = torch.distributed.get_world_size()
    averager = averagers.HierarchicalModelAverager({4: max(1, world_size // 2), 16: world_size})
    return averagers.attach(optimizer, averager)


if __name__ == "__main__":
    train(recipe)
