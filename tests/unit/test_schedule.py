"""When to average: the tables of counting, row by row, and random schedules against a slow oracle."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from averagers.errors import AveragersError
from averagers.hierarchy import Hierarchy
from averagers.pace import Adaptive, EverySeconds, Pace
from averagers.schedule import (
    Every,
    Growing,
    Hierarchical,
    QuadraticRule,
    Round,
    Schedule,
    Shrinking,
    equivalent_period,
)


def _due_steps(schedule: Schedule, calls: int, *, first: int = 0) -> list[int]:
    return [step for step in range(first, first + calls) if schedule.due(step) is not None]


def _rounds(sizes: dict[int, int], warmup_steps: int, calls: int, *, first: int = 0) -> list[tuple[int, int]]:
    """Return (step, group size) of each round, as an averager puts schedule and hierarchy together."""
    hierarchy = Hierarchy.from_periods(sizes, overall_size=max(sizes.values()))
    schedule = Hierarchical(hierarchy.periods, warmup_steps=warmup_steps)
    due = [(step, schedule.due(step)) for step in range(first, first + calls)]
    return [(step, hierarchy.levels[round_.level].group_size) for step, round_ in due if round_]


@pytest.mark.parametrize(
    ("period", "warmup_steps", "calls", "expected"),
    [
        (4, 0, 13, [0, 4, 8, 12]),
        (4, 2, 13, [2, 6, 10]),
        (3, 5, 20, [5, 8, 11, 14, 17]),
        (16, 8, 60, [8, 24, 40, 56]),
        (1, 0, 4, [0, 1, 2, 3]),
    ],
)
def test_periodic_averages_at_the_steps_of_the_table(
    period: int, warmup_steps: int, calls: int, expected: list[int]
) -> None:
    assert _due_steps(Every(period, warmup_steps=warmup_steps), calls) == expected


@pytest.mark.parametrize(
    ("sizes", "warmup_steps", "first", "calls", "expected"),
    [
        (
            {2: 2, 4: 4, 8: 16},
            0,
            0,
            17,
            [(0, 16), (2, 2), (4, 4), (6, 2), (8, 16), (10, 2), (12, 4), (14, 2), (16, 16)],
        ),
        ({2: 2, 4: 4, 8: 16}, 7, 0, 17, [(8, 16), (10, 2), (12, 4), (14, 2), (16, 16)]),
        (
            {2: 4, 3: 16},
            0,
            0,
            13,
            [(0, 16), (2, 4), (3, 16), (4, 4), (6, 16), (8, 4), (9, 16), (10, 4), (12, 16)],
        ),
        ({4: 16}, 2, 0, 13, [(4, 16), (8, 16), (12, 16)]),
        (
            {16: 16, 4: 8},
            100,
            100,
            21,
            [(100, 8), (104, 8), (108, 8), (112, 16), (116, 8), (120, 8)],
        ),
    ],
)
def test_hierarchy_averages_at_the_steps_and_sizes_of_the_table(
    sizes: dict[int, int], warmup_steps: int, first: int, calls: int, expected: list[tuple[int, int]]
) -> None:
    assert _rounds(sizes, warmup_steps, calls, first=first) == expected


@given(period=st.integers(1, 40), warmup_steps=st.integers(0, 60), calls=st.integers(0, 150))
def test_periodic_rounds_are_the_end_of_the_warmup_and_a_period_from_round_to_round(
    period: int, warmup_steps: int, calls: int
) -> None:
    expected, at = [], warmup_steps
    while at < calls:
        expected.append(at)
        at += period
    assert _due_steps(Every(period, warmup_steps=warmup_steps), calls) == expected


@given(
    periods=st.lists(st.integers(1, 30), min_size=1, max_size=5, unique=True),
    growth=st.lists(st.integers(1, 4), min_size=5, max_size=5),
    warmup_steps=st.integers(0, 50),
    calls=st.integers(0, 120),
)
def test_of_the_periods_that_divide_the_step_the_longest_decides_the_group(
    periods: list[int], growth: list[int], warmup_steps: int, calls: int
) -> None:
    size, sizes = 1, {}
    for period, factor in zip(sorted(periods), growth, strict=False):
        size *= factor
        sizes[period] = size
    given_order = {period: sizes[period] for period in periods}
    expected = []
    for step in range(warmup_steps, calls):
        dividing = [period for period in periods if step % period == 0]
        if dividing:
            expected.append((step, sizes[max(dividing)]))
    assert _rounds(given_order, warmup_steps, calls) == expected


@given(period=st.integers(1, 20), warmup_periods=st.integers(0, 5))
def test_one_level_is_periodic_where_the_period_divides_the_warmup(period: int, warmup_periods: int) -> None:
    warmup_steps = period * warmup_periods
    hierarchical = Hierarchical([period], warmup_steps=warmup_steps)
    periodic = Every(period, warmup_steps=warmup_steps)
    assert [hierarchical.due(step) for step in range(200)] == [periodic.due(step) for step in range(200)]


def test_one_level_is_not_periodic_where_the_period_does_not_divide_the_warmup() -> None:
    assert _due_steps(Hierarchical([4], warmup_steps=2), 9) == [4, 8]
    assert _due_steps(Every(4, warmup_steps=2), 9) == [2, 6]


def test_the_last_step_of_the_warmup_is_local_and_the_next_is_not() -> None:
    assert Every(5, warmup_steps=10).due(9) is None
    assert Every(5, warmup_steps=10).due(10) == Round(level=0)
    assert Hierarchical([1, 5], warmup_steps=10).due(9) is None
    assert Hierarchical([1, 5], warmup_steps=10).due(10) == Round(level=1)


def test_a_step_beyond_64_bits_is_decided_like_any_other() -> None:
    assert Every(3, warmup_steps=1).due(3 * 10**20 + 1) == Round(level=0)
    assert Every(3, warmup_steps=1).due(3 * 10**20) is None


def test_a_round_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Round(level=0).level = 1  # type: ignore[misc]


@pytest.mark.parametrize("period", [0, -1])
def test_a_period_below_one_is_refused_by_name_and_value(period: int) -> None:
    with pytest.raises(ValueError, match=rf"period must be at least 1, got {period}"):
        Every(period)


@pytest.mark.parametrize("period", [True, 2.0, "4", None])
def test_a_period_that_is_no_int_is_refused_by_name_and_type(period: object) -> None:
    with pytest.raises(TypeError, match=rf"period must be an int, got .* of type {type(period).__name__}") as caught:
        Every(period)  # type: ignore[arg-type]
    assert isinstance(caught.value, AveragersError)


@pytest.mark.parametrize(
    "make",
    [lambda steps: Every(2, warmup_steps=steps), lambda steps: Hierarchical([2], warmup_steps=steps)],
)
def test_a_warmup_is_at_least_zero_and_an_int(make: object) -> None:
    assert make(0).warmup_steps == 0  # type: ignore[operator]
    with pytest.raises(ValueError, match="warmup_steps must be at least 0, got -1"):
        make(-1)  # type: ignore[operator]
    with pytest.raises(TypeError, match="warmup_steps must be an int"):
        make(1.0)  # type: ignore[operator]
    with pytest.raises(TypeError, match="warmup_steps must be an int"):
        make(False)  # type: ignore[operator]


# The quadratic rule


@pytest.mark.parametrize(("lr", "period"), [(0.008, 4), (0.006, 8), (0.004, 19), (0.002, 76), (0.001, 306)])
def test_the_quadratic_rule_is_at_the_worked_numbers(lr: float, period: int) -> None:
    rule = QuadraticRule(0.0175, 4, lambda step: lr, total_steps=10**6)
    assert rule.period_at(0) == period
    assert _due_steps(rule, 3 * period) == [0, period, 2 * period]


def test_the_quadratic_rule_ends_at_the_last_step_and_then_goes_on_at_its_shortest() -> None:
    rule = QuadraticRule(0.0175, 4, lambda step: 0.001, total_steps=400)
    assert _due_steps(rule, 420) == [0, 306, 399, 403, 407, 411, 415, 419]
    assert _due_steps(QuadraticRule(0.0175, 4, lambda step: 0.0, total_steps=50), 50) == [0, 49]
    assert _due_steps(QuadraticRule(1.0, 4, lambda step: 1e-300, total_steps=50), 50) == [0, 49]


def test_the_quadratic_rule_is_at_its_shortest_while_the_learning_rate_rises() -> None:
    rule = QuadraticRule(1.0, 2, lambda step: min(step + 1, 10) / 20, total_steps=100)
    # Up to step 8 the rate rises; at 0.5 the rule gives 4.
    assert _due_steps(rule, 24) == [0, 2, 4, 6, 8, 10, 14, 18, 22]


def test_the_quadratic_rule_decides_the_same_wherever_a_run_resumes() -> None:
    def build() -> QuadraticRule:
        return QuadraticRule(0.02, 3, lambda step: 0.01 * (1 - step / 500), total_steps=500, warmup_steps=10)

    whole, resumed = build(), build()
    assert [bool(resumed.due(step)) for step in range(250, 500)] == [bool(whole.due(step)) for step in range(500)][250:]
    assert whole.due(9) is None
    assert whole.due(10) == Round(level=0)


@given(st.integers(1, 50), st.integers(1, 2000), st.floats(1e-4, 1.0), st.floats(1e-4, 1.0))
def test_periods_of_the_quadratic_rule_keep_their_limits(
    min_period: int, total_steps: int, alpha: float, peak: float
) -> None:
    rule = QuadraticRule(alpha, min_period, lambda step: peak * (1 - step / (2 * total_steps)), total_steps=total_steps)
    due = _due_steps(rule, total_steps)
    assert due[0] == 0
    assert due[-1] == total_steps - 1
    assert all(after - before >= min_period for before, after in pairwise(due[:-1]))


def test_ranks_with_other_learning_rates_are_told_apart() -> None:
    one = QuadraticRule(0.02, 3, lambda step: 0.01, total_steps=500)
    other = QuadraticRule(0.02, 3, lambda step: 0.01 if step < 250 else 0.005, total_steps=500)
    assert one.configuration() != other.configuration()


# Ramps


def test_ramps_go_from_the_first_period_to_the_last_and_stay_there() -> None:
    growing, shrinking = Growing(2, 32, total_steps=200, warmup_steps=5), Shrinking(32, 2, total_steps=200)
    periods = [growing.period_at(step) for step in range(5, 400)]
    assert (periods[0], periods[-1], periods[195]) == (2, 32, 32)
    assert periods == sorted(periods)
    assert [shrinking.period_at(step) for step in (0, 100, 200, 1000)] == [32, 8, 2, 2]
    assert growing.due(4) is None
    assert _due_steps(growing, 3, first=5) == [5, 7]


# Schedules that decide from what was measured


def test_the_adaptive_period_is_the_least_that_keeps_rounds_within_their_share() -> None:
    schedule = Adaptive(0.05)
    assert [step for step in range(3) if schedule.due(step)] == [0, 1, 2]
    schedule.decide(0, Pace(step_s=0.0, round_s=0.0))
    assert (schedule.period, schedule.next_step) == (1, 1)
    step = 1
    for period in (2, 4, 8, 10, 10):  # 0.1 s of 5 % of steps of 0.2 s; at most twice the one before
        schedule.decide(step, Pace(step_s=0.2, round_s=0.1))
        assert schedule.period == period
        assert [schedule.due(step + ahead) is not None for ahead in (1, period - 1, period)][1:] == [False, True]
        step += period
    schedule.decide(step, Pace(step_s=0.2, round_s=10.0))
    schedule.decide(step, Pace(step_s=0.2, round_s=0.01))
    assert schedule.period == 1


def test_every_seconds_counts_in_steps_of_the_slowest_rank_and_keeps_to_the_longest_period() -> None:
    schedule = EverySeconds(60, max_period=100)
    for _ in range(8):
        schedule.decide(0, Pace(step_s=1.0, round_s=4.0))
    assert schedule.period == 56
    schedule.decide(0, Pace(step_s=0.01, round_s=4.0))
    assert schedule.period == 100
    schedule.decide(0, Pace(step_s=1.0, round_s=70.0))
    assert schedule.period == 1


def test_what_a_schedule_decided_is_saved_and_loaded() -> None:
    schedule, other = Adaptive(), Adaptive()
    schedule.decide(7, Pace(1.0, 100.0))
    other.load_state_dict(schedule.state_dict())
    assert (other.next_step, other.period) == (schedule.next_step, schedule.period) == (9, 2)
    for damaged in ({}, {"next_step": -1, "period": 2}, {"next_step": 4, "period": "2"}):
        with pytest.raises(AveragersError, match="the schedule in state_dict is damaged"):
            other.load_state_dict(damaged)
    assert (other.next_step, other.period) == (9, 2)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: QuadraticRule(0.0, 4, lambda step: 0.1, total_steps=9), "alpha must be over 0 and finite, got 0.0"),
        (lambda: QuadraticRule(0.1, 0, lambda step: 0.1, total_steps=9), "min_period must be at least 1, got 0"),
        (lambda: QuadraticRule(0.1, 4, 0.1, total_steps=9), "lr_at must be a function of the step, got 0.1"),
        (
            lambda: QuadraticRule(0.1, 4, lambda step: -1.0, total_steps=9),
            "lr_at must return a learning rate of at least 0",
        ),
        (
            lambda: QuadraticRule(0.1, 4, lambda step: "x", total_steps=9),
            "what lr_at returns at step 0 must be a number, got 'x'",
        ),
        (
            lambda: QuadraticRule(0.1, 4, lambda step: 10**400, total_steps=9),
            "lr_at must return a learning rate of at least 0 and finite",
        ),
        (
            lambda: QuadraticRule(0.1, 4, lambda: 0.1, total_steps=9),
            "lr_at must be a function of the step alone: at step 0 it raised",
        ),
        (lambda: Growing(4, 2, total_steps=9), "last must be at least first, got 2 and 4: or take Shrinking"),
        (lambda: Shrinking(2, 4, total_steps=9), "last must be at most first, got 4 and 2: or take Growing"),
        (lambda: Growing(2, 4, total_steps=5, warmup_steps=5), "total_steps must be at least 6, got 5"),
        (lambda: Adaptive(0.0), "overhead must be over 0 and at most 1, got 0.0"),
        (lambda: Adaptive(1.5), "overhead must be over 0 and at most 1, got 1.5"),
        (lambda: Adaptive(max_period=0), "max_period must be at least 1, got 0"),
        (lambda: EverySeconds(-1), "seconds must be over 0 and finite, got -1"),
        (lambda: EverySeconds("60"), "seconds must be a number, got '60'"),
        (lambda: equivalent_period(1, 1, 1, 2), "world_size must be at least 2, got 1"),
        (lambda: equivalent_period(8, 3, 1, 2), "groups must each divide those of the level within, got 3 of 8"),
        (lambda: equivalent_period(8, [4, 2], 1, 2), "there are 3 levels, and 2 periods"),
        (
            lambda: equivalent_period(8, None, 1, 2),
            "groups must be an int or a list of them, got None of type NoneType",
        ),
        (lambda: equivalent_period(8, 2, 0, 2), "period must be at least 1, got 0"),
    ],
)
def test_settings_out_of_their_limits_are_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(AveragersError, match=re.escape(message)):
        build()


# Equivalent periods


def _spread(world_size: int, groups: list[int], periods: list[int]) -> float:
    """Return the mean over time of mean_i |x_i - mean|^2 for unit noise a step, by following the covariance."""
    covariance = torch.zeros(world_size, world_size, dtype=torch.float64)
    sizes = [world_size // count for count in [*groups, 1]]
    total = 0.0
    for step in range(1, periods[-1] + 1):
        covariance += torch.eye(world_size)
        for size, period in zip(sizes, periods, strict=True):
            if step % period == 0:
                blocks = torch.block_diag(*[torch.full((size, size), 1 / size)] * (world_size // size)).double()
                covariance = blocks @ covariance @ blocks
        total += float(covariance.trace() - covariance.sum() / world_size) / world_size
    return total / periods[-1]


@pytest.mark.parametrize(
    ("world_size", "groups", "periods"),
    [(32, [4], [1, 50]), (8, [2], [5, 20]), (8, [4], [5, 20]), (12, [6, 2], [1, 4, 12]), (8, [1], [3, 6])],
)
def test_the_equivalent_period_has_the_same_noise(world_size: int, groups: list[int], periods: list[int]) -> None:
    flat = equivalent_period(world_size, groups, *periods)
    # A flat period H has the spread (H - 1) / 2 * (n - 1) / n.
    expected = (flat - 1) / 2 * (world_size - 1) / world_size
    assert _spread(world_size, groups, periods) == pytest.approx(expected)


def test_the_equivalent_period_of_the_examples() -> None:
    assert equivalent_period(32, 4, 1, 50) == pytest.approx(5.7419, abs=1e-4)
    assert (equivalent_period(8, 2, 5, 20) - 1) / 2 * 7 / 8 == pytest.approx(2.6875)
    assert (equivalent_period(8, 4, inner=5, outer=20) - 1) / 2 * 7 / 8 == pytest.approx(4.5625)
    assert equivalent_period(8, 1, 6, 6) == 6
