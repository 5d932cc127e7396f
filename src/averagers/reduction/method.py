"""How the mean of one level is computed, as the user chose it (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from averagers.errors import InvalidValueError
from averagers.reduction.codecs import Cast, Codec, TopK
from averagers.reduction.coded import CodedExchange, Encoder, SparseGather
from averagers.reduction.interface import Tensor, TensorOperations
from averagers.reduction.layout import Kind
from averagers.reduction.rules import Rule
from averagers.reduction.transfers import AllReduceMean, Exchange, Shares, Transfer, TwoLevelMean


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

    def transfer(
        self,
        kind: Kind,
        *,
        is_displaced: bool,
        shares: Shares,
        num_legs: int,
        residuals: Mapping[str, Tensor],
        operations: TensorOperations,
    ) -> Transfer:
        """Return what happens to a bucket.

        Args:
            kind: Of its tensors.
            is_displaced: It holds displacements from an anchor, in float32 at least.
            shares: How much each rank counts.
            num_legs: Of the route.
            residuals: What the codec left out so far, by place.
            operations: Of the framework.
        """
        is_sixteen_bit = kind.dtype in operations.sixteen_bit
        codec = self.codec if is_displaced and kind.is_coded else None
        if codec is None and is_displaced and is_sixteen_bit:
            codec = Cast(kind.dtype)  # the tensors' own bytes
        if isinstance(codec, TopK):
            return SparseGather(Encoder(codec, residuals), shares, num_legs)
        if codec is not None:
            return CodedExchange(Encoder(codec, residuals), shares, self.rule, num_legs)
        if self.rule is not None:
            return Exchange(shares, self.rule if is_displaced else self.rule.without_anchor)
        if num_legs > 1:
            return TwoLevelMean(shares)
        return Exchange(shares) if is_sixteen_bit else AllReduceMean(shares)

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
