"""How one bucket crosses the group: the collectives, and the arithmetic between them (pure).

Streams: on CUDA everything here runs on the caller's current stream. An asynchronous collective
makes the backend's stream wait for it, and ``Work.wait`` makes it wait for the backend's, without
holding the thread; so a buffer is written again only after what read it, and the caller's next
kernel sees the mean. The caching allocator is told by the framework of tensors that a collective holds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from averagers.reduction.codecs import Codec
from averagers.reduction.interface import Lane, Tensor, TensorOperations, Work


@final
@dataclass
class DriftMeter:
    """Sums the squared distance of this rank's tensors from the mean."""

    operations: TensorOperations
    _squares: list[Tensor] = field(default_factory=list)

    def add(self, values: Sequence[Tensor], means: Sequence[Tensor]) -> None:
        """Add the distance between tensors and their means."""
        for value, mean in zip(values, means, strict=True):
            self._squares.append(self.operations.squared_distance(value, mean))

    @property
    def total(self) -> float:
        """The sum so far; waits for the device."""
        return float(sum(square.item() for square in self._squares))


@final
@dataclass
class Buffers:
    """Staging memory of one bucket in flight, kept between rounds; a buffer grows when it must."""

    operations: TensorOperations
    _memory: dict[tuple[str, Any], Tensor] = field(default_factory=dict)

    def take(self, role: str, num_elements: int, like: Tensor, dtype: Any = None) -> Tensor:
        """Return a flat buffer on the device of ``like``; its content is what was left there."""
        dtype = dtype or like.dtype
        num_bytes = num_elements * dtype.itemsize
        memory = self._memory.get((role, like.device))
        if memory is None or memory.numel() < num_bytes:
            memory = self.operations.new_bytes(num_bytes, like.device)
            self._memory[role, like.device] = memory
        return memory[:num_bytes].view(dtype)


@final
@dataclass
class Load:
    """A bucket bound to memory: views of the tensors' elements, in the bucket's order.

    Attributes:
        blocks: The views; all have the bucket's dtype and device.
        num_elements: How many elements they have in all.
        in_place: There is one block, flat and nobody else's, so that it can be reduced where it lies.
        drift: Measures the distance from the mean; None if nobody asked.
        operations: Of the framework whose tensors these are.
    """

    blocks: list[Tensor]
    num_elements: int
    in_place: bool
    drift: DriftMeter | None
    operations: TensorOperations

    @property
    def itemsize(self) -> int:
        """The bytes of an element."""
        return int(self.blocks[0].dtype.itemsize)

    def pack(self, buffer: Tensor) -> None:
        """Copy the blocks into the start of ``buffer``, one after the other."""
        self.operations.copy_(self._slots(buffer), self.blocks)

    def unpack(self, buffer: Tensor) -> None:
        """Copy the start of ``buffer`` back into the blocks."""
        slots = self._slots(buffer)
        if self.drift:
            self.drift.add(self.blocks, slots)
        self.operations.copy_(self.blocks, slots)

    def mark_written(self) -> None:
        """Tell autograd that the blocks changed where they lie: collectives do not."""
        self.operations.mark_written(self.blocks)

    def _slots(self, buffer: Tensor) -> list[Tensor]:
        sizes = [block.numel() for block in self.blocks]
        slots = buffer[: self.num_elements].split(sizes)
        return [
            slot if block.dim() == 1 else slot.view(block.shape) for slot, block in zip(slots, self.blocks, strict=True)
        ]


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

    def run(self, load: Load, lanes: Sequence[Lane], buffers: Buffers) -> Generator[Work, None, None]:
        """Yield one all-reduce."""
        (lane,) = lanes
        if load.in_place:
            flat = load.blocks[0]
        else:
            flat = buffers.take("values", load.num_elements, load.blocks[0])
            load.pack(flat)
        _divide_(flat, lane.size)
        yield lane.all_reduce(flat)
        if load.in_place:
            load.mark_written()
        else:
            load.unpack(flat)

    def wire_bytes(self, load: Load, sizes: Sequence[int]) -> float:
        """Return ``2 (n - 1) / n`` of the bucket's bytes, as a ring sends."""
        return _ring_bytes(load.num_elements * load.itemsize, *sizes)


@final
class ExchangeMean(Transfer):
    """For 16-bit floats: every rank sums one part of the bucket in float32 and rounds it once.

    All-to-all, local sum, all-gather: the bytes of a ring at the tensors' own dtype, where a 16-bit
    all-reduce would round at every hop.
    """

    lags = (2, 2)

    def run(self, load: Load, lanes: Sequence[Lane], buffers: Buffers) -> Generator[Work, None, None]:
        """Yield an all-to-all and an all-gather."""
        (lane,) = lanes
        parts = _Parts(load, lane.size, buffers)
        yield lane.all_to_all(parts.received, parts.values)
        scale = _scale_of_sum(lane.size)
        total = parts.sum(load.operations.float32, scale)
        yield lane.all_gather(parts.values, parts.rounded(total.div_(lane.size * scale)))
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

    def run(self, load: Load, lanes: Sequence[Lane], buffers: Buffers) -> Generator[Work, None, None]:
        """Yield an all-to-all within the node, an all-reduce between the nodes, an all-gather within the node."""
        within, across = lanes
        num_ranks = within.size * across.size
        parts = _Parts(load, within.size, buffers)
        if load.itemsize > 2:
            _divide_(parts.values, num_ranks)
            yield within.all_to_all(parts.received, parts.values)
            mean = parts.sum(load.blocks[0].dtype)
            yield across.all_reduce(mean)
        else:
            yield within.all_to_all(parts.received, parts.values)
            scale = _scale_of_sum(num_ranks)
            # In float32 between the nodes too, so that the mean is rounded once.
            total = parts.sum(load.operations.float32, scale)
            yield across.all_reduce(total)
            mean = parts.rounded(total.div_(num_ranks * scale))
        yield within.all_gather(parts.values, mean)
        parts.land()

    def wire_bytes(self, load: Load, sizes: Sequence[int]) -> float:
        """Return twice the parts for the others of the node, and a ring's bytes of one part between the nodes."""
        within, across = sizes
        part = _part(load, within)
        return 2 * (within - 1) * part * load.itemsize + _ring_bytes(part * max(4, load.itemsize), across)


@final
class CodedMean(Transfer):
    """Displacements from the anchor, summed within the node as they are, and coded where they cross the slow link.

    Every rank sums one part of the bucket: what the others sent of it, decoded, and its own, which was never coded.
    The sum is coded once more for all; every rank decodes the same bytes, so that all end alike.

    Args:
        codec: How displacements are written.
        anchor: The bucket's, in float32; becomes the new one.
    """

    def __init__(self, codec: Codec, anchor: Tensor, num_legs: int) -> None:
        self.lags = (2, 2) if num_legs == 1 else (1, 2, 2, 1)
        self._codec = codec
        self._anchor = anchor

    def run(self, load: Load, lanes: Sequence[Lane], buffers: Buffers) -> Generator[Work, None, None]:
        """Yield an all-to-all and an all-gather of codes, between those within the node where there are nodes."""
        *within, across = lanes
        codec, operations = self._codec, load.operations
        num_nodes, ranks_of_node = across.size, within[0].size if within else 1
        size, num_bytes = self._part(load, num_nodes * ranks_of_node)

        def take(role: str, count: int, dtype: Any) -> Tensor:
            return buffers.take(role, count, load.blocks[0], dtype)

        values = take("values", ranks_of_node * num_nodes * size, operations.float32)
        load.pack(values)
        values[: load.num_elements].sub_(self._anchor)
        values[load.num_elements :].zero_()
        _divide_(values, ranks_of_node * num_nodes)
        own = values
        if within:
            received = take("received", values.numel(), operations.float32)
            yield within[0].all_to_all(received, values)
            own = take("own", num_nodes * size, operations.float32)
            _sum_(own, received.split(num_nodes * size))
        own = own.view(num_nodes, size)
        sent, arrived = (take(role, num_nodes * num_bytes, operations.uint8) for role in ("sent", "arrived"))
        codec.encode(own, sent.view(num_nodes, num_bytes), operations)
        yield across.all_to_all(arrived, sent)
        decoded = take("decoded", num_nodes * size, operations.float32).view(num_nodes, size)
        codec.decode(arrived.view(num_nodes, num_bytes), decoded, operations)
        decoded[across.rank].copy_(own[across.rank])
        mean = take("mean", size, operations.float32)
        _sum_(mean, list(decoded))
        coded = take("coded", num_bytes, operations.uint8)
        codec.encode(mean.view(1, size), coded.view(1, num_bytes), operations)
        yield across.all_gather(arrived, coded)
        codes = arrived
        if within:
            codes = take("codes", ranks_of_node * num_nodes * num_bytes, operations.uint8)
            yield within[0].all_gather(codes, arrived)
        codec.decode(codes.view(-1, num_bytes), values.view(-1, size), operations)
        self._anchor.add_(values[: load.num_elements])
        load.unpack(self._anchor)

    def wire_bytes(self, load: Load, sizes: Sequence[int]) -> float:
        """Return what this rank sends: codes to the others of its leg twice, and within the node values, then codes."""
        *within, across = sizes
        ranks_of_node = within[0] if within else 1
        size, num_bytes = self._part(load, across * ranks_of_node)
        inside = (ranks_of_node - 1) * across * (4 * size + num_bytes)
        return inside + 2 * (across - 1) * num_bytes

    def _part(self, load: Load, num_parts: int) -> tuple[int, int]:
        """Return how many values a part of the bucket has, and how many bytes its code."""
        unit = self._codec.granularity
        size = -(-load.num_elements // (num_parts * unit)) * unit
        return size, self._codec.wire_bytes(size)


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
            self.values = buffers.take("values", padded, load.blocks[0])
            load.pack(self.values)
            self.values[load.num_elements :].zero_()
        self.received = buffers.take("received", padded, self.values)

    def sum(self, dtype: Any, scale: float = 1.0) -> Tensor:
        """Return ``scale`` times the sum of what was received, summed in ``dtype``."""
        total = self._buffers.take("total", self._size, self.received, dtype)
        _sum_(total, self.received.split(self._size), scale)
        return total

    def rounded(self, mean: Tensor) -> Tensor:
        """Return a mean in float32 in the bucket's own dtype, where what was received stood."""
        return self.received[: self._size].copy_(mean)

    def land(self) -> None:
        """Put ``values``, which hold the mean now, where they belong."""
        if self._in_place:
            self._load.mark_written()
        else:
            self._load.unpack(self.values)


def _sum_(total: Tensor, parts: Sequence[Tensor], scale: float = 1.0) -> None:
    """Write ``scale`` times the sum of ``parts`` into ``total``."""
    first, *others = parts
    total.copy_(first)
    if scale != 1.0:
        total.mul_(scale)
    for other in others:
        total.add_(other, alpha=scale)


def _part(load: Load, num_parts: int) -> int:
    return -(-load.num_elements // num_parts)


def _divide_(values: Tensor, divisor: int) -> None:
    if divisor & (divisor - 1):
        values.div_(divisor)
    else:  # a power of two: the same bits, faster
        values.mul_(1 / divisor)


def _scale_of_sum(num_ranks: int) -> float:
    """Return a power of two, which keeps the bits, that keeps the sum of bfloat16's largest numbers finite."""
    return 2.0 ** -(num_ranks - 1).bit_length()


def _ring_bytes(num_bytes: int, group_size: int) -> float:
    return 2 * (group_size - 1) / group_size * num_bytes


@final
class Broadcast(Transfer):
    """Replace a bucket by the first rank's, byte by byte, so that any dtype will do."""

    lags = (4,)

    def run(self, load: Load, lanes: Sequence[Lane], buffers: Buffers) -> Generator[Work, None, None]:
        """Yield one broadcast."""
        (lane,) = lanes
        values = buffers.take("values", load.num_elements, load.blocks[0])
        load.pack(values)
        yield lane.broadcast(values.view(load.operations.uint8))
        load.unpack(values)

    def wire_bytes(self, load: Load, sizes: Sequence[int]) -> float:
        """Return the bucket's bytes, the most that a rank passes on in a tree."""
        return load.num_elements * load.itemsize
