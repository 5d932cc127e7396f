"""When to average: decisions on the step, the same on every rank (pure)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import pairwise
from math import floor, inf
from typing import Any, final

from averagers.arguments import check_number, check_positive, check_whole_number
from averagers.errors import InvalidTypeError, InvalidValueError


@dataclass(frozen=True)
class Round:
    """One averaging at one level.

    Attributes:
        level: The level whose group averages, 0 the innermost.
        fragment: Which part of the model.
        within: A round of a level within that comes first, where this one is of a part alone.
    """

    level: int
    fragment: int = 0
    within: Round | None = None


ROUND = Round(level=0)
"""The one of a schedule with one level."""


class Schedule(ABC):
    """Decides at which steps which level averages.

    Attributes:
        warmup_steps: How many steps come before the first round may be due.
    """

    warmup_steps: int

    @abstractmethod
    def due(self, step: int) -> Round | None:
        """Return the round due at ``step``, or None when the step is local."""

    @abstractmethod
    def configuration(self) -> dict[str, Any]:
        """Return what must be equal on all ranks, and in a checkpoint that is loaded."""

    def in_fragments(self, counts: Sequence[int]) -> Schedule:
        """Return the schedule with so many fragments at each level, each at its own place in the period.

        Raises:
            InvalidValueError: the schedule has no fixed period.
        """
        if set(counts) != {1}:
            raise InvalidValueError(
                f"fragments need places in a fixed period, which a {type(self).__name__} does not have: give a period"
            )
        return self


@final
class Every(Schedule):
    """Every ``period`` steps, counted from the end of the warm-up.

    Args:
        period: Steps from one round to the next.
        warmup_steps: Steps before the first round.

    Raises:
        InvalidTypeError, InvalidValueError: an argument breaks a rule.

    Example:
        >>> schedule = averagers.Every(3, warmup_steps=5)
        >>> [step for step in range(20) if schedule.due(step)]
        [5, 8, 11, 14, 17]
    """

    def __init__(self, period: int, warmup_steps: int = 0) -> None:
        self.period = check_whole_number("period", period, minimum=1)
        self.warmup_steps = check_whole_number("warmup_steps", warmup_steps, minimum=0)
        self._rounds = {0: ROUND}

    def due(self, step: int) -> Round | None:
        """Return the round due at ``step``, or None when the step is local."""
        since_warmup = step - self.warmup_steps
        return self._rounds.get(since_warmup % self.period) if since_warmup >= 0 else None

    def in_fragments(self, counts: Sequence[int]) -> Every:
        """Return the schedule with so many fragments, evenly over the period."""
        twin = Every(self.period, self.warmup_steps)
        twin._rounds = _places(0, self.period, counts[0])
        return twin

    def configuration(self) -> dict[str, Any]:
        """Return period and warm-up."""
        return {"period": self.period, "warmup_steps": self.warmup_steps}


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

    def __init__(self, periods: Sequence[int], warmup_steps: int = 0) -> None:
        self.periods = tuple(periods)
        self.warmup_steps = check_whole_number("warmup_steps", warmup_steps, minimum=0)
        self._levels = [(period, {0: Round(level)}) for level, period in enumerate(self.periods)]

    def due(self, step: int) -> Round | None:
        """Return the round due at ``step``, or None when the step is local."""
        return self._due_below(len(self.periods), step) if step >= self.warmup_steps else None

    def _due_below(self, level: int, step: int) -> Round | None:
        for period, rounds in reversed(self._levels[:level]):
            level -= 1
            round_ = rounds.get(step % period)
            if round_ is not None:
                # Of a part alone: the rest of the model may be due at a level within.
                return replace(round_, within=self._due_below(level, step)) if len(rounds) > 1 else round_
        return None

    def in_fragments(self, counts: Sequence[int]) -> Hierarchical:
        """Return the schedule with so many fragments at each level, evenly over its period."""
        twin = Hierarchical(self.periods, self.warmup_steps)
        twin._levels = [
            (period, _places(level, period, count))
            for level, (period, count) in enumerate(zip(self.periods, counts, strict=True))
        ]
        return twin

    def configuration(self) -> dict[str, Any]:
        """Return the warm-up; the averager tells of periods and sizes together."""
        return {"warmup_steps": self.warmup_steps}


def _places(level: int, period: int, num_fragments: int) -> dict[int, Round]:
    """Return the round of each fragment by its place in the period."""
    return {fragment * period // num_fragments: Round(level, fragment) for fragment in range(num_fragments)}


class _Growing(Schedule):
    """Rounds one after the other, each period decided at the round before; the first round ends the warm-up."""

    def __init__(self, warmup_steps: int) -> None:
        self.warmup_steps = check_whole_number("warmup_steps", warmup_steps, minimum=0)
        self._rounds = [self.warmup_steps]

    @abstractmethod
    def period_at(self, step: int) -> int:
        """Return how many steps after a round at ``step`` the next one is due."""

    def due(self, step: int) -> Round | None:
        """Return the round due at ``step``, or None when the step is local."""
        while self._rounds[-1] < step:
            self._rounds.append(self._rounds[-1] + self.period_at(self._rounds[-1]))
        return ROUND if self._rounds[bisect_left(self._rounds, step)] == step else None


@final
class QuadraticRule(_Growing):
    """Periods that grow as the learning rate falls: ``H = max(min_period, floor((alpha / lr) ** 2))``.

    Decided right after each round, from the learning rate of its step; ``min_period`` while the learning rate rises
    from one step to the next, and never more than the steps that remain, so that the last step averages. Start from
    ``alpha`` such that ``(alpha / peak lr) ** 2`` is about ``min_period``.

    Args:
        alpha: In units of the learning rate.
        min_period: The shortest period, in steps.
        lr_at: Returns the learning rate of a step; the same on every rank.
        total_steps: How many steps the run has.
        warmup_steps: Steps before the first round.

    Raises:
        InvalidTypeError, InvalidValueError: an argument breaks a rule.

    References:
        Gu et al., `A quadratic synchronization rule <https://arxiv.org/abs/2310.14423>`_.

    Example:
        >>> rule = averagers.QuadraticRule(0.0175, 4, lambda step: 0.008 if step < 8 else 0.004, total_steps=100)
        >>> [step for step in range(60) if rule.due(step)]
        [0, 4, 8, 27, 46]
    """

    def __init__(
        self,
        alpha: float,
        min_period: int,
        lr_at: Callable[[int], float],
        *,
        total_steps: int,
        warmup_steps: int = 0,
    ) -> None:
        super().__init__(warmup_steps)
        self.alpha = check_positive("alpha", alpha)
        self.min_period = check_whole_number("min_period", min_period, minimum=1)
        self.total_steps = check_whole_number("total_steps", total_steps, minimum=1)
        if not callable(lr_at):
            raise InvalidTypeError(
                f"lr_at must be a function of the step, got {lr_at!r} of type {type(lr_at).__name__}"
            )
        self._lr_at = lr_at
        self._lr(warmup_steps)

    def period_at(self, step: int) -> int:
        """Return how many steps after a round at ``step`` the next one is due."""
        remaining = self.total_steps - 1 - step
        if remaining < 1:  # a run that goes on beyond its end
            return self.min_period
        lr = self._lr(step)
        if self._lr(step + 1) > lr:
            period = self.min_period
        else:
            # Without bound where the learning rate is next to 0.
            root = self.alpha / lr if lr * (remaining + 1) > self.alpha * 1e-9 else remaining + 1.0
            period = max(self.min_period, floor(min(root, remaining + 1.0) ** 2))
        return min(period, remaining)

    def configuration(self) -> dict[str, Any]:
        """Return the numbers, and a digest of the learning rates of some steps."""
        steps = range(0, self.total_steps, max(1, self.total_steps // 64))
        rates = repr([self._lr(step) for step in steps]).encode()
        return {
            "schedule": f"QuadraticRule({self.alpha}, {self.min_period}, total_steps={self.total_steps}, "
            f"warmup_steps={self.warmup_steps})",
            "lr_at": blake2b(rates, digest_size=8).hexdigest(),
        }

    def _lr(self, step: int) -> float:
        try:
            lr = self._lr_at(step)
        except TypeError as error:
            raise InvalidTypeError(
                f"lr_at must be a function of the step alone: at step {step} it raised {error}"
            ) from error
        number = check_number(f"what lr_at returns at step {step}", lr)
        if not 0 <= number < inf:
            raise InvalidValueError(
                f"lr_at must return a learning rate of at least 0 and finite, got {lr!r} at step {step}"
            )
        return number


class _Ramp(_Growing):
    """Periods from ``first`` to ``last``, by the same factor in equal steps."""

    def __init__(self, first: int, last: int, *, total_steps: int, warmup_steps: int = 0) -> None:
        super().__init__(warmup_steps)
        self.first = check_whole_number("first", first, minimum=1)
        self.last = check_whole_number("last", last, minimum=1)
        self.total_steps = check_whole_number("total_steps", total_steps, minimum=warmup_steps + 1)

    def period_at(self, step: int) -> int:
        """Return how many steps after a round at ``step`` the next one is due."""
        share = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        growth: float = (self.last / self.first) ** share
        return round(self.first * growth)

    def configuration(self) -> dict[str, Any]:
        """Return the numbers."""
        return {
            "schedule": f"{type(self).__name__}({self.first}, {self.last}, total_steps={self.total_steps}, "
            f"warmup_steps={self.warmup_steps})"
        }


@final
class Growing(_Ramp):
    """Periods that grow from ``first`` to ``last`` over the run, by the same factor in equal steps.

    Args:
        first: The period after the first round, in steps.
        last: The period at the end, at least ``first``.
        total_steps: How many steps the run has; later the period stays.
        warmup_steps: Steps before the first round.

    Raises:
        InvalidTypeError, InvalidValueError: an argument breaks a rule.

    Example:
        >>> schedule = averagers.Growing(2, 8, total_steps=20)
        >>> [step for step in range(30) if schedule.due(step)]
        [0, 2, 4, 7, 10, 14, 19, 26]
    """

    def __init__(self, first: int, last: int, *, total_steps: int, warmup_steps: int = 0) -> None:
        super().__init__(first, last, total_steps=total_steps, warmup_steps=warmup_steps)
        if last < first:
            raise InvalidValueError(f"last must be at least first, got {last} and {first}: or take Shrinking")


@final
class Shrinking(_Ramp):
    """Periods that shrink from ``first`` to ``last`` over the run, by the same factor in equal steps.

    Args:
        first: The period after the first round, in steps.
        last: The period at the end, at most ``first``.
        total_steps: How many steps the run has; later the period stays.
        warmup_steps: Steps before the first round.

    Raises:
        InvalidTypeError, InvalidValueError: an argument breaks a rule.

    Example:
        >>> schedule = averagers.Shrinking(8, 2, total_steps=20)
        >>> [step for step in range(30) if schedule.due(step)]
        [0, 8, 13, 16, 19, 21, 23, 25, 27, 29]
    """

    def __init__(self, first: int, last: int, *, total_steps: int, warmup_steps: int = 0) -> None:
        super().__init__(first, last, total_steps=total_steps, warmup_steps=warmup_steps)
        if last > first:
            raise InvalidValueError(f"last must be at most first, got {last} and {first}: or take Growing")


def equivalent_period(world_size: int, groups: int | Sequence[int], inner: int, outer: int, *further: int) -> float:
    """Return the flat period whose replicas have the same noise as a hierarchy's.

    For ``n`` ranks in ``N`` groups that average within every ``I`` steps and all together every ``G`` steps it is
    ``1 + ((I - 1)(n - N) + (G - 1)(N - 1)) / (n - 1)``; each further level adds its own term.

    Args:
        world_size: How many ranks there are.
        groups: How many groups the level has; of several levels, from the innermost, all but the last, which has one.
        inner: The period of the innermost level, in steps.
        outer: That of the next level.
        further: Those of the levels above.

    Raises:
        InvalidTypeError, InvalidValueError: an argument breaks a rule.

    References:
        Wang et al., `Demystifying why local aggregation helps <https://arxiv.org/abs/2010.12998>`_.

    Example:
        4 nodes of 8 with gradients averaged within a node, and models every 50 steps:

        >>> round(averagers.equivalent_period(32, 4, 1, 50), 2)
        5.74
    """
    check_whole_number("world_size", world_size, minimum=2)
    given: object = groups
    if not isinstance(given, int | Sequence) or isinstance(given, str):
        raise InvalidTypeError(
            f"groups must be an int or a list of them, got {groups!r} of type {type(groups).__name__}"
        )
    counts = [groups] if isinstance(groups, int) else list(groups)
    periods = (inner, outer, *further)
    sizes = [world_size, *(check_whole_number("groups", count, minimum=1) for count in counts), 1]
    if len(periods) != len(sizes) - 1:
        raise InvalidValueError(
            f"periods must be given for each level: there are {len(sizes) - 1} levels, and {len(periods)} periods"
        )
    for within, above in pairwise(sizes):
        if within % above:
            raise InvalidValueError(f"groups must each divide those of the level within, got {above} of {within}")
    spread = sum(
        (check_whole_number("period", period, minimum=1) - 1) * (within - above)
        for period, (within, above) in zip(periods, pairwise(sizes), strict=True)
    )
    return 1 + spread / (world_size - 1)
