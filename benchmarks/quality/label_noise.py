"""The task of `post_local.py` and `quadratic_rule.py`: a two-layer diagonal network with noise on its labels.

``beta = u * u - v * v`` fits 40 samples of 100 numbers whose labels get fresh noise each time they are drawn; the
truth has 5 entries. The noise of training drives the network to flat, here sparse, solutions. Measured is the squared
distance of the mean model from the truth. Eight replicas of one sample a step are computed together in one process
and averaged by the engine; data parallel is one model with their mean gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from experiment import train_together

import averagers

NUM_REPLICAS = 8
NUM_STEPS = 20_000
RATES = (0.005, 0.01, 0.02, 0.04, 0.08)
SEEDS = (1, 2, 3)


@dataclass
class Task:
    """The data of a seed, and replicas at the start."""

    seed: int
    num_models: int

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(self.seed)
        self.inputs = torch.randn(40, 100, generator=self.random)
        self.truth = torch.zeros(100)
        self.truth[:5] = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
        self.labels = self.inputs @ self.truth
        self.u = torch.full((self.num_models, 100), 0.3)
        self.v = torch.full((self.num_models, 100), 0.3)

    def step(self, lr: float) -> None:
        """Step each model on its share of the eight samples."""
        drawn = torch.randint(40, (self.num_models, NUM_REPLICAS // self.num_models), generator=self.random)
        noise = torch.randint(2, drawn.shape, generator=self.random) * 2.0 - 1.0
        inputs = self.inputs[drawn]
        beta = self.u * self.u - self.v * self.v
        error = (inputs * beta[:, None]).sum(2) - self.labels[drawn] - noise
        gradient = (error[:, :, None] * inputs).mean(1)
        self.u, self.v = self.u.sub_(2 * lr * self.u * gradient), self.v.add_(2 * lr * self.v * gradient)

    def distance(self) -> float:
        """Return the squared distance of the mean model from the truth."""
        u, v = self.u.mean(0), self.v.mean(0)
        return float((u * u - v * v - self.truth).square().sum())


def constant(peak: float) -> Callable[[int], float]:
    return lambda step: peak


def cosine(peak: float) -> Callable[[int], float]:
    return lambda step: peak * 0.5 * (1 + math.cos(math.pi * step / NUM_STEPS)) + 1e-6


def data_parallel(seed: int, lr_at: Callable[[int], float]) -> tuple[float, int]:
    task = Task(seed, 1)
    for step in range(NUM_STEPS):
        task.step(lr_at(step))
    return task.distance(), NUM_STEPS


def local(seed: int, lr_at: Callable[[int], float], schedule: averagers.Schedule) -> tuple[float, int]:
    task = Task(seed, 1)
    for step in range(schedule.warmup_steps):
        task.step(lr_at(step))
    start = [task.u, task.v]
    random = task.random.get_state()
    task = Task(seed, NUM_REPLICAS)
    task.random.set_state(random)
    task.u, task.v = (one.repeat(NUM_REPLICAS, 1) for one in start)
    rounds = train_together(
        [task.u, task.v],
        lambda group: averagers.PeriodicModelAverager(schedule=schedule, process_group=group),
        lambda step: schedule.due(step) is not None,
        lambda step: task.step(lr_at(step)) if step >= schedule.warmup_steps else None,
        NUM_STEPS,
    )
    return task.distance(), schedule.warmup_steps + rounds


def best_rate(run: Callable[[int, float], tuple[float, int]]) -> float:
    """Return the learning rate with the smallest error, on a seed of its own; the same sweep for every way."""
    return min(RATES, key=lambda rate: finite(run(100, rate)[0]))


def finite(error: float) -> float:
    """Return the error, or infinity where training diverged."""
    return error if math.isfinite(error) else math.inf
