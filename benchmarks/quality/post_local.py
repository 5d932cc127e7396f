"""Does post-local SGD generalize better than a large batch, each at its best learning rate?

    python benchmarks/quality/post_local.py

The task of `label_noise.py`: data parallel throughout; data parallel for half of the steps and then local steps; local
steps throughout. Each way gets the best of twelve learning rates, chosen on three seeds, and is measured at each of
them on three others. With 32 samples a replica the batch of data parallel is large: at the largest learning rate that
the loss bears there is too little noise left to find the truth in so many steps. The same is shown with one sample a
replica, where the noise of one replica is what limits the learning rate, and data parallel is better. Takes about a
minute.
"""

from __future__ import annotations

import sys

import torch
from experiment import Claim
from label_noise import LARGE, NUM_STEPS, RATES, trained

import averagers

WAYS: dict[str, averagers.Schedule | None] = {
    "data parallel": None,
    "data parallel, then H = 128": averagers.Every(128, warmup_steps=NUM_STEPS // 2),
    "H = 128": averagers.Every(128),
}


def main() -> int:
    torch.set_num_threads(1)
    claim = Claim(
        "post_local", "post-local SGD generalizes better than large batch", ("learning rate", "squared distance")
    )
    errors = {}
    for num_samples in (LARGE, 1):
        for way, schedule in WAYS.items():
            outcome = trained(num_samples, schedule)
            errors[num_samples, way] = outcome.error
            claim.rows.append(
                {
                    "samples of a replica": num_samples,
                    "way": way,
                    "learning rate": outcome.chosen,
                    "squared distance": outcome.error,
                }
            )
            points = [(rate, mean) for rate, mean in zip(RATES, outcome.means, strict=True) if mean < 10]
            claim.curves[f"{way}, {num_samples} a replica"] = points
    ratio = errors[LARGE, "data parallel, then H = 128"] / errors[LARGE, "data parallel"]
    claim.checks.append((f"post-local error {ratio:.3f} of data parallel's, at most 0.85", ratio <= 0.85))
    return claim.report()


if __name__ == "__main__":
    sys.exit(main())
