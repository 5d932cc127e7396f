"""At the same traffic between groups, a hierarchy beats a flat period; small groups help, large ones more.

    python benchmarks/quality/hierarchy.py

Softmax regression on ten Gaussian classes in 32 dimensions, and each of ten replicas sees one class alone: 1,000 steps
of 10 samples, SGD 0.1. Groups average every 5 steps within and every 50 steps among all. Measured is the training loss
of the mean model, the mean of three seeds. Replicas are computed together in one process and averaged by the engine.
Takes about half a minute.
"""

from __future__ import annotations

import sys

import torch
from experiment import Claim, train_together
from torch.nn import functional as F

import averagers

NUM_CLASSES = 10
NUM_STEPS = 1000
SEEDS = (1, 2, 3)


def loss(sizes: dict[int, int], seed: int) -> float:
    """Return the training loss of the mean model, where groups of these sizes average at these periods."""
    random = torch.Generator().manual_seed(seed)
    centers = 0.65 * torch.randn(NUM_CLASSES, 32, generator=random)
    inputs = centers[:, None] + torch.randn(NUM_CLASSES, 200, 32, generator=random)
    labels = torch.arange(NUM_CLASSES)
    weight = torch.zeros(NUM_CLASSES, NUM_CLASSES, 33)

    def step(number: int) -> None:
        drawn = torch.randint(200, (NUM_CLASSES, 10), generator=random)
        batch = torch.stack([inputs[label, drawn[label]] for label in labels])
        batch = torch.cat([batch, torch.ones(NUM_CLASSES, 10, 1)], 2)
        error = torch.softmax(batch @ weight.transpose(1, 2), 2)
        error[labels, :, labels] -= 1
        weight.sub_(error.transpose(1, 2) @ batch, alpha=0.1 / 10)

    train_together(
        [weight],
        lambda group: averagers.HierarchicalModelAverager(sizes, process_group=group),
        lambda number: any(number % period == 0 for period in sizes),
        step,
        NUM_STEPS,
    )
    samples = torch.cat([inputs, torch.ones(NUM_CLASSES, 200, 1)], 2).flatten(0, 1)
    return float(F.cross_entropy(samples @ weight[0].T, labels.repeat_interleave(200)))


WAYS = {
    "flat, every 50": {50: 10},
    "every 5 in groups of 2, every 50": {5: 2, 50: 10},
    "every 5 in groups of 5, every 50": {5: 5, 50: 10},
    "flat, every 5": {5: 10},
}


def main() -> int:
    torch.set_num_threads(1)
    claim = Claim("hierarchy", "at the same traffic between groups hierarchical beats flat", ("seed", "training loss"))
    means = {}
    for way, sizes in WAYS.items():
        losses = [loss(sizes, seed) for seed in SEEDS]
        means[way] = sum(losses) / len(losses)
        groups = 10 // min(sizes.values()) if len(sizes) > 1 else 10
        outer = averagers.equivalent_period(10, groups, *sorted(sizes)) if len(sizes) > 1 else min(sizes)
        claim.rows.append({"way": way, "equivalent period": float(outer), "training loss": means[way]})
        claim.curves[way] = list(zip(SEEDS, losses, strict=True))
    for (way, worse), (other, better) in zip(list(means.items())[:-1], list(means.items())[1:], strict=True):
        claim.checks.append((f"{way}: {worse - better:.4f} above {other}, at least 0.005", worse - better >= 0.005))
    return claim.report()


if __name__ == "__main__":
    sys.exit(main())
