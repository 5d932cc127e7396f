"""DiLoCo between nodes: see docs/recipes/diloco_between_nodes.md.

torchrun --nproc-per-node 4 examples/recipes/diloco_between_nodes.py
"""

from __future__ import annotations

from typing import Any

import torch
from task import train
from torch import nn

import averagers


def recipe(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> Any:
    world_size = torch.distributed.get_world_size()
    averager = averagers.HierarchicalModelAverager(
        {2: max(1, world_size // 2), 50: world_size},
        mixer={50: averagers.Nesterov(lr=0.7, momentum=0.9)},
        codec={50: averagers.Int8()},
    )
    return averagers.attach(optimizer, averager)


if __name__ == "__main__":
    train(recipe)
