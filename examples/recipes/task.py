"""What the recipes train: a small network on a made-up problem, so that each script shows its own lines only."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def batches(rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches for ever, others on each rank, of one function of 8 numbers."""
    truth = torch.randn(8, 1, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(rank)
    while True:
        inputs = torch.randn(32, 8, generator=generator)
        yield inputs, torch.tanh(inputs @ truth) + 0.1 * torch.randn(32, 1, generator=generator)


def train(recipe: Callable[[nn.Module, torch.optim.Optimizer, int], Any], num_steps: int | None = None) -> float:
    """Train with ``recipe``, which attaches what it needs and returns a context that finishes it.

    Args:
        recipe: Called with the model, the optimizer and the number of steps.
        num_steps: How many; None for what the command line says.

    Returns:
        The training loss of the last ten steps.
    """
    if num_steps is None:
        parser = argparse.ArgumentParser()
        parser.add_argument("--steps", type=int, default=400)
        num_steps = parser.parse_args().steps
    is_ours = not dist.is_initialized()
    if is_ours:
        dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same first weights on every rank
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = batches(dist.get_rank())
    losses = []
    with recipe(model, optimizer, num_steps) as training:
        forward = getattr(training, "ddp_model", model)
        for _ in range(num_steps):
            inputs, targets = next(data)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(forward(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    last = sum(losses[-10:]) / len(losses[-10:])
    if dist.get_rank() == 0:
        print(f"training loss of the last steps: {last:.4f}")
    if is_ours:
        dist.destroy_process_group()
    return last
