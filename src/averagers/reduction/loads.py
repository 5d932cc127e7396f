"""What a bucket carries, and the memory it is staged in (pure)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

from averagers.reduction.interface import Tensor, TensorOperations


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

    def take(self, role: str, num_elements: int, device: Any, dtype: Any) -> Tensor:
        """Return a flat buffer on ``device``; its content is what was left there."""
        num_bytes = num_elements * dtype.itemsize
        memory = self._memory.get((role, device))
        if memory is None or memory.numel() < num_bytes:
            memory = self.operations.new_bytes(num_bytes, device)
            self._memory[role, device] = memory
        return memory[:num_bytes].view(dtype)


@dataclass
class Load(ABC):
    """A bucket bound to memory.

    Attributes:
        blocks: Views of the tensors' elements, in the bucket's order; all have one dtype and device.
        num_elements: How many elements they have in all.
        drift: Measures the distance from the mean; None if nobody asked.
        operations: Of the framework whose tensors these are.
    """

    blocks: list[Tensor]
    num_elements: int
    drift: DriftMeter | None
    operations: TensorOperations

    @property
    @abstractmethod
    def dtype(self) -> Any:
        """Of what is packed."""

    @property
    def itemsize(self) -> int:
        """The bytes of a packed element."""
        return int(self.dtype.itemsize)

    @property
    def device(self) -> Any:
        """Where it all lies."""
        return self.blocks[0].device

    @property
    @abstractmethod
    def in_place(self) -> bool:
        """Whether there is one block, flat and nobody else's, so that it can be reduced where it lies."""

    @abstractmethod
    def pack(self, buffer: Tensor) -> None:
        """Write what travels into the start of ``buffer``."""

    @abstractmethod
    def unpack(self, buffer: Tensor) -> None:
        """Take the mean of all ranks from the start of ``buffer``, which may be written to."""

    def mark_written(self) -> None:
        """Tell autograd that the blocks changed where they lie: collectives do not."""
        self.operations.mark_written(self.blocks)

    def _slots(self, buffer: Tensor) -> list[Tensor]:
        sizes = [block.numel() for block in self.blocks]
        slots = buffer[: self.num_elements].split(sizes)
        return [
            slot if block.dim() == 1 else slot.view(block.shape) for slot, block in zip(slots, self.blocks, strict=True)
        ]

    def _write(self, buffer: Tensor) -> None:
        slots = self._slots(buffer)
        if self.drift:
            self.drift.add(self.blocks, slots)
        self.operations.copy_(self.blocks, slots)


@final
@dataclass
class Weights(Load):
    """The values themselves.

    Attributes:
        is_alone: No other tensor shares the memory of the bucket's.
    """

    is_alone: bool

    @property
    def dtype(self) -> Any:
        """Of the tensors."""
        return self.blocks[0].dtype

    @property
    def in_place(self) -> bool:
        """Whether there is one block, flat and nobody else's, so that it can be reduced where it lies."""
        return self.is_alone and len(self.blocks) == 1 and self.drift is None and self.blocks[0].is_contiguous()

    def pack(self, buffer: Tensor) -> None:
        """Copy the blocks into the start of ``buffer``, one after the other."""
        self.operations.copy_(self._slots(buffer), self.blocks)

    def unpack(self, buffer: Tensor) -> None:
        """Copy the start of ``buffer`` back into the blocks."""
        self._write(buffer)


@final
@dataclass
class Displacements(Load):
    """How far the values are from an anchor, in float32 at least.

    Attributes:
        anchor: Flat tensors of the bucket's elements, in its order, perhaps on another device; moved to the mean, and
            the values with it.
    """

    anchor: list[Tensor]

    @property
    def dtype(self) -> Any:
        """Of the anchor."""
        return self.anchor[0].dtype

    @property
    def in_place(self) -> bool:
        """Never: they are computed."""
        return False

    def pack(self, buffer: Tensor) -> None:
        """Write values minus anchor into the start of ``buffer``."""
        self.operations.copy_(self._slots(buffer), self.blocks)
        self.operations.add_(self._anchored(buffer), self._anchor_beside(buffer), alpha=-1.0)

    def unpack(self, buffer: Tensor) -> None:
        """Move the anchor by what ``buffer`` holds, and the values to the anchor."""
        slots = self._anchored(buffer)
        self.operations.add_(slots, self._anchor_beside(buffer), alpha=1.0)
        self.operations.copy_(self.anchor, slots)
        self._write(buffer)

    def _anchor_beside(self, buffer: Tensor) -> list[Tensor]:
        return [one.to(buffer.device) for one in self.anchor]

    def _anchored(self, buffer: Tensor) -> list[Tensor]:
        return list(buffer[: self.num_elements].split([one.numel() for one in self.anchor]))
