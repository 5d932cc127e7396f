"""The quadratic rule beats its own shortest period, with fewer rounds.

    python benchmarks/quality/quadratic_rule.py

The task of `label_noise.py` with a cosine of learning rates: a round every 16 steps, or by the quadratic rule, whose
shortest period that is. Each way gets the best of five learning rates, chosen on a seed of its own, and is measured on
three others. Takes about 2 minutes.
"""

from __future__ import annotations

import math
import sys

import torch
from experiment import Claim
from label_noise import NUM_STEPS, SEEDS, best_rate, cosine, local

import averagers

SHORTEST = 16


def quadratic(peak: float) -> averagers.Schedule:
    return averagers.QuadraticRule(peak * math.sqrt(SHORTEST), SHORTEST, cosine(peak), total_steps=NUM_STEPS)


WAYS = {
    f"H = {SHORTEST}": lambda seed, peak: local(seed, cosine(peak), averagers.Every(SHORTEST)),
    "quadratic rule": lambda seed, peak: local(seed, cosine(peak), quadratic(peak)),
}


def main() -> int:
    torch.set_num_threads(1)
    claim = Claim("quadratic_rule", "the quadratic rule beats its shortest period", ("seed", "squared distance"))
    means, rounds = [], []
    for way, run in WAYS.items():
        rate = best_rate(run)
        results = [run(seed, rate) for seed in SEEDS]
        means.append(sum(error for error, _ in results) / len(results))
        rounds.append(results[0][1])
        claim.rows.append({"way": way, "lr": rate, "rounds": rounds[-1], "squared distance": means[-1]})
        claim.curves[way] = [(seed, error) for seed, (error, _) in zip(SEEDS, results, strict=True)]
    ratio, share = means[1] / means[0], rounds[1] / rounds[0]
    claim.checks.append((f"error {ratio:.3f} of the shortest period's, at most 0.98", ratio <= 0.98))
    claim.checks.append((f"rounds {share:.3f} of the shortest period's, at most 0.45", share <= 0.45))
    return claim.report()


if __name__ == "__main__":
    sys.exit(main())
