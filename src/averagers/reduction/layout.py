"""The plan of a round: which elements of which tensors travel in which bucket (pure).

A plan depends only on what all ranks agree on (sizes, dtypes, order), never on where a tensor lies
in memory, so that every rank starts the same collectives with the same sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Kind:
    """What the tensors of one bucket share: a device and a dtype, and so the bytes of an element.

    Attributes:
        device: Where they lie.
        dtype: Of reals.
        itemsize: Its bytes.
        is_aside: They are averaged plainly, whatever is done with the others.
    """

    device: Any
    dtype: Any
    itemsize: int
    is_aside: bool = False

    @property
    def is_coded(self) -> bool:
        """Whether a codec may write displacements of such tensors: float32 holds them."""
        return self.itemsize <= 4 and not self.is_aside


class Slot(NamedTuple):
    """Elements ``start`` to ``stop`` of one tensor, and where they begin in the bucket."""

    tensor: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class Bucket:
    """One flat buffer's worth of elements of one kind.

    A bucket with a single slot can be reduced where the tensor lies, without a copy.
    """

    kind: Kind
    slots: tuple[Slot, ...]
    num_elements: int

    def parts_of(self, flat: Sequence[Any]) -> list[Any]:
        """Return what the bucket has of flat tensors, one for each of the plan; nothing of those that are None."""
        parts = ((flat[slot.tensor], slot) for slot in self.slots)
        return [one[slot.start : slot.stop] for one, slot in parts if one is not None]


def plan_buckets(sizes: Sequence[int], kinds: Sequence[Kind], *, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Cut tensors into buckets of at most ``bucket_bytes``, nearly equal in size.

    A tensor of half a bucket's size and more has buckets of its own, so that it need not be copied; the
    smaller ones of a kind share buckets, in their order, and may be cut at a bucket's end.

    Args:
        sizes: Number of elements of each tensor.
        kinds: Kind of each tensor.
        bucket_bytes: Most bytes of a bucket; a bucket holds one element at least.
    """
    small: dict[Kind, list[int]] = {}
    buckets: list[Bucket] = []
    for tensor, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
        if 2 * size * kind.itemsize >= bucket_bytes:
            buckets.extend(_cut([tensor], sizes, kind, bucket_bytes))
        elif size:
            small.setdefault(kind, []).append(tensor)
    for kind, tensors in small.items():
        buckets.extend(_cut(tensors, sizes, kind, bucket_bytes))
    return tuple(buckets)


def _cut(tensors: Sequence[int], sizes: Sequence[int], kind: Kind, bucket_bytes: int) -> Iterator[Bucket]:
    """Cut the concatenation of ``tensors`` into the fewest buckets, equal but for the last."""
    total = sum(sizes[tensor] for tensor in tensors)
    capacity = max(1, bucket_bytes // kind.itemsize)
    num_buckets = -(-total // capacity)
    length = -(-total // num_buckets)
    slots: list[Slot] = []
    filled = 0
    for tensor in tensors:
        start = 0
        while start < sizes[tensor]:
            stop = min(sizes[tensor], start + length - filled)
            slots.append(Slot(tensor, start, stop, filled))
            filled += stop - start
            start = stop
            if filled == length:
                yield Bucket(kind, tuple(slots), filled)
                slots, filled = [], 0
    if slots:
        yield Bucket(kind, tuple(slots), filled)
