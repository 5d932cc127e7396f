"""Ranks that run out of data at different steps end as one model."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from frameworks import averagers, bits, lib
from ranks_runner import run_ranks

pytestmark = pytest.mark.usefixtures("framework")


def _periodic(rank: int, lengths: list[int], weights: bool) -> tuple[list[float], list[int]]:
    events: list[Any] = []
    averager = averagers.PeriodicModelAverager(4, 1, observers=[events.append])
    weight = lib.zeros(3)
    for _ in range(lengths[rank]):
        weight.add_(float(rank + 1))
        averager.average_parameters([weight], weight=2.0 if weights else None)
    averager.join([weight])
    return weight.tolist(), [event.step for event in events if isinstance(event, averagers.RoundFinished)]


def _by_hand(lengths: list[int], weights: bool) -> float:
    """What all end at: each counts for its steps since the last round, and afterwards not at all."""
    models, since = [0.0] * len(lengths), [0] * len(lengths)
    for step in range(max(lengths)):
        for rank, length in enumerate(lengths):
            if step < length:
                models[rank] += rank + 1
                since[rank] += 1
        if step % 4 == 1:
            models, since = _mean(models, since, weights), [0] * len(lengths)
    return _mean(models, since, weights)[0]


def _mean(models: list[float], since: list[int], weights: bool) -> list[float]:
    shares = [count if weights else min(1, count) for count in since]
    if not any(shares):
        return models
    mean = sum(share * model for share, model in zip(shares, models, strict=True)) / sum(shares)
    return [mean] * len(models)


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("lengths", [[7, 7, 7], [3, 9, 14], [2, 2, 11], [0, 5, 6], [6, 6, 6], [1, 2, 30]])
def test_all_end_as_one_model_that_weighs_what_each_did(lengths: list[int], weights: bool) -> None:
    results = run_ranks(_periodic, 3, lengths, weights)
    expected = _by_hand(lengths, weights)
    for found, rounds in results:
        assert found == pytest.approx([expected] * 3)
        assert rounds == results[0][1]


def _joined(rank: int, name: str) -> list[bytes]:
    makers: dict[str, Callable[[], Any]] = {
        "hierarchy": lambda: averagers.HierarchicalModelAverager({2: 2, 6: 4}),
        "int8": lambda: averagers.PeriodicModelAverager(3, codec=averagers.Int8()),
        "top-k": lambda: averagers.PeriodicModelAverager(3, codec=averagers.TopK(8)),
        "nesterov": lambda: averagers.PeriodicModelAverager(3, mixer=averagers.Nesterov()),
        "delayed": lambda: averagers.PeriodicModelAverager(4, overlap=averagers.Delayed(2)),
        "fragments": lambda: averagers.PeriodicModelAverager(4, fragments=2),
        "median": lambda: averagers.PeriodicModelAverager(3, rule=averagers.Median()),
        "quadratic rule": lambda: averagers.PeriodicModelAverager(
            schedule=averagers.QuadraticRule(0.2, 2, lambda step: 0.1, total_steps=12)
        ),
        "adaptive": lambda: averagers.PeriodicModelAverager(schedule=averagers.Adaptive(max_period=4)),
    }
    averager = makers[name]()
    tensors = [lib.zeros(300), lib.zeros(4, 5)]
    for step in range([5, 9, 12, 7][rank]):
        for tensor in tensors:
            tensor.add_(lib.linspace(-1, 1, tensor.numel()).view(tensor.shape), alpha=math.sin(step + rank))
        averager.average_parameters(tensors)
    averager.join(tensors)
    return [bits(tensor) for tensor in tensors]


@pytest.mark.parametrize(
    "name",
    ["hierarchy", "int8", "top-k", "nesterov", "delayed", "fragments", "median", "quadratic rule", "adaptive"],
)
def test_every_method_ends_as_one_model(name: str) -> None:
    results = run_ranks(_joined, 4, name)
    assert all(result == results[0] for result in results)


def _nan_of_a_rank_without_data(rank: int) -> list[float]:
    averager = averagers.PeriodicModelAverager(2)
    weight = lib.ones(3)
    averager.average_parameters([weight])
    if rank == 1:
        weight.fill_(math.nan)  # nothing was trained since the last round
    else:
        for _ in range(4):
            averager.average_parameters([weight])
    averager.join([weight])
    return weight.tolist()


def test_a_rank_that_did_nothing_since_the_last_round_only_receives() -> None:
    assert run_ranks(_nan_of_a_rank_without_data, 2) == [[1.0] * 3] * 2


def _alone(rank: int) -> list[float]:
    averager = averagers.PeriodicModelAverager(2)
    weight = lib.ones(3)
    averager.average_parameters([weight])
    averager.join(iter([weight]))
    return weight.tolist()


def test_a_world_of_one_ends_at_once() -> None:
    assert run_ranks(_alone, 1) == [[1.0] * 3]
