"""How long steps and rounds take, and schedules that decide by it (pure)."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, final

from averagers.arguments import check_positive, check_share, check_whole_number
from averagers.errors import StateDictError
from averagers.schedule import ROUND, Round, Schedule


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


@dataclass(frozen=True)
class Pace:
    """How long things took, as the slowest rank measured it.

    Attributes:
        step_s: Seconds of a step since the last round, rounds not counted; 0 if there was none.
        round_s: Seconds of the last round from the ranks' agreement on; 0 if there was none.
    """

    step_s: float
    round_s: float


class PacedSchedule(Schedule):
    """Decides at a round when the next one is due, from what the ranks told each other in it.

    All ranks decide from the same figures, and so the same; its ``state_dict`` belongs to a checkpoint.

    Args:
        warmup_steps: Steps before the first round.
        max_period: The longest period, in steps.
    """

    def __init__(self, warmup_steps: int, max_period: int) -> None:
        self.warmup_steps = check_whole_number("warmup_steps", warmup_steps, minimum=0)
        self.max_period = check_whole_number("max_period", max_period, minimum=1)
        self.next_step = self.warmup_steps
        self.period = 1

    @abstractmethod
    def wanted_period(self, pace: Pace) -> float:
        """Return how many steps there should be until the next round."""

    def decide(self, step: int, pace: Pace) -> None:
        """Set the step of the next round, after one at ``step``.

        The period at most doubles from round to round: the first figures are of few steps.
        """
        wanted = self.wanted_period(pace) if pace.step_s > 0 else 1
        self.period = max(1, min(ceil(wanted), self.max_period, 2 * self.period))
        self.next_step = step + self.period

    def due(self, step: int) -> Round | None:
        """Return the round due at ``step``, or None when the step is local."""
        return ROUND if step >= self.next_step else None

    def state_dict(self) -> dict[str, int]:
        """Return what was decided."""
        return {"next_step": self.next_step, "period": self.period}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what was decided.

        Raises:
            StateDictError: an entry is missing or wrong.
        """
        try:
            next_step = check_whole_number("next_step", state_dict["next_step"], minimum=0)
            self.period = check_whole_number("period", state_dict["period"], minimum=1)
        except (KeyError, TypeError, ValueError) as error:
            raise StateDictError(f"the schedule in state_dict is damaged: {error!r}") from None
        self.next_step = next_step


@final
class Adaptive(PacedSchedule):
    """Picks its own period, so that rounds take at most a share of the time of the steps between them.

    Args:
        overhead: That share, over 0 and at most 1.
        max_period: The longest period, in steps.
        warmup_steps: Steps before the first round.

    Raises:
        InvalidTypeError, InvalidValueError: an argument breaks a rule.

    Example:
        >>> averager = averagers.PeriodicModelAverager(schedule=averagers.Adaptive(overhead=0.05))
    """

    def __init__(self, overhead: float = 0.05, *, max_period: int = 1000, warmup_steps: int = 0) -> None:
        super().__init__(warmup_steps, max_period)
        self.overhead = check_share("overhead", overhead)

    def wanted_period(self, pace: Pace) -> float:
        """Return the least ``H`` with ``round time <= overhead * H * step time``."""
        return pace.round_s / (self.overhead * pace.step_s)

    def configuration(self) -> dict[str, Any]:
        """Return the numbers."""
        return {
            "schedule": f"Adaptive({self.overhead}, max_period={self.max_period}, warmup_steps={self.warmup_steps})"
        }


@final
class EverySeconds(PacedSchedule):
    """Averages about every so many seconds, counted in the slowest rank's steps.

    Args:
        seconds: From one round to the next.
        max_period: The longest period, in steps.
        warmup_steps: Steps before the first round.

    Raises:
        InvalidTypeError, InvalidValueError: an argument breaks a rule.

    Example:
        >>> averager = averagers.PeriodicModelAverager(schedule=averagers.EverySeconds(60))
    """

    def __init__(self, seconds: float, *, max_period: int = 10**6, warmup_steps: int = 0) -> None:
        super().__init__(warmup_steps, max_period)
        self.seconds = check_positive("seconds", seconds)

    def wanted_period(self, pace: Pace) -> float:
        """Return how many steps, and a round, take so long."""
        return (self.seconds - pace.round_s) / pace.step_s

    def configuration(self) -> dict[str, Any]:
        """Return the numbers."""
        return {
            "schedule": f"EverySeconds({self.seconds}, max_period={self.max_period}, warmup_steps={self.warmup_steps})"
        }
