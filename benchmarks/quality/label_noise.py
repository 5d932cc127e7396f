"""The task of `post_local.py` and `quadratic_rule.py`: a two-layer diagonal network with noise on its labels.

``beta = u * u - v * v`` fits 40 samples of 100 numbers whose labels get fresh noise each time they are drawn; the
truth has 5 entries. The noise of training drives the network to flat, here sparse, solutions. Measured is the squared
distance of the mean model from the truth. Eight replicas are computed together in one process and averaged by the
engine, for all learning rates and seeds at once; data parallel is one model with their mean gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from experiment import train_together
from torch import Tensor

import averagers

NUM_REPLICAS = 8
NUM_STEPS = 20_000
# Samples of a replica and step, with which a batch of all replicas is large.
LARGE = 32
RATES = tuple(0.01 * 2 ** (step / 2) for step in range(12))
TUNING_SEEDS = (101, 102, 103)
SEEDS = (1, 2, 3)


@dataclass
class Task:
    """The data of each seed, and at first one model for each learning rate and seed.

    Attributes:
        num_samples: How many samples a replica draws at a step.
    """

    num_samples: int

    def __post_init__(self) -> None:
        seeds = (*TUNING_SEEDS, *SEEDS)
        self.random = torch.Generator().manual_seed(0)
        self.inputs = torch.stack(
            [torch.randn(40, 100, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        )
        self.truth = torch.zeros(100)
        self.truth[:5] = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
        self.labels = self.inputs @ self.truth
        self.rates = torch.tensor(RATES)[:, None, None]
        self.u = torch.full((1, len(RATES), len(seeds), 100), 0.3)
        self.v = self.u.clone()

    def part(self) -> None:
        """Go on with a model for each replica."""
        self.u, self.v = (one.repeat(NUM_REPLICAS, 1, 1, 1) for one in (self.u, self.v))

    def step(self, share: float) -> None:
        """Step each model on its share of the samples, at this share of its learning rate."""
        num_models = len(self.u)
        shape = (num_models, len(self.inputs), self.num_samples * NUM_REPLICAS // num_models)
        drawn = torch.randint(40, shape, generator=self.random)
        noise = torch.randint(2, shape, generator=self.random) * 2.0 - 1.0
        # Of each of the 40 samples, how often it was drawn, and the sum of its noise.
        times, noises = (
            torch.zeros(*shape[:2], 40).scatter_add_(2, drawn, what) for what in (torch.ones(shape), noise)
        )
        beta = self.u * self.u - self.v * self.v
        error = torch.einsum("mrsf,snf->mrsn", beta, self.inputs) - self.labels
        weighted = (times[:, None] * error - noises[:, None]) / shape[2]
        gradient = torch.einsum("mrsn,snf->mrsf", weighted, self.inputs)
        step = 2 * share * self.rates * gradient
        self.u, self.v = self.u.sub_(self.u * step), self.v.add_(self.v * step)

    def distances(self) -> Tensor:
        """Return the squared distance of the mean model from the truth, by learning rate and seed."""
        u, v = self.u.mean(0), self.v.mean(0)
        return (u * u - v * v - self.truth).square().sum(-1).nan_to_num(math.inf, math.inf)


class Outcome(NamedTuple):
    """What a way of training came to.

    Attributes:
        chosen: The learning rate with the smallest error on seeds for tuning; the same sweep for every way.
        errors: On each of three others, at that learning rate.
        means: Their mean at each learning rate.
        num_rounds: How often gradients or models were averaged.
    """

    chosen: float
    errors: list[float]
    means: list[float]
    num_rounds: int

    @property
    def error(self) -> float:
        """The mean at the learning rate chosen."""
        return sum(self.errors) / len(self.errors)


def trained(
    num_samples: int, schedule: averagers.Schedule | None, share_at: Callable[[int], float] = lambda step: 1.0
) -> Outcome:
    """Train data parallel until the schedule's warm-up ends, all the time without one, then by replicas."""
    task = Task(num_samples)
    start = NUM_STEPS if schedule is None else schedule.warmup_steps
    for step in range(start):
        task.step(share_at(step))
    num_rounds = start
    if schedule is not None:
        task.part()
        num_rounds += train_together(
            [task.u, task.v],
            lambda group: averagers.PeriodicModelAverager(schedule=schedule, process_group=group),
            lambda step: schedule.due(step) is not None,
            lambda step: task.step(share_at(step)) if step >= start else None,
            NUM_STEPS,
        )
    tuning, others = task.distances().split([len(TUNING_SEEDS), len(SEEDS)], dim=1)
    best = int(tuning.mean(1).argmin())
    return Outcome(RATES[best], others[best].tolist(), others.mean(1).tolist(), num_rounds)


def cosine(step: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * step / NUM_STEPS)) + 1e-4
