"""Averagers with other schedules than a fixed period, and those that decide from what was measured."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest

from frameworks import averagers, bits, lib
from ranks_runner import run_ranks

pytestmark = pytest.mark.usefixtures("framework")


def _lr_at(step: int) -> float:
    return 0.01 * (1 - step / 60)


def _rounds(rank: int, name: str) -> tuple[list[int], list[bytes]]:
    schedules = {
        "every": lambda: averagers.Every(4, warmup_steps=3),
        "quadratic": lambda: averagers.QuadraticRule(0.02, 3, _lr_at, total_steps=60, warmup_steps=3),
        "growing": lambda: averagers.Growing(2, 16, total_steps=60),
        "shrinking": lambda: averagers.Shrinking(16, 2, total_steps=60),
    }
    events: list[Any] = []
    averager = averagers.PeriodicModelAverager(schedule=schedules[name](), observers=[events.append])
    weight = lib.zeros(3)
    for _ in range(60):
        weight.add_(float(rank))
        averager.average_parameters([weight])
    return [event.step for event in events if isinstance(event, averagers.RoundFinished)], [bits(weight)]


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("every", list(range(3, 60, 4))),
        ("quadratic", [3, 7, 12, 18, 26, 38, 59]),
        ("growing", [0, 2, 4, 6, 8, 11, 14, 17, 21, 25, 30, 36, 43, 52]),
        ("shrinking", [0, 16, 25, 32, 37, 41, 45, 48, 51, 54, 56, 58]),
    ],
)
def test_rounds_come_when_the_schedule_says(name: str, steps: list[int]) -> None:
    results = run_ranks(_rounds, 2, name)
    assert [found for found, _ in results] == [steps] * 2
    if steps[-1] == 59:
        assert results[0][1] == results[1][1]


def _adaptive(rank: int, slow: bool) -> tuple[list[int], list[int]]:
    events: list[Any] = []
    averager = averagers.PeriodicModelAverager(
        schedule=averagers.Adaptive(overhead=0.2, max_period=16), observers=[events.append]
    )
    weight = lib.zeros(200_000)
    for step in range(90):
        time.sleep(0.004 if slow and rank else 0.002)
        averager.average_parameters([weight])
        if step == 44:
            saved = averager.state_dict()
            averager = averagers.PeriodicModelAverager(
                schedule=averagers.Adaptive(overhead=0.2, max_period=16), observers=[events.append]
            )
            averager.load_state_dict(saved)
    steps = [event.step for event in events if isinstance(event, averagers.RoundFinished)]
    return steps, [after - before for before, after in pairwise(steps)]


@pytest.mark.parametrize("slow", [False, True])
def test_all_ranks_decide_the_same_period_and_a_slow_one_changes_nothing(slow: bool) -> None:
    results = run_ranks(_adaptive, 3, slow)
    assert results[0] == results[1] == results[2]
    steps, periods = results[0]
    assert steps[:2] == [0, 1]
    assert all(1 <= period <= 16 for period in periods)
    assert all(after <= 2 * before for before, after in pairwise(periods))


def _every_seconds(rank: int) -> list[int]:
    events: list[Any] = []
    averager = averagers.PeriodicModelAverager(schedule=averagers.EverySeconds(0.05), observers=[events.append])
    weight = lib.zeros(30)
    for _ in range(80):
        time.sleep(0.005)
        averager.average_parameters([weight])
    return [event.step for event in events if isinstance(event, averagers.RoundFinished)]


def test_rounds_come_about_every_so_many_seconds() -> None:
    first, second = run_ranks(_every_seconds, 2)
    assert first == second
    periods = [after - before for before, after in pairwise(first)]
    assert periods[0] == 1
    assert all(after <= 2 * before for before, after in pairwise(periods))
    assert max(periods) > 1
    assert all(1 <= period <= 10 for period in periods)  # steps of 5 ms at the least


def _refused(rank: int) -> list[str]:
    messages = []
    for build in (
        averagers.PeriodicModelAverager,
        lambda: averagers.PeriodicModelAverager(schedule=4),
        lambda: averagers.PeriodicModelAverager(4, schedule=averagers.Every(4)),
        lambda: averagers.PeriodicModelAverager(warmup_steps=4, schedule=averagers.Every(4)),
        lambda: averagers.PeriodicModelAverager(schedule=averagers.Adaptive(0.1 if rank else 0.2)),
        lambda: averagers.PeriodicModelAverager(schedule=averagers.Adaptive(), codec={4: averagers.Int8()}),
        lambda: averagers.PeriodicModelAverager(schedule=averagers.Adaptive(), overlap=averagers.Delayed(1)),
    ):
        with pytest.raises(averagers.AveragersError) as caught:
            build()
        messages.append(str(caught.value))
    averager = averagers.PeriodicModelAverager(schedule=averagers.Adaptive())
    with pytest.raises(AttributeError, match="a Adaptive has no fixed period"):
        _ = averager.period
    assert averagers.PeriodicModelAverager(schedule=averagers.Every(5, 2)).period == 5
    with pytest.raises(averagers.StateDictError, match="the schedule in state_dict is damaged"):
        averager.load_state_dict({**averager.state_dict(), "schedule": {}})
    return messages


def test_schedules_that_cannot_work_are_refused_by_name() -> None:
    first, second = run_ranks(_refused, 2)
    assert first == second
    for message, part in zip(
        first,
        [
            "period must be an int, or schedule be given",
            "schedule must be a Schedule such as averagers.Adaptive(), got 4 of type int",
            "period and warmup_steps must not be given with schedule, which has its own, got period=4",
            "which has its own, got period=None and warmup_steps=4",
            "schedule is Adaptive(0.2, max_period=1000, warmup_steps=0) on rank 0, Adaptive(0.1",
            "codec must be given for periods of the averager, which are no fixed ones: give one for all, got 4",
            "schedule=Adaptive cannot work with overlap=Delayed(steps=1, keep=0.5, carry=False)",
        ],
        strict=True,
    ):
        assert part in message
