"""How the mean of one level is computed, as the user chose it (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from averagers.errors import InvalidValueError
from averagers.reduction.codecs import Codec, TopK
from averagers.reduction.rules import Rule


@final
@dataclass(frozen=True)
class Method:
    """How the mean of one level is computed.

    Attributes:
        codec: How displacements from the anchor travel; None for the dtype's own bytes.
        rule: What takes the place of the mean; None for the mean.

    Raises:
        InvalidValueError: the two cannot work together.
    """

    codec: Codec | None = None
    rule: Rule | None = None

    def __post_init__(self) -> None:
        if self.rule is not None and isinstance(self.codec, TopK):
            raise InvalidValueError(
                f"rule={self.rule!r} cannot work with codec={self.codec!r}: each rank sends other elements, so that "
                "there are no values of one element to compare; use Int8 or Int4, or no rule"
            )

    @property
    def is_sum(self) -> bool:
        """Whether ranks may add up what they have on the way."""
        return self.rule is None

    @property
    def has_anchor(self) -> bool:
        """Whether values are counted from those of the last round."""
        return self.codec is not None or (self.rule is not None and self.rule.needs_anchor)

    def check_weights(self, weights: Sequence[float]) -> None:
        """Raise unless ranks of these weights have a mean.

        Raises:
            InvalidValueError: all are 0, or the rule can not weigh.
        """
        counting = [weight for weight in weights if weight]
        if not counting:
            raise InvalidValueError("weight must be over 0 on one rank at least: it is 0 on all, and there is no mean")
        if self.rule is None:
            return
        if any(weight != counting[0] for weight in counting):
            raise InvalidValueError(
                f"weight must be 0 or the same on all ranks with rule={self.rule!r}, which cannot weigh, got "
                f"{', '.join(format(weight, 'g') for weight in weights)}"
            )
        if len(weights) > 1 and len(counting) < self.rule.min_ranks:
            raise InvalidValueError(
                f"rule={self.rule!r} takes {self.rule.min_ranks} ranks at least, and only {len(counting)} have a weight"
            )

    def check_group_size(self, size: int) -> None:
        """Raise unless groups of ``size`` ranks are enough for the rule.

        Raises:
            InvalidValueError: they are not.
        """
        if self.rule is not None and size > 1 and size < self.rule.min_ranks:
            raise InvalidValueError(
                f"rule={self.rule!r} takes {self.rule.min_ranks} ranks at least, and this level's groups have {size}"
            )
