"""When to average: the tables of counting, row by row, and random schedules against a slow oracle."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from averagers.errors import AveragersError
from averagers.hierarchy import Hierarchy
from averagers.schedule import Hierarchical, Periodic, Round, Schedule


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
    assert _due_steps(Periodic(period, warmup_steps=warmup_steps), calls) == expected


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
    assert _due_steps(Periodic(period, warmup_steps=warmup_steps), calls) == expected


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
    periodic = Periodic(period, warmup_steps=warmup_steps)
    assert [hierarchical.due(step) for step in range(200)] == [periodic.due(step) for step in range(200)]


def test_one_level_is_not_periodic_where_the_period_does_not_divide_the_warmup() -> None:
    assert _due_steps(Hierarchical([4], warmup_steps=2), 9) == [4, 8]
    assert _due_steps(Periodic(4, warmup_steps=2), 9) == [2, 6]


def test_the_last_step_of_the_warmup_is_local_and_the_next_is_not() -> None:
    assert Periodic(5, warmup_steps=10).due(9) is None
    assert Periodic(5, warmup_steps=10).due(10) == Round(level=0)
    assert Hierarchical([1, 5], warmup_steps=10).due(9) is None
    assert Hierarchical([1, 5], warmup_steps=10).due(10) == Round(level=1)


def test_a_step_beyond_64_bits_is_decided_like_any_other() -> None:
    assert Periodic(3, warmup_steps=1).due(3 * 10**20 + 1) == Round(level=0)
    assert Periodic(3, warmup_steps=1).due(3 * 10**20) is None


def test_a_round_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Round(level=0).level = 1  # type: ignore[misc]


@pytest.mark.parametrize("period", [0, -1])
def test_a_period_below_one_is_refused_by_name_and_value(period: int) -> None:
    with pytest.raises(ValueError, match=rf"period must be at least 1, got {period}"):
        Periodic(period)


@pytest.mark.parametrize("period", [True, 2.0, "4", None])
def test_a_period_that_is_no_int_is_refused_by_name_and_type(period: object) -> None:
    with pytest.raises(TypeError, match=rf"period must be an int, got .* of type {type(period).__name__}") as caught:
        Periodic(period)  # type: ignore[arg-type]
    assert isinstance(caught.value, AveragersError)


@pytest.mark.parametrize(
    "make",
    [lambda steps: Periodic(2, warmup_steps=steps), lambda steps: Hierarchical([2], warmup_steps=steps)],
)
def test_a_warmup_is_at_least_zero_and_an_int(make: object) -> None:
    assert make(0).warmup_steps == 0  # type: ignore[operator]
    with pytest.raises(ValueError, match="warmup_steps must be at least 0, got -1"):
        make(-1)  # type: ignore[operator]
    with pytest.raises(TypeError, match="warmup_steps must be an int"):
        make(1.0)  # type: ignore[operator]
    with pytest.raises(TypeError, match="warmup_steps must be an int"):
        make(False)  # type: ignore[operator]
