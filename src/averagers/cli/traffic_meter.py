"""Counts what a run sends: gradients in DDP's hook, weights in the events of the rounds."""

# No `from __future__ import annotations` here: DDP compares the annotations of a hook with the types themselves.

from collections import Counter
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from averagers.cli.traffic import Traffic, grouped_all_reduce
from averagers.events import Event, RoundFinished
from averagers.training.ddp import PostLocalSGDState, post_local_sgd_hook

_FLOAT_BYTES = 4


@final
class TrafficMeter:
    """Adds up the bytes that all ranks send, from what this rank sees; an observer of rounds.

    Args:
        ranks_per_node: How many consecutive ranks share a node.

    Attributes:
        traffic: Bytes so far.
        num_rounds: Maps a group size to the number of rounds in groups of it.
        global_drifts: The drift of each round among all ranks.
    """

    def __init__(self, ranks_per_node: int) -> None:
        self._ranks_per_node = ranks_per_node
        self.traffic = Traffic()
        self.num_rounds: Counter[int] = Counter()
        self.global_drifts: list[float] = []

    def add(self, payload_bytes: int, group_size: int) -> None:
        """Count an all-reduce of ``payload_bytes`` in each contiguous group of ``group_size`` ranks."""
        self.traffic += grouped_all_reduce(payload_bytes, group_size, dist.get_world_size(), self._ranks_per_node)

    def __call__(self, event: Event) -> None:
        """Count a round of weights."""
        if isinstance(event, RoundFinished):
            self.add(event.num_elements * _FLOAT_BYTES, event.group_size)
            self.num_rounds[event.group_size] += 1
            if event.group_size == dist.get_world_size() and event.drift is not None:
                self.global_drifts.append(event.drift)


@final
class MeteredGradients:
    """State of a hook that averages gradients and counts their bytes.

    Args:
        meter: What counts.
        post_local_sgd: Decides among whom gradients are averaged; None means all ranks at every step.
    """

    def __init__(self, meter: TrafficMeter, post_local_sgd: PostLocalSGDState | None) -> None:
        self.meter = meter
        self.post_local_sgd = post_local_sgd

    def register(self, ddp_model: DistributedDataParallel) -> None:
        """Give ``ddp_model`` the hook."""
        ddp_model.register_comm_hook(self, _average_and_count)


def _average_and_count(state: MeteredGradients, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    local = state.post_local_sgd
    group: Any = dist.group.WORLD if local is None else local.group
    state.meter.add(bucket.buffer().nbytes, group.size())
    if local is not None:
        return post_local_sgd_hook(local, bucket)
    return allreduce_hook(group, bucket)
