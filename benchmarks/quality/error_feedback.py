"""Error feedback rescues sparse payloads.

    python benchmarks/quality/error_feedback.py

A quadratic of 200 dimensions with curvatures from 0.01 to 1; four replicas take 10 local steps between 300 rounds
with noisy gradients, SGD 0.05. Each sends its 8 largest of 200 displacements. Measured is the mean loss of the last
100 rounds, three seeds. Replicas are computed together in one process and averaged by the engine. Takes about half a
minute.
"""

from __future__ import annotations

import sys

import torch
from experiment import Claim, train_together

import averagers

NUM_REPLICAS = 4
PERIOD = 10
NUM_ROUNDS = 300
SEEDS = (1, 2, 3)


def losses(codec: averagers.Codec | None, seed: int) -> list[float]:
    """Return the loss of the first replica before each round."""
    random = torch.Generator().manual_seed(seed)
    curvature = torch.logspace(-2, 0, 200)
    weight = torch.full((NUM_REPLICAS, 200), 10.0)
    found = []

    def step(number: int) -> None:
        gradient = curvature * weight + torch.randn(weight.shape, generator=random)
        weight.sub_(gradient, alpha=0.05)
        if number % PERIOD == PERIOD - 1:
            found.append(float((curvature * weight[0].square()).sum() / 2))

    schedule = averagers.Every(PERIOD)
    train_together(
        [weight],
        lambda group: averagers.PeriodicModelAverager(schedule=schedule, process_group=group, codec=codec),
        lambda number: schedule.due(number) is not None,
        step,
        PERIOD * NUM_ROUNDS,
    )
    return found


WAYS = {
    "float32": None,
    "top 8 of 200, decay 0.95": averagers.TopK(8),
    "top 8 of 200, no error feedback": averagers.TopK(8, error_feedback=None),
}


def main() -> int:
    torch.set_num_threads(1)
    claim = Claim("error_feedback", "error feedback rescues sparse payloads", ("round", "loss"))
    tails = {}
    for way, codec in WAYS.items():
        runs = [losses(codec, seed) for seed in SEEDS]
        tails[way] = sum(sum(run[-100:]) for run in runs) / (100 * len(runs))
        claim.rows.append({"way": way, "tail loss": tails[way]})
        claim.curves[way] = [(round_, runs[0][round_]) for round_ in range(0, NUM_ROUNDS, 2)]
    _, with_feedback, without = tails.values()
    ratio = with_feedback / without
    claim.checks.append((f"tail loss {ratio:.3f} of that without error feedback, at most 0.1", ratio <= 0.1))
    return claim.report()


if __name__ == "__main__":
    sys.exit(main())
