"""Rounds that land some steps after they were sent."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest

from frameworks import averagers, bits, lib
from ranks_runner import run_ranks

pytestmark = pytest.mark.usefixtures("framework")


def _worked(rank: int, delayed: Any) -> list[float]:
    """Two replicas at 1 and 3 when sent, at 1.5 and 3.5 when the mean lands."""
    averager = averagers.PeriodicModelAverager(1000, overlap=delayed)
    weight = lib.full((5,), 1.0 + 2 * rank)
    found = []
    for _ in range(4):
        averager.average_parameters([weight])
        found.append(float(weight[2].item()))
        weight.add_(0.25)
    return found


@pytest.mark.parametrize(
    ("options", "landed"),
    [
        ({"keep": 0.0}, (2.0, 2.0)),
        ({"keep": 0.5}, (1.75, 2.75)),
        ({}, (1.75, 2.75)),
        ({"keep": 1.0}, (1.5, 3.5)),
        ({"carry": True}, (2.5, 2.5)),
    ],
)
def test_a_delayed_round_is_at_the_worked_numbers(options: dict[str, Any], landed: tuple[float, float]) -> None:
    results = run_ranks(_worked, 2, averagers.Delayed(2, **options))
    for rank, found in enumerate(results):
        before = 1.0 + 2 * rank
        assert found == pytest.approx([before, before + 0.25, landed[rank], landed[rank] + 0.25])


_OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "int8": lambda: {"codec": averagers.Int8()},
    "topk": lambda: {"codec": averagers.TopK(64)},
    "int4 with feedback": lambda: {"codec": averagers.Int4(error_feedback=0.9)},
    "median": lambda: {"rule": averagers.Median()},
    "nesterov": lambda: {"mixer": averagers.Nesterov()},
    "slowmo and bfloat16": lambda: {"mixer": averagers.SlowMo(0.5), "codec": averagers.Cast(lib.bfloat16)},
}


def _move(tensors: list[Any], rank: int, step: int) -> None:
    for tensor in tensors:
        move = lib.linspace(-1, 1, tensor.numel()).view(tensor.shape)
        tensor.add_(move.to(tensor.dtype), alpha=math.sin(step + rank))


def _run(rank: int, options: dict[str, Any], delayed: Any, steps: int = 11, dtype: str = "float32") -> list[bytes]:
    averager = averagers.PeriodicModelAverager(3, overlap=delayed, **options)
    tensors = [lib.zeros(40, 50).t().to(getattr(lib, dtype)), lib.zeros(3).to(getattr(lib, dtype)), lib.zeros(7)]
    for step in range(steps):
        _move(tensors, rank, step)
        averager.average_parameters([{"params": tensors, "lr": 0.5}])
    averager.finish([{"params": tensors, "lr": 0.5}])
    return [bits(tensor) for tensor in tensors]


def _delay_of_nothing(rank: int, name: str) -> bool:
    return _run(rank, _OPTIONS[name](), averagers.Delayed(0, keep=0.0)) == _run(rank, _OPTIONS[name](), None)


@pytest.mark.parametrize("name", list(_OPTIONS))
def test_a_delay_of_no_steps_that_keeps_nothing_is_a_blocking_round(name: str) -> None:
    assert run_ranks(_delay_of_nothing, 2, name) == [True] * 2


def _at_once(rank: int) -> list[float]:
    averager = averagers.PeriodicModelAverager(2, overlap=averagers.Delayed(0, keep=0.25))
    weight = lib.full((3,), 4.0 * rank)
    averager.average_parameters([weight])
    return weight.tolist()


def test_a_delay_of_no_steps_keeps_its_share() -> None:
    assert run_ranks(_at_once, 2) == [[1.5] * 3, [2.5] * 3]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "complex64"])
@pytest.mark.parametrize("name", list(_OPTIONS))
def test_finish_lands_what_is_under_way_and_leaves_one_model(name: str, dtype: str) -> None:
    for steps in (11, 12):
        results = run_ranks(_run, 3, _OPTIONS[name](), averagers.Delayed(2), steps, dtype)
        assert results[0] == results[1] == results[2]


def _slow_twin(rank: int, name: str, keep: float) -> float:
    """Delayed rounds by blocking ones on a copy of the weights as they were sent, which lands by hand."""
    delayed = averagers.PeriodicModelAverager(4, overlap=averagers.Delayed(2, keep=keep), **_OPTIONS[name]())
    blocking = averagers.PeriodicModelAverager(4, **_OPTIONS[name]())
    weight, twin, copy, worst = lib.zeros(300), lib.zeros(300), None, 0.0
    for step in range(18):
        for one in (weight, twin):
            _move([one], rank, step)
        delayed.average_parameters([{"params": [weight], "lr": 0.5}])
        if step % 4 == 2 and copy is not None:
            twin.mul_(keep).add_(copy, alpha=1 - keep)
            copy = None
        if step % 4 == 0:
            copy = twin.clone()
            blocking.step = step
            blocking.average_parameters([{"params": [copy], "lr": 0.5}])
            if step == 0 and name != "plain" and name != "median":  # it only makes the anchor, at once
                twin.copy_(copy)
                copy = None
        worst = max(worst, float((weight - twin).abs().max().item()))
    return worst


@pytest.mark.parametrize("keep", [0.0, 0.5])
@pytest.mark.parametrize("name", list(_OPTIONS))
def test_delayed_rounds_equal_blocking_rounds_of_what_was_sent(name: str, keep: float) -> None:
    assert max(run_ranks(_slow_twin, 2, name, keep)) <= 1e-4


def _resumed(rank: int, name: str, carry: bool) -> list[bool]:
    def build() -> Any:
        delayed = averagers.Delayed(3, carry=True) if carry else averagers.Delayed(3)
        return averagers.HierarchicalModelAverager(
            {2: 2, 8: 4}, nodes=[0, 0, 1, 1], overlap={8: delayed}, **_OPTIONS[name]()
        )

    def train(averager: Any, tensors: list[Any], steps: range) -> None:
        for step in steps:
            _move(tensors, rank, step)
            averager.average_parameters([{"params": tensors, "lr": 0.5}])

    equal = []
    for stop in (9, 10, 11, 12):  # sent at step 8, lands at step 11
        straight, first = [lib.zeros(300), lib.zeros(4, 5)], build()
        train(first, straight, range(stop))
        saved, tensors = first.state_dict(), [tensor.clone() for tensor in straight]
        train(first, straight, range(stop, 21))
        first.finish([{"params": straight, "lr": 0.5}])
        second = build()
        second.load_state_dict(saved)
        train(second, tensors, range(stop, 21))
        second.finish([{"params": tensors, "lr": 0.5}])
        equal.append([bits(one) for one in tensors] == [bits(one) for one in straight])
    return equal


@pytest.mark.parametrize("carry", [False, True])
@pytest.mark.parametrize("name", ["plain", "int4 with feedback", "nesterov"])
def test_a_run_stopped_between_sending_and_landing_equals_the_one_that_was_not(name: str, carry: bool) -> None:
    assert run_ranks(_resumed, 4, name, carry) == [[True] * 4] * 4


def _longer_than_the_period(rank: int) -> tuple[list[tuple[str, int]], list[float]]:
    events: list[Any] = []
    averager = averagers.HierarchicalModelAverager(
        {2: 2, 8: 4}, overlap=averagers.Delayed(3, keep=0.0), observers=[events.append]
    )
    weight = lib.full((3,), float(rank))
    values = []
    for _ in range(12):
        averager.average_parameters([weight])
        values.append(float(weight[0].item()))
    averager.finish([weight])
    return [(type(event).__name__, event.step) for event in events], values


def test_a_round_lands_before_the_next_one_of_its_level_or_of_one_above() -> None:
    events, _ = run_ranks(_longer_than_the_period, 4)[0]
    started = [step for name, step in events if name == "RoundStarted"]
    finished = [step for name, step in events if name == "RoundFinished"]
    assert started == [0, 2, 4, 6, 8, 10, 12]
    assert sorted(finished) == started
    for step in (2, 4, 6):  # of the inner level: before the next
        assert events.index(("RoundFinished", step)) < events.index(("RoundStarted", step + 2))


def _two_averagers(rank: int) -> list[float]:
    """Two averagers of the same ranks, each with a round under way, in the same order on every rank."""
    first = averagers.PeriodicModelAverager(4, overlap=averagers.Delayed(3, keep=0.0))
    second = averagers.PeriodicModelAverager(4, overlap=averagers.Delayed(2, keep=0.0))
    one, two = lib.full((200_000,), float(rank)), lib.full((100_000,), 10.0 * rank)
    for step in range(4):
        if rank == step % 2:
            time.sleep(0.01)
        first.average_parameters([one])
        second.average_parameters([two])
    return [float(one[7].item()), float(two[7].item())]


def test_rounds_of_two_averagers_under_way_do_not_meet() -> None:
    assert run_ranks(_two_averagers, 3) == [[1.0, 10.0]] * 3


def _killed(rank: int) -> str:
    averager = averagers.PeriodicModelAverager(4, overlap=averagers.Delayed(2), timeout_s=4)
    weight = lib.zeros(4_000_000)
    averager.average_parameters([weight])
    if rank == 1:
        import os

        os._exit(9)
    averager.average_parameters([weight])
    started = time.monotonic()
    message = ""
    for _ in range(3):  # lands, or sends the next one
        try:
            averager.average_parameters([weight])
            averager.step = 4
        except averagers.RoundFailedError as error:
            message = str(error)
            break
    assert time.monotonic() - started < 20
    with pytest.raises(averagers.ClosedError):
        averager.average_parameters([weight])
    return message


def test_a_rank_that_dies_between_sending_and_landing_is_named() -> None:
    results = run_ranks(_killed, 3, may_die=[1])
    for rank in (0, 2):
        assert "rank 1 did not come within the timeout of 4 s, or died" in results[rank]


def _outer_that_fails(rank: int, overlap: Any) -> list[str]:
    class Failing(lib.optim.SGD):  # type: ignore[misc, name-defined]
        def step(self, closure: Any = None) -> None:
            raise RuntimeError("no more memory")

    outer = averagers.Outer(lambda params: Failing(params, lr=0.7))
    averager = averagers.PeriodicModelAverager(2, mixer=outer, overlap=overlap, timeout_s=5)
    weight, messages = lib.zeros(3), []
    for _ in range(6):
        try:
            averager.average_parameters([weight])
        except averagers.AveragersError as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def test_an_outer_optimizer_that_fails_ends_a_delayed_round_as_a_blocking_one() -> None:
    for overlap, num_refused in ((None, 3), (averagers.Delayed(1), 2)):
        for failed, *refused in run_ranks(_outer_that_fails, 2, overlap):
            assert "RoundFailedError: the round at step 2, level 0, among ranks 0-1 failed" in failed
            assert "here it was: no more memory" in failed
            assert len(refused) == num_refused
            assert all("ClosedError: a round of this" in message for message in refused)


def _refused(rank: int) -> list[str]:
    messages = []
    weight = lib.zeros(3)
    averager = averagers.PeriodicModelAverager(4, overlap=averagers.Delayed(2))
    averager.average_parameters([weight])
    averager.average_parameters([weight])
    for build in (
        lambda: averagers.PeriodicModelAverager(2, overlap=5),
        lambda: averagers.HierarchicalModelAverager({2: 2}, overlap={4: averagers.Delayed(1)}),
        lambda: averagers.PeriodicModelAverager(2, overlap=averagers.Delayed(1), mixer=averagers.Elastic(0.1)),
        lambda: averagers.PeriodicModelAverager(2, overlap=averagers.Delayed(1 + rank)),
        lambda: averagers.Delayed(-1),
        lambda: averagers.Delayed(1.5),
        lambda: averagers.Delayed(1, keep=1.1),
        lambda: averagers.Delayed(1, keep=-0.1),
        lambda: averagers.Delayed(1, carry=1),
        lambda: averagers.Delayed(1, keep=0.2, carry=True),
        lambda: averager.average_parameters([lib.zeros(4)]),
        lambda: averager.load_state_dict({**averager.state_dict(), "flights": [{"level": 7}]}),
    ):
        with pytest.raises(averagers.AveragersError) as caught:
            build()
        messages.append(str(caught.value))
    with pytest.raises(TypeError, match="with overlap cannot be copied"):
        averager.__deepcopy__({})
    averager.average_parameters([weight])
    averager.close()
    return messages


def test_overlap_that_cannot_work_is_refused_by_name() -> None:
    first, second = run_ranks(_refused, 2)
    assert first == second
    for message, part in zip(
        first,
        [
            "overlap must be a Overlap such as averagers.Delayed(steps=5), or None, got 5 of type int",
            "overlap must be given for periods of the averager, which are 2, got 4",
            "overlap=Delayed(steps=1, keep=0.5, carry=False) cannot work with mixer=Elastic(alpha=0.1)",
            "overlap is ['Delayed(steps=1, keep=0.5, carry=False)'] on rank 0, ['Delayed(steps=2",
            "steps must be at least 0, got -1",
            "steps must be an int, got 1.5",
            "keep must be from 0 to 1, got 1.1",
            "keep must be from 0 to 1, got -0.1",
            "carry must be True or False, got 1",
            "keep must be left out with carry=True, which keeps all progress, got 0.2",
            "params must be the tensors of the round that was sent at step 0, which lands now",
            "flights in state_dict is damaged",
        ],
        strict=True,
    ):
        assert part in message
