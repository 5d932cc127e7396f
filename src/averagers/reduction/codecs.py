"""Codecs: how a displacement from the anchor is written in fewer bytes (pure).

Encoding reads a bucket about five times and decoding twice, in memory that the processor's cache holds; it is bound by
memory and, below 8 bits, by arithmetic, not by the link.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, final

from averagers.errors import InvalidTypeError
from averagers.reduction.interface import Tensor, TensorOperations

_GROUP = 128


class Codec(ABC):
    """How the displacements of one level travel; give it as ``codec=``.

    Attributes:
        granularity: What it encodes is a multiple of so many values.
        cut: Into how many pieces a bucket is cut. Small ones fill the link sooner, and cost the processor more.
    """

    granularity: int
    cut: int

    @abstractmethod
    def wire_bytes(self, num_values: int) -> int:
        """Return how many bytes ``num_values`` take, a multiple of the granularity."""

    @abstractmethod
    def encode(self, values: Tensor, wire: Tensor, operations: TensorOperations) -> None:
        """Write rows of float32 ``values`` into the rows of ``wire``, which are bytes."""

    @abstractmethod
    def decode(self, wire: Tensor, values: Tensor, operations: TensorOperations) -> None:
        """Read the rows of ``wire`` back into the rows of float32 ``values``."""


@final
@dataclass(frozen=True)
class Cast(Codec):
    """Displacements in a 16-bit dtype: half the bytes.

    Args:
        dtype: ``torch.bfloat16`` or ``torch.float16``.

    Raises:
        InvalidTypeError: it is no dtype of 16-bit floats.

    Example:
        >>> averager = averagers.PeriodicModelAverager(4, codec=averagers.Cast(torch.bfloat16))
    """

    dtype: Any
    granularity = 1
    cut = 4

    def __post_init__(self) -> None:
        if not getattr(self.dtype, "is_floating_point", False) or self.dtype.itemsize != 2:
            raise InvalidTypeError(f"dtype of Cast must be bfloat16 or float16, got {self.dtype!r}")

    def wire_bytes(self, num_values: int) -> int:
        """Return two bytes a value."""
        return 2 * num_values

    def encode(self, values: Tensor, wire: Tensor, operations: TensorOperations) -> None:
        """Round to the nearest."""
        wire.view(self.dtype).copy_(values)

    def decode(self, wire: Tensor, values: Tensor, operations: TensorOperations) -> None:
        """Widen."""
        values.copy_(wire.view(self.dtype))


@final
@dataclass(frozen=True)
class Int8(Codec):
    """Displacements in 8 bits, scaled by the largest of each 128: just over a quarter of the bytes.

    Off by at most half a step, which is that largest value / 127. A group that holds NaN or an infinity becomes NaN.

    Example:
        >>> averager = averagers.PeriodicModelAverager(4, codec=averagers.Int8())
    """

    granularity = _GROUP
    cut = 2

    def wire_bytes(self, num_values: int) -> int:
        """Return a byte a value and four a group of 128."""
        return num_values + 4 * (num_values // _GROUP)

    def encode(self, values: Tensor, wire: Tensor, operations: TensorOperations) -> None:
        """Scale, round half to even, and write codes, then scales."""
        codes, scales = _quantized(values, 127)
        wire[:, : values.shape[1]].view(operations.int8).copy_(codes)
        wire[:, values.shape[1] :].view(operations.float32).copy_(scales)

    def decode(self, wire: Tensor, values: Tensor, operations: TensorOperations) -> None:
        """Multiply codes by scales."""
        values.copy_(wire[:, : values.shape[1]].view(operations.int8))
        _rescale_(values, wire[:, values.shape[1] :].view(operations.float32))


@final
@dataclass(frozen=True)
class Int4(Codec):
    """Displacements in 4 bits, scaled by the largest of each 128: just over an eighth of the bytes.

    Off by at most half a step, which is that largest value / 7. A group that holds NaN or an infinity becomes NaN.

    Example:
        >>> averager = averagers.PeriodicModelAverager(4, codec=averagers.Int4())
    """

    granularity = _GROUP
    cut = 2

    def wire_bytes(self, num_values: int) -> int:
        """Return half a byte a value and four a group of 128."""
        return num_values // 2 + 4 * (num_values // _GROUP)

    def encode(self, values: Tensor, wire: Tensor, operations: TensorOperations) -> None:
        """Scale, round half to even, and write pairs of codes, then scales."""
        half = values.shape[1] // 2
        codes, scales = _quantized(values, 7)
        codes.add_(8)
        wire[:, :half].copy_(codes[:, :half].add(codes[:, half:], alpha=16))
        wire[:, half:].view(operations.float32).copy_(scales)

    def decode(self, wire: Tensor, values: Tensor, operations: TensorOperations) -> None:
        """Take the pairs apart and multiply codes by scales."""
        half = values.shape[1] // 2
        values[:, :half].copy_(wire[:, :half] & 15)
        values[:, half:].copy_(wire[:, :half] >> 4)
        values.sub_(8)
        _rescale_(values, wire[:, half:].view(operations.float32))


def _quantized(values: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Return whole numbers up to ``largest``, as floats, and the scale of each group of them."""
    rows = values.shape[0]
    groups = values.view(rows, -1, _GROUP)
    scales = groups.abs().amax(2).div_(largest)
    # A group of zeros has the scale 0, and codes of 0; NaN and infinities are in the scale.
    steps = scales.reciprocal().nan_to_num_(0.0, 0.0, 0.0)
    codes = (groups * steps.unsqueeze(2)).nan_to_num_(0.0, 0.0, 0.0).round_()
    # A scale next to zero has no reciprocal of its size.
    return codes.clamp_(-largest, largest).view(rows, -1), scales


def _rescale_(values: Tensor, scales: Tensor) -> None:
    values.view(values.shape[0], -1, _GROUP).mul_(scales.unsqueeze(2))
