"""The quadratic rule beats its own shortest period, with fewer rounds.

    python benchmarks/quality/quadratic_rule.py

The task of `label_noise.py`, with the large batch and a cosine of learning rates: a round every 16 steps, or by the
quadratic rule, whose shortest period that is. Each way gets the best of twelve learning rates, chosen on three seeds
and measured on three others. Takes about half a minute.
"""

from __future__ import annotations

import math
import sys

import torch
from experiment import Claim
from label_noise import LARGE, NUM_STEPS, SEEDS, cosine, trained

import averagers

SHORTEST = 16

WAYS: dict[str, averagers.Schedule] = {
    f"H = {SHORTEST}": averagers.Every(SHORTEST),
    # Only the ratio of alpha and learning rate matters: the same at every peak.
    "quadratic rule": averagers.QuadraticRule(math.sqrt(SHORTEST), SHORTEST, cosine, total_steps=NUM_STEPS),
}


def main() -> int:
    torch.set_num_threads(1)
    claim = Claim("quadratic_rule", "the quadratic rule beats its shortest period", ("seed", "squared distance"))
    outcomes = [trained(LARGE, schedule, cosine) for schedule in WAYS.values()]
    for way, outcome in zip(WAYS, outcomes, strict=True):
        claim.rows.append(
            {
                "way": way,
                "learning rate": outcome.chosen,
                "rounds": outcome.num_rounds,
                "squared distance": outcome.error,
            }
        )
        claim.curves[way] = list(zip(SEEDS, outcome.errors, strict=True))
    shortest, rule = outcomes
    ratio, share = rule.error / shortest.error, rule.num_rounds / shortest.num_rounds
    claim.checks.append((f"error {ratio:.3f} of the shortest period's, at most 0.98", ratio <= 0.98))
    claim.checks.append((f"rounds {share:.3f} of the shortest period's, at most 0.45", share <= 0.45))
    return claim.report()


if __name__ == "__main__":
    sys.exit(main())
