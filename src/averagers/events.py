"""What happened in a round: frozen records, what listens to them, and what hands them out (pure).

An averager given no observer builds none of these records.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, final

from averagers.errors import InvalidTypeError


@dataclass(frozen=True)
class RoundStarted:
    """The ranks of a group agreed on a round and begin to average.

    Attributes:
        call: What asked for the round: ``"average_parameters"``, ``"finish"`` or ``"averaged"``.
        step: The averager's step at the round.
        level: The level of the hierarchy, 0 the innermost.
        group_size: How many ranks average.
        rank: The global rank of this process.
        num_tensors: How many tensors are averaged.
        num_elements: How many elements they have in all.
    """

    call: str
    step: int
    level: int
    group_size: int
    rank: int
    num_tensors: int
    num_elements: int


@dataclass(frozen=True)
class RoundFinished:
    """A round ended and the mean is in place.

    Attributes:
        call: What asked for the round: ``"average_parameters"``, ``"finish"`` or ``"averaged"``.
        step: The averager's step at the round.
        level: The level of the hierarchy, 0 the innermost.
        group_size: How many ranks averaged.
        rank: The global rank of this process.
        num_tensors: How many tensors were averaged.
        num_elements: How many elements they have in all.
        wire_bytes: Bytes that this rank sent, by the formula of its collectives; headers and the
            agreement message (a few dozen bytes) are not counted.
        seconds: From the start of the agreement to the mean in place, on this rank's clock.
        drift: L2 norm of a replica's distance from the mean before averaging, as root mean square
            over the ranks; None unless the averager was built with ``measure_drift=True``.
    """

    call: str
    step: int
    level: int
    group_size: int
    rank: int
    num_tensors: int
    num_elements: int
    wire_bytes: int
    seconds: float
    drift: float | None


@dataclass(frozen=True)
class RoundFailed:
    """A round, or the broadcast of a module, ended with an error, which is raised right after this record is given.

    Attributes:
        call: What failed: ``"average_parameters"``, ``"finish"``, ``"averaged"`` or ``"broadcast"``.
        step: The averager's step at the round.
        level: The level of the hierarchy, 0 the innermost.
        group_size: How many ranks should have averaged.
        rank: The global rank of this process.
        seconds: From the start of the agreement to the failure, on this rank's clock.
        error: The message of the error.
        missing_ranks: The global ranks that did not arrive, where that is known.
    """

    call: str
    step: int
    level: int
    group_size: int
    rank: int
    seconds: float
    error: str
    missing_ranks: tuple[int, ...]


Event = RoundStarted | RoundFinished | RoundFailed


class Observer(Protocol):
    """Anything that can be called with an event: a function, a sink, ``some_list.append``.

    It is called on the thread of the round, right after what it tells of. One that raises is
    dropped with a warning: a full disk must not end a training run.
    """

    def __call__(self, event: Event, /) -> None:
        """Take note of ``event``."""
        ...


@final
class Announcer:
    """Hands events to observers, and drops those that raise.

    Raises:
        InvalidTypeError: ``observers`` is not an iterable of callables.
    """

    def __init__(self, observers: Iterable[Observer]) -> None:
        if not isinstance(observers, Iterable):
            raise InvalidTypeError(f"observers must be a list of callables, got {observers!r}")
        self.observers = tuple(observers)
        for observer in self.observers:
            if not callable(observer):
                raise InvalidTypeError(f"each of observers must be callable with an event, got {observer!r}")

    def report(self, call: str, step: int, level: int, group_size: int, rank: int) -> RoundReport:
        """Return what builds the events of one round, whose clock starts now."""
        return RoundReport(self, call, step, level, group_size, rank)

    def announce(self, event: Event) -> None:
        """Call every observer with ``event``."""
        for observer in self.observers:
            try:
                observer(event)
            except Exception as error:
                self.observers = tuple(kept for kept in self.observers if kept is not observer)
                warnings.warn(
                    f"the observer {observer!r} raised {type(error).__name__}: {error}; it is not called any more",
                    stacklevel=2,
                )


@final
class RoundReport:
    """Builds the events of one round and announces them; without observers it does nothing."""

    def __init__(self, announcer: Announcer, call: str, step: int, level: int, group_size: int, rank: int) -> None:
        self._announcer = announcer
        self._round = (call, step, level, group_size, rank)
        self._size = (0, 0)
        self._began = time.perf_counter()

    def started(self, num_tensors: int, num_elements: int) -> None:
        """The ranks agreed."""
        self._size = (num_tensors, num_elements)
        if self._announcer.observers:
            self._announcer.announce(RoundStarted(*self._round, *self._size))

    def finished(self, wire_bytes: int, drift: float | None) -> None:
        """The mean is in place."""
        if self._announcer.observers:
            seconds = time.perf_counter() - self._began
            self._announcer.announce(RoundFinished(*self._round, *self._size, wire_bytes, seconds, drift))

    def failed(self, error: Exception, missing_ranks: tuple[int, ...] = ()) -> None:
        """The round ended with ``error``."""
        if self._announcer.observers:
            seconds = time.perf_counter() - self._began
            self._announcer.announce(RoundFailed(*self._round, seconds, str(error), missing_ranks))
