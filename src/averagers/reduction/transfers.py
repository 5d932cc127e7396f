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
        num_collectives: How many collectives a bucket takes.
    """

    num_collectives: int

    @abstractmethod
    def run(self, load: Load, lane: Lane, buffers: Buffers) -> Generator[Work, None, None]:
        """Start the collectives of one bucket, each after the wait for the one before."""

    @abstractmethod
    def wire_bytes(self, load: Load, group_size: int) -> float:
        """Return how many bytes this rank sends for one bucket."""


@final
class AllReduceMean(Transfer):
    """Divide by the group's size, then sum: for dtypes that keep their precision when divided.

    Dividing first cannot overflow, and gives torch's own averager's bits where two ranks average.
    """

    num_collectives = 1

    def run(self, load: Load, lane: Lane, buffers: Buffers) -> Generator[Work, None, None]:
        """Yield one all-reduce."""
        if load.in_place:
            flat = load.blocks[0]
        else:
            flat = buffers.take("values", load.num_elements, load.blocks[0])
            load.pack(flat)
        if lane.size & (lane.size - 1):
            flat.div_(lane.size)
        else:  # a power of two: the same bits, faster
            flat.mul_(1 / lane.size)
        yield lane.all_reduce(flat)
        if load.in_place:
            load.mark_written()
        else:
            load.unpack(flat)

    def wire_bytes(self, load: Load, group_size: int) -> float:
        """Return ``2 (n - 1) / n`` of the bucket's bytes, as a ring sends."""
        return 2 * (group_size - 1) / group_size * load.num_elements * load.itemsize


@final
class ExchangeMean(Transfer):
    """For 16-bit floats: every rank sums one part of the bucket in float32 and rounds it once.

    All-to-all, local sum, all-gather: the bytes of a ring at the tensors' own dtype, where a 16-bit
    all-reduce would round at every hop.
    """

    num_collectives = 2

    def run(self, load: Load, lane: Lane, buffers: Buffers) -> Generator[Work, None, None]:
        """Yield an all-to-all and an all-gather."""
        size = lane.size
        part = -(-load.num_elements // size)
        in_place = load.in_place and load.num_elements == part * size
        if in_place:
            values = load.blocks[0]
        else:
            values = buffers.take("values", part * size, load.blocks[0])
            load.pack(values)
            values[load.num_elements :].zero_()
        received = buffers.take("received", part * size, values)
        yield lane.all_to_all(received, values)
        # A power of two keeps the bits and the sum of bfloat16's largest numbers finite.
        scale = 2.0 ** -(size - 1).bit_length()
        total = buffers.take("total", part, values, load.operations.float32)
        total.copy_(received[:part]).mul_(scale)
        for start in range(part, part * size, part):
            total.add_(received[start : start + part], alpha=scale)
        total.div_(size * scale)
        mean = received[:part].copy_(total)
        yield lane.all_gather(values, mean)
        if in_place:
            load.mark_written()
        else:
            load.unpack(values)

    def wire_bytes(self, load: Load, group_size: int) -> float:
        """Return twice the ``n - 1`` parts that this rank sends to the others."""
        part = -(-load.num_elements // group_size)
        return 2 * (group_size - 1) * part * load.itemsize


@final
class Broadcast(Transfer):
    """Replace a bucket by the first rank's, byte by byte, so that any dtype will do."""

    num_collectives = 1

    def run(self, load: Load, lane: Lane, buffers: Buffers) -> Generator[Work, None, None]:
        """Yield one broadcast."""
        values = buffers.take("values", load.num_elements, load.blocks[0])
        load.pack(values)
        yield lane.broadcast(values.view(load.operations.uint8))
        load.unpack(values)

    def wire_bytes(self, load: Load, group_size: int) -> float:
        """Return the bucket's bytes, the most that a rank passes on in a tree."""
        return load.num_elements * load.itemsize
