"""The reducer: walks through the buckets of a round, several in flight, and writes the mean in place (pure)."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, final

from averagers.errors import InvalidValueError
from averagers.reduction.anchor import Anchor
from averagers.reduction.codecs import Codec
from averagers.reduction.coded import residual_sizes
from averagers.reduction.groups import Group, Route
from averagers.reduction.interface import Lane, Tensor, TensorOperations, Work
from averagers.reduction.layout import Bucket, Kind
from averagers.reduction.loads import Buffers, Displacements, DriftMeter, Load, Weights
from averagers.reduction.method import Method
from averagers.reduction.pipeline import Run, run_pipeline
from averagers.reduction.selection import (
    Layout,
    Listing,
    Selected,
    Selection,
    describe,
    elements,
    in_memory_order,
    select_every_tensor,
    select_tensors,
    shaped_like,
)
from averagers.reduction.transfers import Broadcast, Shares, Transfer

# Between nodes smaller buckets: the link is busy sooner, and idle later.
_CUT_BETWEEN_NODES = 4


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
class Staged:
    """A copy of what travels, so that the tensors may change meanwhile.

    Attributes:
        values: Flat and in memory order, one of each tensor.
    """

    values: list[Tensor]


@final
class Reducer:
    """Averages dense tensors in buckets, in place.

    Args:
        operations: Of the framework whose tensors are averaged.
        bucket_bytes: Most bytes of a bucket; about four buckets of memory are used on top of the model, for
            16-bit floats up to twelve.

    Attributes:
        operations: Of the framework.
        bucket_bytes: Most bytes of a bucket.
    """

    def __init__(self, operations: TensorOperations, bucket_bytes: int) -> None:
        self.operations = operations
        self.bucket_bytes = bucket_bytes
        self._layout = Layout([], Listing((), 0), bucket_bytes, [], [], [], {})
        self._idle_buffers: list[Buffers] = []

    def select(self, params: Iterable[Any], once_trainable: set[int]) -> Selection:
        """Read ``params`` once and return what is averaged of it, see `select_tensors`."""
        return self._selection(select_tensors(params, once_trainable, self.operations))

    def select_all(self, tensors: Iterable[tuple[str, Any]]) -> Selection:
        """Return named tensors of any dtype as a selection, to broadcast, see `select_every_tensor`."""
        return self._selection(select_every_tensor(tensors, self.operations))

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

    def average_(
        self,
        selection: Selection,
        route: Route,
        method: Method,
        *,
        measure_drift: bool,
        weights: Sequence[float],
        anchor: Anchor | None = None,
        staged: Staged | None = None,
    ) -> Reduced:
        """Replace every selected tensor by its mean over the route's group, in place.

        Args:
            selection: The tensors.
            route: How they travel.
            method: How the mean is computed.
            measure_drift: Whether to measure the distance from the mean.
            weights: Of the ranks of the route's group.
            anchor: What they are displaced from; moved to the mean. None to average the weights themselves.
            staged: Of the same tensors: averaged in their place, so that neither they nor the anchor change.
        """
        drift = DriftMeter(self.operations) if measure_drift else None
        shares = _shares(weights, route)
        cut = _CUT_BETWEEN_NODES if len(route.legs) > 1 else 1
        if anchor is not None and method.codec is not None:
            cut = method.codec.cut
            self.prepare_residuals(anchor, selection, route, method.codec)

        def journey_of(index: int, bucket: Bucket) -> tuple[Load, Transfer]:
            load = self._load(bucket, selection, anchor, staged, drift)
            transfer = method.transfer(
                bucket.kind,
                is_displaced=anchor is not None and anchor.values[bucket.slots[0].tensor] is not None,
                shares=shares,
                num_legs=len(route.legs),
                residuals=anchor.residuals[index] if anchor and anchor.residuals else {},
                operations=self.operations,
            )
            return load, transfer

        written = selection.sharded if staged is None else []
        wire_bytes = self._transfer(selection, route, journey_of, written=written, cut=cut)
        if drift is None:
            return Reduced(wire_bytes, None)
        return Reduced(wire_bytes, math.sqrt(route.group.total(drift.total) / route.group.size))

    def stage(self, selection: Selection, anchor: Anchor | None) -> Staged:
        """Return a copy of what travels: displacements from the anchor where there is one, else the values."""
        values = anchor.values if anchor is not None else [None] * len(selection.tensors)
        with self.operations.plain_memory():
            return Staged([self._staged(tensor, one) for tensor, one in zip(selection.tensors, values, strict=True)])

    def _staged(self, tensor: Tensor, anchor: Tensor | None) -> Tensor:
        view = self._in_memory_order(tensor)
        dtype = view.dtype if anchor is None else anchor.dtype
        flat = self.operations.new_bytes(view.numel() * dtype.itemsize, view.device).view(dtype)
        flat.view(view.shape).copy_(view)
        return flat if anchor is None else flat.sub_(anchor.to(flat.device))

    def broadcast_(self, selection: Selection, group: Group) -> None:
        """Replace every selected tensor by that of the group's first rank, in place."""
        self._transfer(
            selection,
            Route(group, (group,)),
            lambda index, bucket: (self._load(bucket, selection, None, None, None), Broadcast()),
            written=selection.sharded,
        )

    def copy_anchored(self, selection: Selection, anchor: Anchor, *, with_float64: bool) -> bool:
        """Write the tensors into ``anchor``, in float32 at least, and tell whether its memory is a new one."""
        lengths = selection.anchored_lengths(with_float64=with_float64)
        is_new = [None if one is None else one.numel() for one in anchor.values] != lengths
        with self.operations.plain_memory():
            if is_new:
                anchor.values = [
                    None if length is None else self._new_wide(length, kind, anchor.home(kind.device))
                    for length, kind in zip(lengths, selection.layout.kinds, strict=True)
                ]
            for tensor, one in zip(selection.tensors, anchor.values, strict=True):
                if one is not None:
                    view = self._in_memory_order(tensor)
                    one.view(view.shape).copy_(view)
        return is_new

    def land_(
        self,
        selection: Selection,
        targets: Sequence[Tensor | None],
        *,
        keep: float,
        sent: Sequence[Tensor] | None = None,
    ) -> None:
        """Write ``keep`` of each tensor and the rest of its target, in place; or the target and the way since ``sent``.

        Args:
            selection: The tensors.
            targets: Flat and in memory order; None to leave a tensor alone.
            keep: From 0 to 1.
            sent: What `snapshot` returned.
        """
        with self.operations.plain_memory():
            for index, (tensor, target) in enumerate(zip(selection.tensors, targets, strict=True)):
                if target is None:
                    continue
                view = self._in_memory_order(tensor)
                shaped = target.to(view.device).view(view.shape)
                if sent is not None:
                    view.copy_((view - sent[index].to(view.device)).to(target.dtype).add_(shaped))
                else:
                    view.copy_(shaped if not keep else (view.to(target.dtype) - shaped).mul_(keep).add_(shaped))
            self.operations.mark_written(selection.sharded)

    def shaped(self, selection: Selection, flat: Sequence[Tensor | None]) -> list[Tensor]:
        """Return what is there of ``flat`` as views of the shapes of the tensors."""
        with self.operations.plain_memory():
            return [
                shaped_like(self.operations.reals(tensor), one)
                for tensor, one in zip(selection.tensors, flat, strict=True)
                if one is not None
            ]

    def stand_ins(self, selection: Selection, *, with_float64: bool) -> list[Tensor]:
        """Return tensors like those of an anchor in shape and dtype, which take next to no memory."""
        lengths = selection.anchored_lengths(with_float64=with_float64)
        with self.operations.plain_memory():
            return [
                self._new_wide(1, kind, kind.device)[0].expand(self.operations.reals(tensor).shape)
                for tensor, kind, length in zip(selection.tensors, selection.layout.kinds, lengths, strict=True)
                if length is not None
            ]

    def _new_wide(self, length: int, kind: Kind, device: Any) -> Tensor:
        dtype = kind.dtype if kind.itemsize > 4 else self.operations.float32
        return self.operations.new_bytes(dtype.itemsize * length, device).view(dtype)

    def prepare_residuals(self, anchor: Anchor, selection: Selection, route: Route, codec: Codec) -> None:
        """Make residuals of zeros, unless ``anchor`` has those of the same buckets."""
        sizes = [leg.size for leg in route.legs]
        plan = f"{self.bucket_bytes} bytes, {sizes} ranks, {codec}"
        buckets = selection.layout.buckets(codec.cut)
        lengths = [
            residual_sizes(codec, bucket.num_elements, sizes) if bucket.kind.is_coded else {} for bucket in buckets
        ]
        held = [{place: one.numel() for place, one in residuals.items()} for residuals in anchor.residuals]
        with self.operations.plain_memory():
            if anchor.plan != plan or held != lengths:
                anchor.plan = plan
                anchor.residuals = [
                    {
                        place: self._new_float32(size, anchor.home(bucket.kind.device)).zero_()
                        for place, size in wanted.items()
                    }
                    for wanted, bucket in zip(lengths, buckets, strict=True)
                ]
            for residuals, bucket in zip(anchor.residuals, buckets, strict=True):
                for place, residual in residuals.items():
                    residuals[place] = residual.to(anchor.home(bucket.kind.device))

    def _new_float32(self, length: int, device: Any) -> Tensor:
        return self.operations.new_bytes(4 * length, device).view(self.operations.float32)

    def snapshot(self, selection: Selection) -> Sequence[Tensor]:
        """Return copies of the selected tensors."""
        with self.operations.plain_memory():
            return [self._in_memory_order(tensor).clone() for tensor in selection.tensors]

    def restore_(self, selection: Selection, snapshot: Sequence[Tensor]) -> None:
        """Write copies made by ``snapshot`` back, in place."""
        with self.operations.plain_memory():
            for tensor, saved in zip(selection.tensors, snapshot, strict=True):
                self._in_memory_order(tensor).copy_(saved)
            self.operations.mark_written(selection.sharded)

    def close(self) -> None:
        """Free the buffers kept between rounds."""
        self._idle_buffers = []

    def _selection(self, selected: list[Selected]) -> Selection:
        records, asides = [one.record for one in selected], [one.is_aside for one in selected]
        if records != self._layout.records or asides != self._layout.asides:
            kinds = [
                replace(self.operations.kind(one.record.device, one.record.dtype), is_aside=True)
                if one.is_aside
                else self.operations.kind(one.record.device, one.record.dtype)
                for one in selected
            ]
            # A complex number is two elements of its bucket.
            sizes = [
                prod(record.shape) * (record.dtype.itemsize // kind.itemsize)
                for record, kind in zip(records, kinds, strict=True)
            ]
            listing = describe(records, self.operations)
            self._layout = Layout(records, listing, self.bucket_bytes, sizes, kinds, asides, {})
        return Selection(
            [one.tensor for one in selected],
            [one.whole for one in selected],
            [one.lr for one in selected],
            self._layout,
        )

    def _transfer(
        self,
        selection: Selection,
        route: Route,
        journey_of: Callable[[int, Bucket], tuple[Load, Transfer]],
        *,
        written: Sequence[Tensor],
        cut: int = 1,
    ) -> int:
        """Run every bucket through its transfer, and return the bytes that this rank sent."""
        wire_bytes = 0.0

        def runs() -> Iterator[Run]:
            nonlocal wire_bytes
            for index, bucket in enumerate(selection.layout.buckets(cut)):
                load, transfer = journey_of(index, bucket)
                wire_bytes += transfer.wire_bytes(load, [leg.size for leg in route.legs])
                lanes = [leg.lane(index, bucket.kind.device.type) for leg in route.legs]
                yield Run(self._steps(transfer, load, lanes), transfer.lags)

        with self.operations.plain_memory():
            # Where this fails, collectives under way may write into the buffers that are not idle: they are let go.
            run_pipeline(runs(), route.group.mark_arrival)
            self.operations.mark_written(written)
        return round(wire_bytes)

    def _steps(self, transfer: Transfer, load: Load, lanes: Sequence[Lane]) -> Generator[Work, None, None]:
        """Run a bucket with buffers that are free, and set these free at the end."""
        buffers = self._idle_buffers.pop() if self._idle_buffers else Buffers(self.operations)
        yield from transfer.run(load, lanes, buffers)
        self._idle_buffers.append(buffers)

    def _load(
        self,
        bucket: Bucket,
        selection: Selection,
        anchor: Anchor | None,
        staged: Staged | None,
        drift: DriftMeter | None,
    ) -> Load:
        """Bind a bucket to the tensors as they are now, or to what was staged of them."""
        if staged is not None:
            return Weights(bucket.parts_of(staged.values), bucket.num_elements, drift, self.operations, True)
        blocks: list[Tensor] = []
        for slot in bucket.slots:
            blocks.extend(elements(self._in_memory_order(selection.tensors[slot.tensor]), slot.start, slot.stop))
        held = bucket.parts_of(anchor.values) if anchor is not None else []
        if held:
            return Displacements(blocks, bucket.num_elements, drift, self.operations, held)
        is_alone = bucket.slots[0].tensor not in selection.layout.shared_memory
        return Weights(blocks, bucket.num_elements, drift, self.operations, is_alone)

    def _in_memory_order(self, tensor: Tensor) -> Tensor:
        return in_memory_order(self.operations.reals(tensor))


def _shares(weights: Sequence[float], route: Route) -> Shares:
    """Return how much each rank counts."""
    group = route.group
    if all(weight == weights[0] for weight in weights):
        return Shares(1 / group.size, [1 / group.size] * route.legs[0].size, group.size)
    largest = max(weights)  # divided by it, so that the sum cannot overflow
    total = math.fsum(weight / largest for weight in weights)
    share_of = {rank: weight / largest / total for rank, weight in zip(group.ranks, weights, strict=True)}
    return Shares(share_of[group.rank], [share_of[rank] for rank in route.legs[0].ranks], None)
