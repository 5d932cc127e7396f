"""How one bucket crosses the group: the collectives, and the arithmetic between them (pure).

Streams: on CUDA everything here runs on the caller's current stream. An asynchronous collective
makes the backend's stream wait for it, and ``Work.wait`` makes it wait for the backend's, without
holding the thread; so a buffer is written again only after what read it, and the caller's next
kernel sees the mean. The caching allocator is told by the framework of tensors that a collective holds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, final

from averagers.reduction.interface import Lane, Tensor, Work
from averagers.reduction.loads import Buffers, Load
from averagers.reduction.rules import Rule


@final
@dataclass(frozen=True)
class Shares:
    """How much each rank counts in a mean.

    Attributes:
        own: Of this rank; all sum to 1.
        of_first_leg: Of the ranks of the route's first leg, in its order.
        num_ranks: How many ranks the mean is of, where all count the same; None where they do not.
    """

    own: float
    of_first_leg: Sequence[float]
    num_ranks: int | None

    def scale_(self, values: Tensor) -> None:
        """Multiply this rank's values by its share; of a rank that does not count, not even NaN remains."""
        if self.num_ranks is None:
            values.mul_(self.own) if self.own else values.zero_()
        elif self.num_ranks & (self.num_ranks - 1):
            values.div_(self.num_ranks)
        else:  # a power of two: the same bits, faster
            values.mul_(1 / self.num_ranks)

    def sum_(self, total: Tensor, rows: Sequence[Tensor]) -> None:
        """Write the part of the mean that the first leg's ``rows`` make up, but for ``complete_``."""
        if self.num_ranks is None:
            sum_(total, rows, self.of_first_leg)
        else:
            sum_(total, rows, [self._scale] * len(rows))

    def complete_(self, total: Tensor) -> None:
        """Make a mean of sums: divided once, at the end, and so rounded once."""
        if self.num_ranks is not None:
            total.div_(self.num_ranks * self._scale)

    @property
    def _scale(self) -> float:
        """A power of two, which keeps the bits, that keeps the sum of bfloat16's largest numbers finite."""
        assert self.num_ranks is not None
        return 2.0 ** -(self.num_ranks - 1).bit_length()


class Transfer(ABC):
    """What happens to a bucket: a generator that yields each collective that it has started.

    Attributes:
        lags: For each collective of a bucket, how many buckets are started before it is waited for.
    """

    lags: tuple[int, ...]

    @abstractmethod
    def run(self, load: Load, lanes: Sequence[Lane], buffers: Buffers) -> Generator[Work, None, None]:
        """Start the collectives of one bucket, each after the wait for the one before.

        Args:
            load: The bucket.
            lanes: One for each leg of the route.
            buffers: Staging memory.
        """

    @abstractmethod
    def wire_bytes(self, load: Load, sizes: Sequence[int]) -> float:
        """Return how many bytes this rank sends for one bucket, given the size of each leg's group."""


@final
class AllReduceMean(Transfer):
    """Divide by the group's size, then sum: for dtypes that keep their precision when divided.

    Dividing first cannot overflow, and gives torch's own averager's bits where two ranks average.
    """

    lags = (4,)

    def __init__(self, shares: Shares) -> None:
        self._shares = shares

    def run(self, load: Load, lanes: Sequence[Lane], buffers: Buffers) -> Generator[Work, None, None]:
        """Yield one all-reduce."""
        (lane,) = lanes
        if load.in_place:
            flat = load.blocks[0]
        else:
            flat = buffers.take("values", load.num_elements, load.device, load.dtype)
            load.pack(flat)
        self._shares.scale_(flat)
        yield lane.all_reduce(flat)
        if load.in_place:
            load.mark_written()
        else:
            load.unpack(flat)

    def wire_bytes(self, load: Load, sizes: Sequence[int]) -> float:
        """Return ``2 (n - 1) / n`` of the bucket's bytes, as a ring sends."""
        return _ring_bytes(load.num_elements * load.itemsize, *sizes)


@final
class Exchange(Transfer):
    """Every rank computes one part of the bucket in float32, or wider, and rounds it once.

    All-to-all, local rule, all-gather: the bytes of a ring at the bucket's own dtype, where a 16-bit all-reduce would
    round at every hop, and no all-reduce knows other rules than a sum.

    Args:
        shares: How much each rank counts.
        rule: What takes the place of the mean.
    """

    lags = (2, 2)

    def __init__(self, shares: Shares, rule: Rule | None = None) -> None:
        self._shares = shares
        self._rule = rule

    def run(self, load: Load, lanes: Sequence[Lane], buffers: Buffers) -> Generator[Work, None, None]:
        """Yield an all-to-all and an all-gather."""
        (lane,) = lanes
        parts = _Parts(load, lane.size, buffers)
        yield lane.all_to_all(parts.received, parts.values)
        if self._rule is None:
            common = parts.sum(self._shares, load.operations.float32)
            self._shares.complete_(common)
        else:
            common = self._rule.reduce_(parts.of_counting_ranks(self._shares))
        yield lane.all_gather(parts.values, parts.rounded(common))
        parts.land()

    def wire_bytes(self, load: Load, sizes: Sequence[int]) -> float:
        """Return twice the ``n - 1`` parts that this rank sends to the others."""
        (size,) = sizes
        return 2 * (size - 1) * _part(load, size) * load.itemsize


@final
class TwoLevelMean(Transfer):
    """Sum within the node, then between the nodes, each rank its own part, and give the mean back within the node.

    Each byte of the mean crosses a node's link once in each direction, however many ranks the node has; a ring
    through all ranks sends up to twice as much there. While one bucket crosses, others go through their nodes.
    """

    lags = (1, 4, 1)

    def __init__(self, shares: Shares) -> None:
        self._shares = shares

    def run(self, load: Load, lanes: Sequence[Lane], buffers: Buffers) -> Generator[Work, None, None]:
        """Yield an all-to-all within the node, an all-reduce between the nodes, an all-gather within the node."""
        within, across = lanes
        parts = _Parts(load, within.size, buffers)
        if load.itemsize > 2:
            self._shares.scale_(parts.values)
            yield within.all_to_all(parts.received, parts.values)
            mean = parts.sum(None, load.dtype)
            yield across.all_reduce(mean)
        else:
            yield within.all_to_all(parts.received, parts.values)
            # In float32 between the nodes too, so that the mean is rounded once.
            total = parts.sum(self._shares, load.operations.float32)
            yield across.all_reduce(total)
            self._shares.complete_(total)
            mean = parts.rounded(total)
        yield within.all_gather(parts.values, mean)
        parts.land()

    def wire_bytes(self, load: Load, sizes: Sequence[int]) -> float:
        """Return twice the parts for the others of the node, and a ring's bytes of one part between the nodes."""
        within, across = sizes
        part = _part(load, within)
        return 2 * (within - 1) * part * load.itemsize + _ring_bytes(part * max(4, load.itemsize), across)


@final
class _Parts:
    """A bucket in equal parts, one for each rank of a group, of which this rank sums its own.

    Args:
        load: The bucket.
        num_parts: How many ranks the group has.
        buffers: Staging memory.

    Attributes:
        values: The bucket, padded with zeros; where it can be, the tensor's own memory.
        received: Where the ranks' values for this rank's part arrive.
    """

    def __init__(self, load: Load, num_parts: int, buffers: Buffers) -> None:
        self._load = load
        self._buffers = buffers
        self._size = _part(load, num_parts)
        padded = self._size * num_parts
        self._in_place = load.in_place and load.num_elements == padded
        if self._in_place:
            self.values = load.blocks[0]
        else:
            self.values = buffers.take("values", padded, load.device, load.dtype)
            load.pack(self.values)
            self.values[load.num_elements :].zero_()
        self.received = buffers.take("received", padded, load.device, load.dtype)

    def sum(self, shares: Shares | None, dtype: Any) -> Tensor:
        """Return the sum of what was received, in ``dtype``; of each rank's share, where it was not scaled before."""
        total = self._buffers.take("total", self._size, self._load.device, dtype)
        rows = self.received.split(self._size)
        if shares is None:
            sum_(total, rows)
        else:
            shares.sum_(total, rows)
        return total

    def of_counting_ranks(self, shares: Shares) -> Tensor:
        """Return a copy of what was received, a row for each rank that counts, in float32 at least."""
        received = self.received.split(self._size)
        rows = [row for row, share in zip(received, shares.of_first_leg, strict=True) if share]
        wide = max(self._load.dtype, self._load.operations.float32, key=lambda dtype: dtype.itemsize)
        table = self._buffers.take("table", len(rows) * self._size, self._load.device, wide).view(len(rows), self._size)
        for place, row in enumerate(rows):
            table[place].copy_(row)
        return table

    def rounded(self, mean: Tensor) -> Tensor:
        """Return a mean in the bucket's own dtype, where what was received stood."""
        return self.received[: self._size].copy_(mean)

    def land(self) -> None:
        """Put ``values``, which hold the mean now, where they belong."""
        if self._in_place:
            self._load.mark_written()
        else:
            self._load.unpack(self.values)


def sum_(total: Tensor, rows: Sequence[Tensor], factors: Sequence[float] = ()) -> None:
    """Write the sum of ``rows`` into ``total``, each times its factor; of one times 0 not even NaN remains."""
    counting = [(row, factor) for row, factor in zip(rows, factors or [1.0] * len(rows), strict=True) if factor]
    if not counting:
        total.zero_()
        return
    (first, factor), *others = counting
    total.copy_(first)
    if factor != 1.0:
        total.mul_(factor)
    for other, other_factor in others:
        total.add_(other, alpha=other_factor)


def _part(load: Load, num_parts: int) -> int:
    return -(-load.num_elements // num_parts)


def _ring_bytes(num_bytes: int, group_size: int) -> float:
    return 2 * (group_size - 1) / group_size * num_bytes


@final
class Broadcast(Transfer):
    """Replace a bucket by the first rank's, byte by byte, so that any dtype will do."""

    lags = (4,)

    def run(self, load: Load, lanes: Sequence[Lane], buffers: Buffers) -> Generator[Work, None, None]:
        """Yield one broadcast."""
        (lane,) = lanes
        values = buffers.take("values", load.num_elements, load.device, load.dtype)
        load.pack(values)
        yield lane.broadcast(values.view(load.operations.uint8))
        load.unpack(values)

    def wire_bytes(self, load: Load, sizes: Sequence[int]) -> float:
        """Return the bucket's bytes, the most that a rank passes on in a tree."""
        return load.num_elements * load.itemsize
