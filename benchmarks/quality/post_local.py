"""Does post-local SGD generalize better than a large batch, each at its best learning rate?

    python benchmarks/quality/post_local.py

The task of `label_noise.py`: data parallel throughout; data parallel for half of the steps and then local steps; local
steps throughout. Each way gets the best of five learning rates, chosen on a seed of its own, and is measured at each of
them on three others. Takes about 4 minutes.
"""

from __future__ import annotations

import sys

import torch
from experiment import Claim
from label_noise import NUM_STEPS, RATES, SEEDS, best_rate, constant, data_parallel, finite, local

import averagers

WAYS = {
    "data parallel": lambda seed, peak: data_parallel(seed, constant(peak)),
    "data parallel, then H = 128": lambda seed, peak: local(
        seed, constant(peak), averagers.Every(128, warmup_steps=NUM_STEPS // 2)
    ),
    "H = 128": lambda seed, peak: local(seed, constant(peak), averagers.Every(128)),
}


def main() -> int:
    torch.set_num_threads(1)
    claim = Claim(
        "post_local", "post-local SGD generalizes better than large batch", ("learning rate", "squared distance")
    )
    best = {}
    for way, run in WAYS.items():
        means = {rate: sum(finite(run(seed, rate)[0]) for seed in SEEDS) / len(SEEDS) for rate in RATES}
        chosen = best_rate(run)
        best[way] = means[chosen]
        claim.rows.append({"way": way, **{f"lr {rate:g}": mean for rate, mean in means.items()}, "chosen": chosen})
        claim.curves[way] = [(rate, mean) for rate, mean in means.items() if mean < 100]
    ratio = best["data parallel, then H = 128"] / best["data parallel"]
    claim.checks.append((f"post-local error {ratio:.3f} of data parallel's, at most 0.85", ratio <= 0.85))
    return claim.report()


if __name__ == "__main__":
    sys.exit(main())
