"""Post-local SGD: see docs/recipes/post_local_sgd.md.

torchrun --nproc-per-node 4 examples/recipes/post_local_sgd.py
"""

from __future__ import annotations

from typing import Any

import torch
from task import train
from torch import nn

import averagers


def recipe(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> Any:
    ddp_model = nn.parallel.DistributedDataParallel(model, forward_sync_buffers=False)
    averager = averagers.PeriodicModelAverager(period=8, warmup_steps=num_steps // 5)
    return averagers.PostLocalSGD(ddp_model, optimizer, averager)


if __name__ == "__main__":
    train(recipe)
