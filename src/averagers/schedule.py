"""When to average: pure decisions on the step, the same on every rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from averagers.arguments import check_whole_number


@dataclass(frozen=True)
class Round:
    """One averaging at one level.

    Attributes:
        level: The level whose group averages, 0 the innermost.
    """

    level: int


class Schedule(ABC):
    """Decides at which steps which level averages.

    Attributes:
        warmup_steps: How many steps come before the first round may be due.
    """

    warmup_steps: int

    @abstractmethod
    def due(self, step: int) -> Round | None:
        """Return the round due at ``step``, or None when the step is local."""


@final
class Periodic(Schedule):
    """Every ``period`` steps, counted from the end of the warm-up.

    Example:
        >>> from averagers.schedule import Periodic
        >>> [step for step in range(20) if Periodic(3, warmup_steps=5).due(step)]
        [5, 8, 11, 14, 17]
    """

    def __init__(self, period: int, *, warmup_steps: int = 0) -> None:
        self.period = check_whole_number("period", period, minimum=1)
        self.warmup_steps = check_whole_number("warmup_steps", warmup_steps, minimum=0)
        self._round = Round(level=0)

    def due(self, step: int) -> Round | None:
        """Return the round due at ``step``, or None when the step is local."""
        since_warmup = step - self.warmup_steps
        return self._round if since_warmup >= 0 and since_warmup % self.period == 0 else None


@final
class Hierarchical(Schedule):
    """Several periods at once: of those that divide the step, the longest decides the level.

    Periods divide the step itself: they are not counted from the end of the warm-up.

    Args:
        periods: The period of each level, ascending.
        warmup_steps: Steps before the first round may be due.

    Example:
        >>> from averagers.schedule import Hierarchical
        >>> schedule = Hierarchical([2, 4], warmup_steps=3)
        >>> [(step, round.level) for step in range(9) if (round := schedule.due(step))]
        [(4, 1), (6, 0), (8, 1)]
    """

    def __init__(self, periods: Sequence[int], *, warmup_steps: int = 0) -> None:
        self.periods = tuple(periods)
        self.warmup_steps = check_whole_number("warmup_steps", warmup_steps, minimum=0)
        self._longest_first = [(period, Round(level)) for level, period in enumerate(self.periods)][::-1]

    def due(self, step: int) -> Round | None:
        """Return the round due at ``step``, or None when the step is local."""
        if step < self.warmup_steps:
            return None
        for period, round_ in self._longest_first:
            if step % period == 0:
                return round_
        return None
