"""Replicas in one process: the same rounds as on several ranks, through memory."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

import averagers
from ranks_runner import run_ranks


def _options(name: str) -> dict[str, Any]:
    return {
        "plain": {},
        "through nodes": {"nodes": [0, 0, 1, 1]},
        "int8 through nodes": {"nodes": [0, 0, 1, 1], "codec": averagers.Int8()},
        "top-k": {"codec": averagers.TopK(64)},
        "median": {"rule": averagers.Median()},
        "nesterov": {"mixer": averagers.Nesterov()},
        "delayed": {"overlap": averagers.Delayed(2)},
    }[name]


def _train(group: Any, rank: int, name: str) -> list[list[float]]:
    averager = averagers.HierarchicalModelAverager({2: 2, 6: 4}, process_group=group, **_options(name))
    tensors = [torch.zeros(40, 30), torch.zeros(5, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.float64)]
    generator = torch.Generator().manual_seed(rank)
    for _ in range(15):
        for tensor in tensors:
            tensor.add_(torch.randn(tensor.shape, generator=generator).to(tensor.dtype))
        averager.average_parameters(tensors, weight=1 + rank)
    averager.finish(tensors)
    averagers.average_parameters(tensors, group)
    return [tensor.flatten().tolist() for tensor in tensors]


def _on_ranks(rank: int, name: str) -> list[list[float]]:
    return _train(None, rank, name)


@pytest.mark.parametrize(
    "name", ["plain", "through nodes", "int8 through nodes", "top-k", "median", "nesterov", "delayed"]
)
def test_replicas_in_one_process_are_where_ranks_are(name: str) -> None:
    weighs = name != "median"
    train = _train if weighs else _train_unweighted
    replicas = averagers.run_replicas(lambda group: train(group, group.rank, name), 4)
    ranks = run_ranks(_on_ranks if weighs else _on_ranks_unweighted, 4, name)
    for found, expected in zip(replicas, ranks, strict=True):
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, rel=1e-2, abs=1e-2 if "int8" in name else 1e-4)


def _train_unweighted(group: Any, rank: int, name: str) -> list[list[float]]:
    averager = averagers.PeriodicModelAverager(3, process_group=group, **_options(name))
    tensor = torch.randn(300, generator=torch.Generator().manual_seed(rank))
    for _ in range(4):
        averager.average_parameters([tensor])
    return [tensor.tolist()]


def _on_ranks_unweighted(rank: int, name: str) -> list[list[float]]:
    return _train_unweighted(None, rank, name)


def test_nothing_of_torch_distributed_is_needed_and_threads_end() -> None:
    assert not dist.is_initialized()
    before = threading.active_count()
    results = averagers.run_replicas(lambda group, offset: group.rank * 10 + group.size + offset, 3, 100)
    assert results == [103, 113, 123]
    assert threading.active_count() == before


def test_an_error_of_one_replica_ends_all_and_is_raised() -> None:
    def train(group: Any) -> None:
        averager = averagers.PeriodicModelAverager(2, process_group=group)
        if group.rank == 1:
            raise KeyError("data ran out")
        averager.average_parameters([torch.zeros(3)])

    with pytest.raises(KeyError, match="data ran out"):
        averagers.run_replicas(train, 3)


def test_replicas_that_disagree_are_told_as_ranks_are() -> None:
    def train(group: Any) -> None:
        averager = averagers.PeriodicModelAverager(2, process_group=group)
        averager.average_parameters([torch.zeros(3 + (group.rank == 2))])

    with pytest.raises(averagers.DisagreementError, match=r"\(4,\) float32 on rank 2, \(3,\) float32 on ranks 0-1"):
        averagers.run_replicas(train, 3)


def test_a_replica_that_does_not_come_ends_the_round_at_the_timeout() -> None:
    def train(group: Any) -> None:
        averager = averagers.PeriodicModelAverager(2, process_group=group)
        if group.rank != 1:
            averager.average_parameters([torch.zeros(3)])

    with pytest.raises(averagers.RoundFailedError, match="rank 1 did not come within the timeout of 1 s"):
        averagers.run_replicas(train, 3, timeout_s=1)


def test_a_group_cannot_be_used_after_its_replicas_have_ended() -> None:
    groups = averagers.run_replicas(lambda group: group, 2)
    with pytest.raises(averagers.InvalidValueError, match="process_group was destroyed"):
        averagers.PeriodicModelAverager(2, process_group=groups[0])


def test_their_number_is_checked() -> None:
    with pytest.raises(averagers.InvalidValueError, match="num_replicas must be at least 1, got 0"):
        averagers.run_replicas(print, 0)
    assert averagers.run_replicas(lambda group: group.size, 1) == [1]
