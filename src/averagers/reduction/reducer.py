"""The reducer: walks through the buckets of a round, several in flight, and writes the mean in place (pure)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, final

from averagers.errors import InvalidValueError
from averagers.reduction.groups import Group
from averagers.reduction.interface import Record, Tensor, TensorOperations, Work
from averagers.reduction.layout import Bucket, plan_buckets
from averagers.reduction.selection import (
    Listing,
    describe,
    elements,
    in_memory_order,
    overlapping,
    select_every_tensor,
    select_tensors,
)
from averagers.reduction.transfers import (
    AllReduceMean,
    Broadcast,
    Buffers,
    DriftMeter,
    ExchangeMean,
    Load,
    Transfer,
)

# Enough to keep the link busy while one bucket is packed and another unpacked.
_BUCKETS_IN_FLIGHT = 4


@final
@dataclass(frozen=True)
class Reduced:
    """What a reduction cost and found.

    Attributes:
        wire_bytes: Bytes that this rank sent, by the formula of its collectives.
        drift: Root mean square over the ranks of the distance from the mean; None if not asked for.
    """

    wire_bytes: int
    drift: float | None


@final
@dataclass(frozen=True)
class _Layout:
    """What is computed once and kept while the list of tensors stays the same.

    Attributes:
        records: Place, shape and type of each tensor; any change of these makes a new layout.
        listing: The tensors as the ranks compare them.
        buckets: The plan.
    """

    records: list[Record]
    listing: Listing
    buckets: tuple[Bucket, ...]

    @cached_property
    def shared_memory(self) -> frozenset[int]:
        """Positions of tensors whose memory overlaps another's, or their own."""
        return overlapping(self.records)


@final
@dataclass(frozen=True)
class Selection:
    """The tensors of one round, and how they travel."""

    tensors: Sequence[Tensor]
    layout: _Layout

    @property
    def listing(self) -> Listing:
        """The tensors as the ranks compare them."""
        return self.layout.listing


@final
class Reducer:
    """Averages dense tensors in buckets, in place.

    Args:
        operations: Of the framework whose tensors are averaged.
        bucket_bytes: Most bytes of a bucket; about four buckets of memory are used on top of the model, for
            16-bit floats up to twelve.
    """

    def __init__(self, operations: TensorOperations, bucket_bytes: int) -> None:
        self._operations = operations
        self.bucket_bytes = bucket_bytes
        self._layout = _Layout([], Listing((), 0), ())
        self._buffers = self._new_buffers()

    def select(self, params: Iterable[Any], once_trainable: set[int]) -> Selection:
        """Read ``params`` once and return what is averaged of it, see `select_tensors`."""
        return self._selection(select_tensors(params, once_trainable, self._operations))

    def select_all(self, tensors: Iterable[tuple[str, Any]]) -> Selection:
        """Return named tensors of any dtype as a selection, to broadcast, see `select_every_tensor`."""
        return self._selection(select_every_tensor(tensors, self._operations))

    def check(self, selection: Selection, group: Group) -> None:
        """Raise what must be raised before any communication: the group's backend cannot reach a tensor's device."""
        served = ", ".join(sorted(group.device_types))
        for tensor, description in zip(selection.tensors, selection.listing.descriptions, strict=True):
            if tensor.device.type not in group.device_types:
                raise InvalidValueError(
                    f"tensor {description.name} is on {tensor.device}, but the process group's backend serves "
                    f"{served} only: move the model, or call init_process_group with a backend for "
                    f"{tensor.device.type} too, such as 'cpu:gloo,cuda:nccl'"
                )

    def average_(self, selection: Selection, group: Group, *, measure_drift: bool) -> Reduced:
        """Replace every selected tensor by its mean over ``group``, in place."""
        drift = DriftMeter(self._operations) if measure_drift else None
        wire_bytes = self._transfer(selection, group, drift=drift)
        if drift is None:
            return Reduced(wire_bytes, None)
        return Reduced(wire_bytes, math.sqrt(group.total(drift.total) / group.size))

    def broadcast_(self, selection: Selection, group: Group) -> None:
        """Replace every selected tensor by that of the group's first rank, in place."""
        self._transfer(selection, group, transfer=Broadcast())

    def snapshot(self, selection: Selection) -> Sequence[Tensor]:
        """Return copies of the selected tensors."""
        with self._operations.plain_memory():
            return [self._in_memory_order(tensor).clone() for tensor in selection.tensors]

    def restore_(self, selection: Selection, snapshot: Sequence[Tensor]) -> None:
        """Write copies made by ``snapshot`` back, in place."""
        with self._operations.plain_memory():
            for tensor, saved in zip(selection.tensors, snapshot, strict=True):
                self._in_memory_order(tensor).copy_(saved)

    def close(self) -> None:
        """Free the buffers kept between rounds."""
        self._buffers = self._new_buffers()

    def _selection(self, selected: list[tuple[Record, Tensor]]) -> Selection:
        records = [record for record, _ in selected]
        if records != self._layout.records:
            kinds = [self._operations.kind(record.device, record.dtype) for record in records]
            # A complex number is two elements of its bucket.
            sizes = [
                prod(record.shape) * (record.dtype.itemsize // kind.itemsize)
                for record, kind in zip(records, kinds, strict=True)
            ]
            buckets = plan_buckets(sizes, kinds, bucket_bytes=self.bucket_bytes)
            self._layout = _Layout(records, describe(records, self._operations), buckets)
        return Selection([tensor for _, tensor in selected], self._layout)

    def _transfer(
        self,
        selection: Selection,
        group: Group,
        *,
        transfer: Transfer | None = None,
        drift: DriftMeter | None = None,
    ) -> int:
        """Run every bucket through its transfer, and return the bytes that this rank sent."""
        wire_bytes = 0.0

        def runs() -> Iterator[_Run]:
            nonlocal wire_bytes
            for index, bucket in enumerate(selection.layout.buckets):
                load = self._load(bucket, selection, drift)
                chosen = transfer or self._mean_of(bucket.kind.dtype)
                wire_bytes += chosen.wire_bytes(load, group.size)
                lane = group.lane(index, bucket.kind.device.type)
                buffers = self._buffers[index % _BUCKETS_IN_FLIGHT]
                yield _Run(chosen.run(load, lane, buffers), _BUCKETS_IN_FLIGHT // chosen.num_collectives)

        with self._operations.plain_memory():
            try:
                _run_pipeline(runs())
            except BaseException:
                # Collectives still under way may write into these buffers.
                self._buffers = self._new_buffers()
                raise
        return round(wire_bytes)

    def _load(self, bucket: Bucket, selection: Selection, drift: DriftMeter | None) -> Load:
        """Bind a bucket to the tensors as they are now."""
        blocks: list[Tensor] = []
        for slot in bucket.slots:
            blocks.extend(elements(self._in_memory_order(selection.tensors[slot.tensor]), slot.start, slot.stop))
        in_place = (
            len(blocks) == 1
            and drift is None
            and blocks[0].is_contiguous()
            and bucket.slots[0].tensor not in selection.layout.shared_memory
        )
        return Load(blocks, bucket.num_elements, in_place, drift, self._operations)

    def _in_memory_order(self, tensor: Tensor) -> Tensor:
        return in_memory_order(self._operations.reals(tensor))

    def _mean_of(self, dtype: Any) -> Transfer:
        return ExchangeMean() if dtype in self._operations.sixteen_bit else AllReduceMean()

    def _new_buffers(self) -> tuple[Buffers, ...]:
        return tuple(Buffers(self._operations) for _ in range(_BUCKETS_IN_FLIGHT))


@dataclass
class _Run:
    """A bucket under way: its generator, the collective it waits for, and when to go on.

    Attributes:
        steps: Yields each collective that it has started.
        lag: How many buckets are started between two steps of this one.
        due: The tick of the next step.
        work: The collective to wait for then.
    """

    steps: Generator[Work, None, None]
    lag: int
    due: int = 0
    work: Work | None = None

    def advance(self, tick: int) -> bool:
        """Wait for the collective under way and go on; False at the end."""
        if self.work is not None:
            self.work.wait()
        self.work = next(self.steps, None)
        self.due = tick + self.lag
        return self.work is not None


def _run_pipeline(runs: Iterable[_Run]) -> None:
    """Start the runs in turn, and go on with those whose lag has passed.

    When a run goes on is counted in buckets, never in time, so that every rank starts the same
    collectives in the same order.
    """
    under_way: deque[_Run] = deque()
    tick = 0
    for run in runs:
        tick += 1
        _advance_due(under_way, tick)
        if run.advance(tick):
            under_way.append(run)
    while under_way:
        tick += 1
        _advance_due(under_way, tick)


def _advance_due(under_way: deque[_Run], tick: int) -> None:
    for run in [run for run in under_way if run.due == tick]:
        if not run.advance(tick):
            under_way.remove(run)
