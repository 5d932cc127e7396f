"""One rank of `network.py --training`: the demo's model trained in several ways over a slow link, in turn."""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging import hierarchical_model_averager as torch_averaging
from torch.nn.parallel import DistributedDataParallel

import averagers
from averagers.cli.language_model import ByteTransformer, batches, help_text, next_byte_loss, split

CONTEXT, BATCH_SIZE, WIDTH, NUM_LAYERS, NUM_HEADS, LEARNING_RATE = 64, 8, 96, 2, 2, 4e-3
NUM_EVALUATIONS = 5
SELDOM, OFTEN = OrderedDict([(4, 2), (32, 4)]), OrderedDict([(2, 2), (8, 4)])

WAYS: dict[str, Callable[[], Any]] = {
    "data parallel": lambda: None,
    "torch {4: 2, 32: 4}": lambda: torch_averaging.HierarchicalModelAverager(SELDOM),
    "averagers {4: 2, 32: 4}": lambda: averagers.HierarchicalModelAverager(SELDOM),
    "averagers {4: 2, 32: 4}, Int8 at 32": lambda: averagers.HierarchicalModelAverager(
        SELDOM, codec={32: averagers.Int8()}
    ),
    "torch {2: 2, 8: 4}": lambda: torch_averaging.HierarchicalModelAverager(OFTEN),
    "averagers {2: 2, 8: 4}, Int8 at 8": lambda: averagers.HierarchicalModelAverager(
        OFTEN, codec={8: averagers.Int8()}
    ),
}


def evaluate(model: torch.nn.Module, validation: torch.Tensor) -> float:
    """Return the loss over the validation text, each rank its share."""
    total = torch.zeros(2)
    with torch.no_grad():
        for windows in validation[dist.get_rank() :: dist.get_world_size()].split(64):
            total += torch.tensor(
                [next_byte_loss(model, windows[:, :-1], windows[:, 1:]).item() * len(windows), len(windows)]
            )
    dist.all_reduce(total)
    return float(total[0] / total[1])


def train(way: str, num_steps: int) -> dict[str, Any]:
    """Train in one way; return the validation losses, and the seconds of training that came before each."""
    training, validation = split(help_text(), CONTEXT)
    windows = batches(training, BATCH_SIZE, CONTEXT, dist.get_rank())
    torch.manual_seed(0)
    model = ByteTransformer(WIDTH, NUM_LAYERS, NUM_HEADS, CONTEXT)
    averager = WAYS[way]()
    trained = DistributedDataParallel(model, gradient_as_bucket_view=True) if averager is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 30) * (1 - 0.9 * step / num_steps)
    )
    seconds = 0.0
    curve = []
    dist.barrier()
    for step in range(num_steps):
        start = time.perf_counter()
        inputs, targets = next(windows)
        optimizer.zero_grad()
        next_byte_loss(trained, inputs, targets).backward()
        optimizer.step()
        schedule.step()
        if averager is not None:
            averager.average_parameters(model.parameters())
        seconds += time.perf_counter() - start
        # Right after a round among all ranks.
        if step and step % (num_steps // NUM_EVALUATIONS // 32 * 32) == 0:
            slowest = torch.tensor(seconds)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            seconds = slowest.item()
            curve.append({"step": step + 1, "seconds": seconds, "loss": evaluate(model, validation)})
            dist.barrier()
    if isinstance(averager, averagers.HierarchicalModelAverager):
        averager.finish(model.parameters())
        averager.close()
    return {"seconds": curve[-1]["seconds"], "curve": curve}


def main() -> None:
    num_steps, path = int(sys.argv[1]), Path(sys.argv[2])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = {way: train(way, num_steps) for way in WAYS}
    if dist.get_rank() == 0:
        path.write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads would hold the end up


if __name__ == "__main__":
    main()
