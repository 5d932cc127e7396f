"""Checks of plain arguments, all raising the same kind of message (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import inf
from numbers import Real
from typing import Any, NamedTuple, TypeVar

from averagers.errors import InvalidTypeError, InvalidValueError, StateDictError

_YEAR_S = 366 * 86400.0

_Kind = TypeVar("_Kind")

_SUCH_AS = {
    "Codec": "averagers.Int8()",
    "Rule": "averagers.Median()",
    "Mixer": "averagers.Nesterov()",
    "Overlap": "averagers.Delayed(steps=5)",
    "str": "'cpu'",
}


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


def check_positive(name: str, value: object) -> float:
    """Return ``value`` as a float if it is a finite number over 0.

    Raises:
        InvalidTypeError: it is not a number.
        InvalidValueError: it is not finite, or not over 0.
    """
    number = check_number(name, value)
    if not 0 < number < inf:
        raise InvalidValueError(f"{name} must be over 0 and finite, got {value}")
    return number


def check_share(name: str, value: object) -> float:
    """Return ``value`` as a float if it is a number over 0, and at most 1.

    Raises:
        InvalidTypeError: it is not a number.
        InvalidValueError: it is out of these bounds.
    """
    number = check_number(name, value)
    if not 0 < number <= 1:
        raise InvalidValueError(f"{name} must be over 0 and at most 1, got {value}")
    return number


def check_weight(weight: object) -> float:
    """Return ``weight`` as a float if it is a finite number of at least 0.

    Raises:
        InvalidTypeError: it is not a number.
        InvalidValueError: it is negative or not finite.
    """
    number = check_number("weight", weight)
    if not 0 <= number < inf:
        raise InvalidValueError(f"weight must be at least 0 and finite, such as a number of samples, got {weight}")
    return number


def check_number(name: str, value: object) -> float:
    """Return ``value`` as a float; one beyond a float's range is infinite.

    Raises:
        InvalidTypeError: it is not a number; a ``bool`` is none here.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidTypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        return inf if value >= 0 else -inf  # type: ignore[operator]


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


def check_axes(axis_period_dict: object, mesh_axes: Sequence[str] | None) -> tuple[str, ...]:
    """Return the axes to average along, in the mesh's order, if each has a period and inner ones the shorter.

    Args:
        axis_period_dict: Maps axes to periods.
        mesh_axes: Of the mesh, the outermost first; None if it has no names.

    Raises:
        InvalidTypeError: it is not a mapping, a period is not an ``int``, or the mesh has no named axes.
        InvalidValueError: it is empty, names an axis that is not there, or its periods do not fit the mesh.
    """
    name = "axis_period_dict"
    if not mesh_axes:
        raise InvalidTypeError("mesh must be a DeviceMesh with named axes: give init_device_mesh its mesh_dim_names")
    if not isinstance(axis_period_dict, Mapping):
        raise InvalidTypeError(
            f"{name} must map axes of the mesh to periods, such as {{'replicate': 50}}, got {axis_period_dict!r} "
            f"of type {type(axis_period_dict).__name__}"
        )
    unknown = [axis for axis in axis_period_dict if axis not in mesh_axes]
    if unknown or not axis_period_dict:
        raise InvalidValueError(
            f"{name} must name axes of the mesh, which has {', '.join(map(repr, mesh_axes))}, got {axis_period_dict!r}"
        )
    axes = tuple(axis for axis in mesh_axes if axis in axis_period_dict)
    for axis in axes:
        check_whole_number(f"the period of axis {axis!r} in {name}", axis_period_dict[axis], minimum=1)
    for outer, inner in pairwise(axes):
        if axis_period_dict[inner] >= axis_period_dict[outer]:
            raise InvalidValueError(
                f"in {name} an axis within another must have the shorter period: {inner!r} lies within {outer!r}, and "
                f"has period {axis_period_dict[inner]}, not less than {axis_period_dict[outer]}"
            )
    return axes


def per_level(name: str, value: object, periods: Sequence[int], kind: type[_Kind]) -> tuple[_Kind | None, ...]:
    """Return an option for each level, given once for all or as a dict by period; 0 stands for no fixed period.

    Raises:
        InvalidTypeError: a value is neither of ``kind`` nor None.
        InvalidValueError: the dict has a period that no level has.
    """
    by_period: Mapping[Any, Any] = value if isinstance(value, Mapping) else dict.fromkeys(periods, value)
    unknown = [period for period in by_period if period not in periods]
    if unknown:
        known = ", ".join(map(str, periods)) if all(periods) else "no fixed ones: give one for all"
        raise InvalidValueError(
            f"{name} must be given for periods of the averager, which are {known}, got {unknown[0]!r}"
        )
    for one in by_period.values():
        if one is not None and not isinstance(one, kind):
            raise InvalidTypeError(
                f"{name} must be a {kind.__name__} such as {_SUCH_AS[kind.__name__]}, or None, got {one!r} "
                f"of type {type(one).__name__}"
            )
    return tuple(by_period.get(period) for period in periods)


class AveragerState(NamedTuple):
    """What an averager's state dict says beside its anchors.

    Attributes:
        step: The step.
        once_trainable: Positions of parameters that were ever trainable.
        weights: Of this rank, since the last round of each unit; None where none was given.
        num_rounds: How many rounds were due.
        num_steps_since: How many steps this rank did since the last round of each unit.
        one_model_at: After which step, with which tensors, a round of all ranks left one model.
    """

    step: int
    once_trainable: frozenset[int]
    weights: tuple[float | None, ...]
    num_rounds: int
    num_steps_since: tuple[int, ...]
    one_model_at: tuple[int, bytes] | None


def check_averager_state(state_dict: object, configuration: Mapping[str, Any], num_units: int) -> AveragerState:
    """Return what an averager's state dict says beside its anchors.

    Args:
        state_dict: What an averager's ``state_dict()`` returned, or should have.
        configuration: Of the averager that loads it.
        num_units: How many fragments its levels have in all.

    Raises:
        StateDictError: an entry is missing or wrong, or the configuration is another one.
    """
    if not isinstance(state_dict, Mapping):
        raise StateDictError(f"state_dict must be what state_dict() returned, got {type(state_dict).__name__}")
    missing = {"configuration", *AveragerState._fields} - set(state_dict)
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
        state = AveragerState(
            check_whole_number("step in state_dict", state_dict["step"], minimum=0),
            frozenset(check_whole_number("a position", one, minimum=0) for one in state_dict["once_trainable"]),
            tuple(None if weight is None else check_weight(weight) for weight in state_dict["weights"]),
            check_whole_number("num_rounds", state_dict["num_rounds"], minimum=0),
            tuple(check_whole_number("num_steps_since", one, minimum=0) for one in state_dict["num_steps_since"]),
            _one_model(state_dict["one_model_at"]),
        )
        if len(state.weights) != num_units or len(state.num_steps_since) != num_units:
            raise InvalidValueError(f"there must be a weight and a number of steps for each of {num_units} units")
    except (TypeError, ValueError) as error:
        raise StateDictError(f"state_dict is damaged: {error}") from None
    return state


def _one_model(saved: Any) -> tuple[int, bytes] | None:
    if saved is None:
        return None
    step, digest = saved
    return check_whole_number("one_model_at", step, minimum=0), bytes.fromhex(digest)
