"""Streaming DiLoCo, at most a quarter of the model at a time and landing late, costs little.

    python benchmarks/quality/streaming.py

The task of `diloco.py` at the learning rate that its sweep chose: after the start an outer step every 50 steps for
the whole model, blocking; or in five fragments, each with its own place in the period, landing 5 steps after it was
sent on top of what the replica did meanwhile, or for half of its weights; and in 4 bits. Means of three seeds.
Replicas run in one process, by the engine. Takes about 6 minutes.
"""

from __future__ import annotations

import sys

import torch
from experiment import Claim
from language import after_a_start

import averagers

SEEDS = (1, 2, 3)
PEAK = 4e-3
# Each of its five largest tensors, of a seventh of the model, is in another one: of four, one would have two.
FRAGMENTS = [
    ["embedding", "blocks.0.to_query_key_value"],
    ["blocks.0.widen", "blocks.1.to_query_key_value"],
    ["blocks.0.narrow", "blocks.0.from_heads", "blocks.1.from_heads"],
    ["blocks.1.widen", "blocks.0.attention_norm", "blocks.0.feedforward_norm"],
    ["blocks.1.narrow", "blocks.1.attention_norm", "blocks.1.feedforward_norm", "norm"],
]

CARRIED = {"fragments": FRAGMENTS, "overlap": averagers.Delayed(5, carry=True)}
WAYS = {
    "blocking": {},
    "five fragments, 5 steps late, carry": CARRIED,
    "the same in 4 bits": {**CARRIED, "codec": averagers.Int4()},
    "the same, keep=0.5": {**CARRIED, "overlap": averagers.Delayed(5, keep=0.5)},
}


def main() -> int:
    torch.set_num_threads(1)
    claim = Claim("streaming", "streaming with delay costs little", ("seed", "validation loss (nats a byte)"))
    means, peaks = {}, {}
    for way, options in WAYS.items():
        events: list[averagers.Event] = []
        losses = [after_a_start(seed, PEAK, observers=[events.append], **options) for seed in SEEDS]
        means[way] = sum(losses) / len(losses)
        # The first round of each part goes as it is, and the last one is of the whole model.
        sent = [one for one in events if isinstance(one, averagers.RoundFinished) and one.call == "average_parameters"]
        peaks[way] = max(one.wire_bytes for one in sent)
        claim.rows.append({"way": way, "peak bytes of a step": peaks[way], "validation loss": means[way]})
        claim.curves[way] = list(zip(SEEDS, losses, strict=True))
    blocking, streaming, *_ = means.values()
    share = peaks["five fragments, 5 steps late, carry"] / peaks["blocking"]
    claim.checks += [
        (f"streaming {streaming - blocking:+.4f} of blocking, at most +0.03", streaming <= blocking + 0.03),
        (f"peak bytes of a step {share:.3f} of blocking's, at most a quarter", share <= 0.25),
    ]
    return claim.report()


if __name__ == "__main__":
    sys.exit(main())
