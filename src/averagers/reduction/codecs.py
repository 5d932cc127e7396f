"""Codecs: how a displacement from the anchor is written in fewer bytes (pure).

Encoding reads a bucket about five times and decoding twice, in memory that the processor's cache holds; it is bound by
memory and, below 8 bits, by arithmetic, not by the link. `TopK` is bound by the search for the largest values.

**Error feedback.** What a codec leaves out need not be lost: ``residual = decay * residual + value - sent`` is kept,
and goes along with the next round's value. A decay below 1 forgets old residuals, which otherwise pile up where
replicas move far between rounds (`Stich et al. <https://arxiv.org/abs/1809.07599>`_, `Sarfi et al.
<https://arxiv.org/abs/2508.15706>`_).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, final

from averagers.arguments import check_share, check_whole_number
from averagers.errors import InvalidTypeError, InvalidValueError
from averagers.reduction.interface import Tensor, TensorOperations

_GROUP = 128
_CHUNK = 4096


@dataclass(frozen=True, repr=False)
class Codec(ABC):
    """How the displacements of one level travel; give it as ``codec=``.

    Attributes:
        error_feedback: The decay of the residual; None to keep none.
        granularity: What it encodes is a multiple of so many values.
        cut: Into how many pieces a bucket is cut. Small ones fill the link sooner, and cost the processor more.
    """

    error_feedback: float | None = field(default=None, kw_only=True)
    granularity = 1
    cut = 1

    def __post_init__(self) -> None:
        if self.error_feedback is not None:
            object.__setattr__(self, "error_feedback", check_share("error_feedback", self.error_feedback))

    def __repr__(self) -> str:
        by_position = sorted(fields(self), key=lambda one: bool(one.kw_only))
        settings = [(one, getattr(self, one.name)) for one in by_position]
        shown = [f"{one.name}={value!r}" for one, value in settings if one.default is MISSING or value != one.default]
        return f"{type(self).__name__}({', '.join(shown)})"

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
@dataclass(frozen=True, repr=False)
class Cast(Codec):
    """Displacements in a 16-bit dtype: half the bytes.

    Args:
        dtype: ``torch.bfloat16`` or ``torch.float16``.
        error_feedback: The decay of the residual, over 0 and at most 1; None to keep none.

    Raises:
        InvalidTypeError, InvalidValueError: an argument breaks a rule.

    Example:
        >>> averager = averagers.PeriodicModelAverager(4, codec=averagers.Cast(torch.bfloat16))
    """

    dtype: Any
    cut = 4

    def __post_init__(self) -> None:
        super().__post_init__()
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
@dataclass(frozen=True, repr=False)
class Int8(Codec):
    """Displacements in 8 bits, scaled by the largest of each 128: just over a quarter of the bytes.

    Off by at most half a step, which is that largest value / 127. A group that holds NaN or an infinity becomes NaN.

    Args:
        error_feedback: The decay of the residual, over 0 and at most 1; None to keep none. Costs up to eight bytes
            an element in each group that codes, divided by the ranks of a node.

    Raises:
        InvalidTypeError, InvalidValueError: an argument breaks a rule.

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
@dataclass(frozen=True, repr=False)
class Int4(Codec):
    """Displacements in 4 bits, scaled by the largest of each 128: just over an eighth of the bytes.

    Off by at most half a step, which is that largest value / 7. A group that holds NaN or an infinity becomes NaN.

    Args:
        error_feedback: The decay of the residual, over 0 and at most 1; None to keep none. Costs up to eight bytes
            an element in each group that codes, divided by the ranks of a node.

    Raises:
        InvalidTypeError, InvalidValueError: an argument breaks a rule.

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


@final
@dataclass(frozen=True, repr=False)
class TopK(Codec):
    """The largest displacements of each 4,096, in 2 bits: of 64, 137 times fewer bytes at 2 ranks.

    A value travels as its place, its sign, and whether it is one of the chunk's large or small ones; each of these two
    has one size, the mean of its kind. What was left out is kept as a residual, and sent later, see ``error_feedback``:
    without it most values never arrive. Every rank sends its own choice to all others, so that the bytes grow with the
    number of ranks, where other codecs' do not. Useless in fewer rounds than it takes to send everything, about
    ``2 * 4096 / keep`` (`SparseLoCo <https://arxiv.org/abs/2508.15706>`_). A chunk that holds NaN sends NaN.

    Args:
        keep: How many of each 4,096 values travel, a multiple of 4.
        error_feedback: The decay of the residual, over 0 and at most 1; None to keep none. Costs four bytes an element,
            divided by the ranks of a node.

    Raises:
        InvalidTypeError, InvalidValueError: an argument breaks a rule.

    Example:
        >>> averager = averagers.PeriodicModelAverager(15, codec=averagers.TopK(keep=64))
    """

    keep: int = 64
    error_feedback: float | None = field(default=0.95, kw_only=True)
    granularity = _CHUNK

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole_number("keep", self.keep, minimum=4)
        if self.keep % 4 or self.keep > _CHUNK:
            raise InvalidValueError(f"keep must be a multiple of 4, and at most {_CHUNK}, got {self.keep}")

    def wire_bytes(self, num_values: int) -> int:
        """Return eight bytes a chunk, 14 bits a kept value, and what fills it up to a multiple of four bytes."""
        num_chunks = num_values // _CHUNK
        return 8 * num_chunks + -(-num_chunks * self.keep * 7 // 16) * 4

    def encode(self, values: Tensor, wire: Tensor, operations: TensorOperations) -> None:
        """Write the two sizes of each chunk, then places in 12 bits, then codes in 2."""
        rows = values.shape[0]
        chunks = values.view(rows, -1, _CHUNK)
        magnitudes, places = chunks.abs().topk(self.keep, 2)
        is_large = magnitudes >= (magnitudes[:, :, :1] + magnitudes[:, :, -1:]) * 0.5
        sizes, planes, codes = self._parts(wire, chunks.shape[1], operations)
        # NaN compares as small, and makes that size NaN.
        sizes[:, :, 0].copy_(_mean_where(is_large.logical_not(), magnitudes))
        sizes[:, :, 1].copy_(_mean_where(is_large, magnitudes))
        pairs = places.view(rows, 2, -1)
        first, second = pairs[:, 0], pairs[:, 1]
        planes[:, 0].copy_(first & 255)
        planes[:, 1].copy_((first >> 8) | ((second & 15) << 4))
        planes[:, 2].copy_(second >> 4)
        is_negative = chunks.gather(2, places) < 0
        quarters = (is_large.to(places.dtype) + is_negative.to(places.dtype) * 2).view(rows, 4, -1)
        codes.copy_(quarters[:, 0] | quarters[:, 1] << 2 | quarters[:, 2] << 4 | quarters[:, 3] << 6)

    def decode(self, wire: Tensor, values: Tensor, operations: TensorOperations) -> None:
        """Write what was sent, and zeros elsewhere."""
        self.add(wire, values.zero_(), operations)

    def add(self, wire: Tensor, values: Tensor, operations: TensorOperations) -> None:
        """Add what was sent to ``values``; no place comes twice in a row, so that the order of adding is no matter."""
        rows = values.shape[0]
        chunks = values.view(rows, -1, _CHUNK)
        sizes, planes, codes = self._parts(wire, chunks.shape[1], operations)
        shape = (rows, chunks.shape[1], self.keep)
        low, middle, high = (planes[:, plane].to(operations.int64) for plane in range(3))
        places = operations.concatenated([low | (middle & 15) << 8, middle >> 4 | high << 4]).view(shape)
        quarters = [codes >> shift & 3 for shift in (0, 2, 4, 6)]
        code = operations.concatenated(quarters).view(shape).to(operations.int64)
        signed = sizes.gather(2, code & 1) * (1 - (code & 2))
        chunks.scatter_add_(2, places, signed)

    def _parts(self, wire: Tensor, num_chunks: int, operations: TensorOperations) -> tuple[Tensor, Tensor, Tensor]:
        """Return where each row has its sizes, the three planes of its places, and its codes."""
        sizes, places = 8 * num_chunks, num_chunks * self.keep // 2
        codes = sizes + 3 * places
        rows = wire.shape[0]
        return (
            wire[:, :sizes].view(operations.float32).view(rows, num_chunks, 2),
            wire[:, sizes:codes].view(rows, 3, places),
            wire[:, codes : codes + places // 2],
        )


def _mean_where(is_meant: Tensor, values: Tensor) -> Tensor:
    """Return the mean along the last dimension of those that are meant; 0 where none is."""
    count = is_meant.to(values.dtype).sum(2, keepdim=True).clamp_(min=1)
    return (values / count).where(is_meant, values.new_zeros(1)).sum(2)


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
