"""How long steps and rounds take (pure)."""

from __future__ import annotations

import time
from typing import final


@final
class Stopwatch:
    """Times the steps between rounds, and the last round.

    Attributes:
        round_s: Seconds of the last round, from the ranks' agreement on; 0 if there was none.
    """

    def __init__(self) -> None:
        self.round_s = 0.0
        self._step_ended_at: float | None = None
        self._num_steps = 0
        self._seconds = 0.0

    def begin_call(self) -> None:
        """A step has been computed."""
        if self._step_ended_at is not None:
            self._seconds += time.perf_counter() - self._step_ended_at
            self._num_steps += 1

    def end_call(self) -> None:
        """The next step begins."""
        self._step_ended_at = time.perf_counter()

    def take_step_s(self) -> float:
        """Return the mean seconds of a step since this was called last; 0 if there was none."""
        mean = self._seconds / self._num_steps if self._num_steps else 0.0
        self._num_steps, self._seconds = 0, 0.0
        return mean
