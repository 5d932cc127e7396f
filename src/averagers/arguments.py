"""Checks of plain arguments, all raising the same kind of message (pure)."""

from __future__ import annotations

from averagers.errors import InvalidTypeError, InvalidValueError


def check_whole_number(name: str, value: object, *, minimum: int) -> int:
    """Return ``value`` if it is an ``int`` of at least ``minimum``; a ``bool`` is not an ``int`` here.

    Raises:
        InvalidTypeError: ``value`` is not an ``int``.
        InvalidValueError: ``value`` is less than ``minimum``.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidTypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
    if value < minimum:
        raise InvalidValueError(f"{name} must be at least {minimum}, got {value}")
    return value


def check_seconds(name: str, value: object) -> float | None:
    """Return ``value`` as a float if it is None or a positive, finite number of seconds.

    Raises:
        InvalidTypeError: ``value`` is not a number.
        InvalidValueError: ``value`` is not positive and finite.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidTypeError(
            f"{name} must be a number of seconds or None, got {value!r} of type {type(value).__name__}"
        )
    if not 0 < value < float("inf"):
        raise InvalidValueError(f"{name} must be a positive, finite number of seconds, got {value}")
    return float(value)
