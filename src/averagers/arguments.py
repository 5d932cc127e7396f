"""Checks of plain arguments, all raising the same kind of message (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from averagers.errors import InvalidTypeError, InvalidValueError, StateDictError

_YEAR_S = 366 * 86400.0


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
    """Return ``value`` as a float if it is None or a number of seconds, from a millisecond to a year.

    Raises:
        InvalidTypeError: ``value`` is not a number.
        InvalidValueError: ``value`` is out of these bounds.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidTypeError(
            f"{name} must be a number of seconds or None, got {value!r} of type {type(value).__name__}"
        )
    if not 1e-3 <= value <= _YEAR_S:
        raise InvalidValueError(f"{name} must be from 0.001 to {_YEAR_S:.0f} seconds, got {value}")
    return float(value)


def check_nodes(nodes: object, ranks: Sequence[int] | None) -> list[str] | None:
    """Return ``nodes`` as names, if it is None or has one entry for each of ``ranks``.

    Args:
        nodes: The node of each rank; anything whose ``str`` tells nodes apart.
        ranks: Of the process group; None outside it, where it does not matter.

    Raises:
        InvalidTypeError: it is not a sequence.
        InvalidValueError: it has another number of entries.
    """
    if nodes is None or ranks is None:
        return None
    if isinstance(nodes, str | bytes) or not isinstance(nodes, Sequence):
        raise InvalidTypeError(
            f"nodes must be a list with the node of each rank, such as [0, 0, 1, 1], got {nodes!r} "
            f"of type {type(nodes).__name__}"
        )
    if len(nodes) != len(ranks):
        raise InvalidValueError(
            f"nodes must have an entry for each rank of the process group: it has {len(nodes)}, and there are "
            f"{len(ranks)} ranks"
        )
    return [str(node) for node in nodes]


def check_averager_state(state_dict: object, configuration: Mapping[str, Any]) -> tuple[int, set[int]]:
    """Return the step and the positions of once trainable parameters that an averager's state dict holds.

    Args:
        state_dict: What an averager's ``state_dict()`` returned, or should have.
        configuration: Of the averager that loads it.

    Raises:
        StateDictError: an entry is missing or wrong, or the configuration is another one.
    """
    if not isinstance(state_dict, Mapping):
        raise StateDictError(f"state_dict must be what state_dict() returned, got {type(state_dict).__name__}")
    missing = {"step", "configuration", "once_trainable"} - set(state_dict)
    if missing:
        raise StateDictError(f"state_dict lacks {sorted(missing)}: give what state_dict() returned")
    saved = state_dict["configuration"]
    if not isinstance(saved, Mapping):
        raise StateDictError(f"the configuration in state_dict must be a dict, got {saved!r}")
    for name in [*configuration, *(name for name in saved if name not in configuration)]:
        if saved.get(name) != configuration.get(name):
            raise StateDictError(
                f"state_dict is of an averager with {name}={saved.get(name)}, this one has "
                f"{name}={configuration.get(name)}: build it with the same, or set only its step"
            )
    try:
        step = check_whole_number("step in state_dict", state_dict["step"], minimum=0)
        positions = [check_whole_number("a position", one, minimum=0) for one in state_dict["once_trainable"]]
    except (TypeError, ValueError) as error:
        raise StateDictError(f"state_dict is damaged: {error}") from None
    return step, set(positions)
