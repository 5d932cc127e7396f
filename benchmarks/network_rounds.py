"""One rank of `network.py`: rounds in turn over a slow link, with the bytes that left each node."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging import utils as torch_averaging

import averagers

SENT_BYTES = Path("/sys/class/net/eth0/statistics/tx_bytes")


def shapes(num_elements: int) -> list[int]:
    """Sizes of a model's tensors: some large, many small, in all ``num_elements``."""
    large = [num_elements // 10] * 8
    small = [num_elements // 500] * 50
    return [*large, *small, num_elements - sum(large) - sum(small)]


def measure(ways: dict[str, Callable[[], Any]], repetitions: int) -> dict[str, dict[str, float]]:
    """Return for each way the median seconds of a round, and the most bytes that left a node."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    sent: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(repetitions + 1):
        for way, action in ways.items():
            dist.barrier()
            before, start = int(SENT_BYTES.read_text()), time.perf_counter()
            action()
            took = torch.tensor([time.perf_counter() - start, float(int(SENT_BYTES.read_text()) - before)])
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if turn:
                seconds[way].append(took[0].item())
                sent[way].append(took[1].item())
    return {way: {"seconds": statistics.median(seconds[way]), "bytes": statistics.median(sent[way])} for way in ways}


def main() -> None:
    num_elements, repetitions, path = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    params = [torch.nn.Parameter(torch.randn(size)) for size in shapes(num_elements)]
    theirs = [torch.nn.Parameter(torch.randn(size)) for size in shapes(num_elements)]
    flat = torch.randn(num_elements)

    def ours(codec: averagers.Codec | None) -> Callable[[], None]:
        averager = averagers.PeriodicModelAverager(2, codec=codec)

        def average() -> None:
            averager.step = 0
            averager.average_parameters(params)

        return average

    ways = {
        "torch": lambda: torch_averaging.average_parameters(iter(theirs), dist.group.WORLD),
        "bare all-reduce": lambda: dist.all_reduce(flat),
        "averagers": ours(None),
        "Cast(bfloat16)": ours(averagers.Cast(torch.bfloat16)),
        "Int8": ours(averagers.Int8()),
        "Int4": ours(averagers.Int4()),
    }
    figures = measure(ways, repetitions)
    if dist.get_rank() == 0:
        path.write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads would hold the end up


if __name__ == "__main__":
    main()
