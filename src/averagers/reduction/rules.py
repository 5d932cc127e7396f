"""Rules: what of the replicas' values becomes the common one, element by element (pure)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from averagers.arguments import check_positive, check_whole_number
from averagers.errors import InvalidValueError
from averagers.reduction.interface import Tensor

_SMALLEST = 2.0**-126


class Rule(ABC):
    """What takes the place of the mean, where a rank may send nonsense; give it as ``rule=``.

    Every rank computes one part of the model from what all sent, so that as many bytes travel as for a mean. Assumes
    replicas that train on like data, where an honest one is not far from the others. A rank of weight 0 has no say.

    Attributes:
        needs_anchor: Whether values must be displacements from the weights of the last round.
    """

    needs_anchor = False

    @property
    def min_ranks(self) -> int:
        """How many ranks it takes."""
        return 1

    @abstractmethod
    def reduce_(self, rows: Tensor) -> Tensor:
        """Return the common values of ``rows``, one a rank; may use their memory."""

    @property
    def without_anchor(self) -> Rule:
        """What stands in for it while there is no anchor yet."""
        return self


@final
@dataclass(frozen=True)
class TrimmedMean(Rule):
    """The mean without the highest and the lowest values, NaN and infinities among them.

    Args:
        trim: How many values to drop at each end of each element; up to so many ranks may send anything.

    Raises:
        InvalidTypeError, InvalidValueError: an argument breaks a rule.

    References:
        Yin et al., `Byzantine-robust distributed learning <https://arxiv.org/abs/1803.01498>`_.

    Example:
        >>> averager = averagers.PeriodicModelAverager(4, rule=averagers.TrimmedMean(1))
    """

    trim: int

    def __post_init__(self) -> None:
        check_whole_number("trim", self.trim, minimum=0)

    @property
    def min_ranks(self) -> int:
        """One more than it drops."""
        return 2 * self.trim + 1

    def reduce_(self, rows: Tensor) -> Tensor:
        """Sort, drop, and average; NaN sorts as the highest."""
        return _mean(rows.sort(0)[0][self.trim : rows.shape[0] - self.trim])


@final
@dataclass(frozen=True)
class Median(Rule):
    """The middle value of each element, or the mean of the two middle ones; fewer than half may send anything.

    References:
        Yin et al., `Byzantine-robust distributed learning <https://arxiv.org/abs/1803.01498>`_.

    Example:
        >>> averager = averagers.PeriodicModelAverager(4, rule=averagers.Median())
    """

    def reduce_(self, rows: Tensor) -> Tensor:
        """Trim all but the middle."""
        return TrimmedMean((rows.shape[0] - 1) // 2).reduce_(rows)


@final
@dataclass(frozen=True)
class CenteredClipping(Rule):
    """The mean of displacements from the last round's weights, of which each element moves at most ``radius``.

    ``v += mean(clip(x_i - v, -radius, radius))``, where ``v`` are the weights of the last round; NaN counts as no
    displacement. The first round, which has no ``v``, takes the median. Costs four bytes an element for ``v``.

    Args:
        radius: The most that one replica's element counts as moved, over 0: above what honest ones move in a period.

    Raises:
        InvalidTypeError, InvalidValueError: an argument breaks a rule.

    References:
        Karimireddy et al., `Learning from history <https://arxiv.org/abs/2012.10333>`_, which clips the norm of the
        whole vector; here it is each element.

    Example:
        >>> averager = averagers.PeriodicModelAverager(4, rule=averagers.CenteredClipping(radius=0.01))
    """

    radius: float
    needs_anchor = True

    def __post_init__(self) -> None:
        radius = check_positive("radius", self.radius)
        if radius < _SMALLEST:
            raise InvalidValueError(f"radius must be at least {_SMALLEST}, which float32 can hold, got {self.radius}")
        object.__setattr__(self, "radius", radius)

    def reduce_(self, rows: Tensor) -> Tensor:
        """Clip and average."""
        return _mean(rows.nan_to_num_(0.0, self.radius, -self.radius).clamp_(-self.radius, self.radius))

    @property
    def without_anchor(self) -> Rule:
        """The median."""
        return Median()


def _mean(rows: Sequence[Tensor] | Tensor) -> Tensor:
    """Return the mean of ``rows``, divided first so that it cannot overflow; a single one comes back as it is."""
    first, *others = rows
    if not others:
        return first
    mean = first / (1 + len(others))
    for other in others:
        mean.add_(other, alpha=1 / (1 + len(others)))
    return mean
