"""Checks of plain arguments: both sides of each limit, and messages that name argument, value and rule."""

from __future__ import annotations

import fractions
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from averagers.arguments import check_seconds, check_whole_number
from averagers.errors import InvalidTypeError, InvalidValueError


@given(minimum=st.integers(), above=st.integers(min_value=0))
def test_an_int_of_at_least_the_minimum_is_returned(minimum: int, above: int) -> None:
    assert check_whole_number("count", minimum + above, minimum=minimum) == minimum + above


@given(minimum=st.integers(), below=st.integers(min_value=1))
def test_an_int_below_the_minimum_is_refused_by_name_value_and_rule(minimum: int, below: int) -> None:
    with pytest.raises(InvalidValueError) as caught:
        check_whole_number("count", minimum - below, minimum=minimum)
    assert str(caught.value) == f"count must be at least {minimum}, got {minimum - below}"


@pytest.mark.parametrize("value", [True, False, 1.0, math.inf, "1", None, [1], fractions.Fraction(3)])
def test_what_is_no_int_is_refused_by_name_value_and_type(value: object) -> None:
    with pytest.raises(InvalidTypeError) as caught:
        check_whole_number("count", value, minimum=0)
    assert str(caught.value) == f"count must be an int, got {value!r} of type {type(value).__name__}"


def test_no_seconds_are_no_limit() -> None:
    assert check_seconds("timeout_s", None) is None


@given(st.floats(min_value=1e-3, max_value=366 * 86400))
def test_seconds_from_a_millisecond_to_a_year_are_returned(value: float) -> None:
    assert check_seconds("timeout_s", value) == value


def test_seconds_given_as_an_int_become_a_float() -> None:
    assert isinstance(check_seconds("timeout_s", 3), float)


@pytest.mark.parametrize("value", [0, 0.0, 9e-4, -1, 366 * 86400 + 1, 1e300, math.inf, -math.inf, math.nan])
def test_seconds_out_of_these_bounds_are_refused(value: float) -> None:
    with pytest.raises(InvalidValueError) as caught:
        check_seconds("timeout_s", value)
    assert str(caught.value) == f"timeout_s must be from 0.001 to 31622400 seconds, got {value}"


@pytest.mark.parametrize("value", [True, "3", [3.0], 3j])
def test_what_is_no_number_of_seconds_is_refused(value: object) -> None:
    with pytest.raises(InvalidTypeError, match="timeout_s must be a number of seconds or None") as caught:
        check_seconds("timeout_s", value)
    assert type(value).__name__ in str(caught.value)
