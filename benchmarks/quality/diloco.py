"""DiLoCo after a data-parallel start matches data parallel with 50 times less traffic; 8 bits are free, 4 nearly.

    python benchmarks/quality/diloco.py

A byte-level transformer of two layers on the text of Python's help topics: two replicas of 16 windows a step, 1,000
steps of AdamW. Data parallel throughout, or for a fifth of the steps and then an outer step every 50, with
displacements in float32, 8 and 4 bits. Data parallel and DiLoCo get the same sweep of learning rates, each its best
on a seed of its own; the codecs take DiLoCo's. Means of three seeds. Replicas run in one process, by the engine.
Takes about 8 minutes.
"""

from __future__ import annotations

import sys

import torch
from experiment import Claim
from language import NUM_STEPS, PERIOD, START_STEPS, Language, after_a_start

import averagers

SEEDS = (1, 2, 3)
RATES = (2e-3, 4e-3, 8e-3)


def data_parallel(seed: int, peak: float) -> float:
    language = Language(seed, peak)
    language.data_parallel(0, NUM_STEPS)
    return language.validation_loss()


def main() -> int:
    torch.set_num_threads(1)
    claim = Claim(
        "diloco", "DiLoCo after a data-parallel start, and in fewer bits", ("seed", "validation loss (nats a byte)")
    )
    best = {
        way: min(RATES, key=lambda peak, run=run: run(100, peak))
        for way, run in (("data parallel", data_parallel), ("DiLoCo", after_a_start))
    }
    ways = {
        "data parallel": lambda seed: data_parallel(seed, best["data parallel"]),
        "DiLoCo": lambda seed: after_a_start(seed, best["DiLoCo"]),
        "DiLoCo, Int8": lambda seed: after_a_start(seed, best["DiLoCo"], codec=averagers.Int8()),
        "DiLoCo, Int4": lambda seed: after_a_start(seed, best["DiLoCo"], codec=averagers.Int4()),
    }
    means = {}
    for way, run in ways.items():
        losses = [run(seed) for seed in SEEDS]
        means[way] = sum(losses) / len(losses)
        rounds = NUM_STEPS - START_STEPS if way == "data parallel" else (NUM_STEPS - START_STEPS) // PERIOD
        lr = best["data parallel" if way == "data parallel" else "DiLoCo"]
        claim.rows.append({"way": way, "lr": lr, "messages after the start": rounds, "validation loss": means[way]})
        claim.curves[way] = list(zip(SEEDS, losses, strict=True))
    parallel, diloco, eight, four = means.values()
    claim.checks += [
        (f"DiLoCo {diloco - parallel:+.4f} of data parallel, at most +0.01", diloco <= parallel + 0.01),
        (f"8 bits {eight - diloco:+.4f} of float32, at most 0.003", abs(eight - diloco) <= 0.003),
        (f"4 bits {four - diloco:+.4f} of float32, at most 0.02", abs(four - diloco) <= 0.02),
    ]
    return claim.report()


if __name__ == "__main__":
    sys.exit(main())
