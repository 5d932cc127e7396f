"""The quadratic rule: see docs/recipes/quadratic_rule.md.

torchrun --nproc-per-node 4 examples/recipes/quadratic_rule.py
"""

from __future__ import annotations

import math
from typing import Any

import torch
from task import train
from torch import nn

import averagers


def recipe(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> Any:
    peak = optimizer.param_groups[0]["lr"]

    def lr_at(step: int) -> float:
        return peak * 0.5 * (1 + math.cos(math.pi * step / num_steps))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_at(step) / peak)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    schedule = averagers.QuadraticRule(alpha=2 * peak, min_period=4, lr_at=lr_at, total_steps=num_steps)
    return averagers.attach(optimizer, averagers.PeriodicModelAverager(schedule=schedule))


if __name__ == "__main__":
    train(recipe)
