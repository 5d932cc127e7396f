"""The ranks of a node, which average gradients after the warm-up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import averagers
from ranks_runner import run_ranks


def node_group(rank: int) -> Any:
    before = len(dist.distributed_c10d._world.pg_map)
    averager = averagers.PeriodicModelAverager(4, warmup_steps=1)
    state = averagers.PostLocalSGDState(averager)
    of_node = dist.get_process_group_ranks(state.subgroup)
    during_warmup = state.group is averager.process_group
    averager.step = 1
    after_warmup = state.group is state.subgroup
    averager.close()
    state.close()
    state.close()
    return of_node, during_warmup, after_warmup, len(dist.distributed_c10d._world.pg_map) - before


def test_the_ranks_of_a_node_are_its_hosts_and_their_group_is_released() -> None:
    assert run_ranks(node_group, 2) == [([0, 1], True, True, 0)] * 2


def two_nodes(rank: int) -> Any:
    import socket

    socket.gethostname = lambda: f"node-{rank % 2}"
    state = averagers.PostLocalSGDState(averagers.PeriodicModelAverager(4))
    return dist.get_process_group_ranks(state.subgroup), repr(state)


def test_ranks_on_two_nodes_get_the_group_of_their_own() -> None:
    groups = [ranks for ranks, _ in run_ranks(two_nodes, 4)]
    assert groups == [[0, 2], [1, 3], [0, 2], [1, 3]]


def gradients_after_a_failure(rank: int) -> Any:
    averager = averagers.PeriodicModelAverager(4, timeout_s=2)
    state = averagers.PostLocalSGDState(averager)
    averager.step = 4
    if rank == 0:
        with pytest.raises(averagers.RoundFailedError):
            averager.average_parameters([torch.zeros(1)])
    dist.barrier()
    gradient = torch.tensor([float(rank)])
    dist.all_reduce(gradient, group=state.subgroup)
    return gradient.item()


def test_the_group_for_gradients_outlives_a_failed_round() -> None:
    assert run_ranks(gradients_after_a_failure, 2) == [1.0] * 2
