"""The order in which the buckets of a round go on, the same on every rank (pure)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import final

from averagers.reduction.interface import Work


@final
@dataclass
class Run:
    """A bucket under way: its generator, the collective it waits for, and when to go on.

    Attributes:
        steps: Yields each collective that it has started.
        lags: How many buckets are started between two steps of this one, for each step in turn.
        num_steps: How many steps it has taken.
        due: The tick of the next step.
        work: The collective to wait for then.
    """

    steps: Generator[Work, None, None]
    lags: Sequence[int]
    num_steps: int = 0
    due: int = 0
    work: Work | None = None

    def advance(self, tick: int, when_late: Callable[[], None]) -> bool:
        """Wait for the collective under way and go on; False at the end."""
        if self.work is not None:
            self.work.wait(when_late)
        self.work = next(self.steps, None)
        if self.work is None:
            return False
        self.due = tick + self.lags[self.num_steps]
        self.num_steps += 1
        return True


def run_pipeline(runs: Iterable[Run], when_late: Callable[[], None]) -> None:
    """Start the runs in turn, and go on with those whose lag has passed.

    When a run goes on is counted in buckets, never in time, so that every rank starts the same
    collectives in the same order.
    """
    under_way: deque[Run] = deque()
    tick = 0
    for run in runs:
        tick += 1
        _advance_due(under_way, tick, when_late)
        if run.advance(tick, when_late):
            under_way.append(run)
    while under_way:
        tick += 1
        _advance_due(under_way, tick, when_late)


def _advance_due(under_way: deque[Run], tick: int, when_late: Callable[[], None]) -> None:
    for run in [run for run in under_way if run.due == tick]:
        if not run.advance(tick, when_late):
            under_way.remove(run)
