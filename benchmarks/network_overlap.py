"""One rank of `network.py --overlap`: how long a delayed round holds the loop, and what the loop computes meanwhile."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from network_rounds import shapes

import averagers


class Work:
    """Products of matrices, for so many seconds."""

    def __init__(self) -> None:
        self._matrix = torch.randn(192, 192)

    def rate(self, seconds: float, duty: float = 1.0) -> float:
        """Return how many products a second there were; ``duty`` is the share of the time spent on them."""
        start, count = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            began = time.perf_counter()
            self._matrix @ self._matrix
            count += 1
            if duty < 1.0:
                time.sleep((time.perf_counter() - began) * (1 / duty - 1))
        return count / (time.perf_counter() - start)


def over_ranks(value: float, operation: dist.ReduceOp.RedOpType) -> float:
    """Return the largest, or the sum, of the ranks."""
    reduced = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(reduced, operation)
    return float(reduced.item())


def measure(params: list[torch.nn.Parameter], options: dict[str, Any], repetitions: int) -> dict[str, float]:
    """Return medians: seconds of a blocking round and of the two calls of a delayed one, and the share of rate kept.

    Four ranks share two cores here. How long the calls take is measured while each computes for two fifths of the time,
    so that the cores are not oversubscribed; the rate is measured while all compute without pause, and is the sum over
    the ranks, because the scheduler does not divide the cores evenly.
    """
    blocking = averagers.PeriodicModelAverager(1000, **options)
    delayed = averagers.PeriodicModelAverager(1000, overlap=averagers.Delayed(1, keep=0.0), **options)
    work = Work()
    figures: dict[str, list[float]] = {"blocking": [], "send": [], "land": [], "rate": []}

    def timed(averager: averagers.PeriodicModelAverager, step: int) -> float:
        averager.step = step
        start = time.perf_counter()
        averager.average_parameters(params)
        return time.perf_counter() - start

    for turn in range(repetitions + 2):  # the first makes anchors, and the second buffers
        dist.barrier()
        took = over_ranks(timed(blocking, 0), dist.ReduceOp.MAX)
        dist.barrier()
        alone = work.rate(took)
        dist.barrier()
        timed(delayed, 0)
        meanwhile = work.rate(took)
        timed(delayed, 1)
        dist.barrier()
        send = timed(delayed, 0)
        work.rate(1.5 * took, duty=0.4)
        land = timed(delayed, 1)
        if turn > 1:
            figures["blocking"].append(took)
            figures["send"].append(over_ranks(send, dist.ReduceOp.MAX))
            figures["land"].append(over_ranks(land, dist.ReduceOp.MAX))
            kept = over_ranks(meanwhile, dist.ReduceOp.SUM) / over_ranks(alone, dist.ReduceOp.SUM)
            figures["rate"].append(kept)
    return {name: statistics.median(values) for name, values in figures.items()}


def main() -> None:
    num_elements, repetitions, path = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    params = [torch.nn.Parameter(torch.randn(size)) for size in shapes(num_elements)]
    flat = {"nodes": [0] * dist.get_world_size()}
    ways = {"flat float32": flat, "through nodes, float32": {}, "through nodes, Int8": {"codec": averagers.Int8()}}
    figures = {way: measure(params, options, repetitions) for way, options in ways.items()}
    if dist.get_rank() == 0:
        path.write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads would hold the end up


if __name__ == "__main__":
    main()
