"""What is averaged: reads the caller's ``params`` once, checks every tensor, describes and lays out the list (pure)."""

from __future__ import annotations

import marshal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from math import prod
from typing import Any, NamedTuple, final

from averagers.content import Aside
from averagers.errors import InvalidTypeError, InvalidValueError, UnsupportedTensorError
from averagers.reduction.interface import Record, Tensor, TensorOperations, stride_order
from averagers.reduction.layout import Bucket, Kind, plan_buckets


class TensorDescription(NamedTuple):
    """What the ranks must agree on of one tensor; a tuple, because a model has thousands.

    Attributes:
        name: Its name where one was given, else its position in the list, as ``#3``.
        shape: Its shape.
        dtype: The name of its dtype.
        order: Its dimensions from the largest stride to the smallest, without those of size 1.
        device: Which of this rank's devices it is on: the type, and the order of first appearance.
        shard: Of which place it is the shard; empty where it is whole.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    order: tuple[int, ...]
    device: str
    shard: str = ""


@dataclass(frozen=True)
class Listing:
    """The tensors of one round as the ranks compare them."""

    descriptions: tuple[TensorDescription, ...]
    num_elements: int

    @cached_property
    def digest(self) -> bytes:
        """Bytes that differ where the descriptions do."""
        return _digest([tuple(description) for description in self.descriptions])

    @cached_property
    def digest_without_names(self) -> bytes:
        """Bytes that differ where the descriptions do in more than names: a caller may give them or not."""
        return _digest([tuple(description[1:]) for description in self.descriptions])


def _digest(plain: list[tuple[Any, ...]]) -> bytes:
    # Only digested, never read back; version 2 writes equal values as equal bytes.
    return blake2b(marshal.dumps(plain, 2), digest_size=16).digest()


class Selected(NamedTuple):
    """One tensor of a round.

    Attributes:
        record: What tells it apart.
        tensor: What of it lies on this rank.
        whole: What the caller passed: the same, or the sharded tensor of which that is a part.
        lr: The learning rate of its parameter group; None if it came in none.
        is_aside: It goes along with the parameters, see `Aside`.
    """

    record: Record
    tensor: Tensor
    whole: Tensor
    lr: float | None = None
    is_aside: bool = False


@final
@dataclass(frozen=True)
class Layout:
    """What is computed once and kept while the list of tensors stays the same.

    Attributes:
        records: Place, shape and type of each tensor; any change of these makes a new layout.
        listing: The tensors as the ranks compare them.
        bucket_bytes: Most bytes of a bucket that is not cut.
        sizes: How many elements of its bucket each tensor has.
        kinds: What the buckets of each hold.
        asides: Which of them go along with the parameters.
        plans: The plan for each number of pieces that buckets are cut into, made when it is first needed.
        parts: Layouts of some of the tensors, made when they are first needed.
    """

    records: list[Record]
    listing: Listing
    bucket_bytes: int
    sizes: list[int]
    kinds: list[Kind]
    asides: list[bool]
    plans: dict[int, tuple[Bucket, ...]]
    parts: dict[tuple[int, ...], Layout] = field(default_factory=dict)

    def part(self, positions: tuple[int, ...]) -> Layout:
        """Return the layout of the tensors at these positions."""
        if positions not in self.parts:
            records = [self.records[position] for position in positions]
            descriptions = tuple(self.listing.descriptions[position] for position in positions)
            self.parts[positions] = Layout(
                records,
                Listing(descriptions, sum(prod(record.shape) for record in records)),
                self.bucket_bytes,
                [self.sizes[position] for position in positions],
                [self.kinds[position] for position in positions],
                [self.asides[position] for position in positions],
                {},
            )
        return self.parts[positions]

    def buckets(self, cut: int) -> tuple[Bucket, ...]:
        """Return the plan with buckets that are cut into so many pieces."""
        if cut not in self.plans:
            self.plans[cut] = plan_buckets(self.sizes, self.kinds, bucket_bytes=max(1, self.bucket_bytes // cut))
        return self.plans[cut]

    @cached_property
    def shared_memory(self) -> frozenset[int]:
        """Positions of tensors whose memory overlaps another's, or their own."""
        return overlapping(self.records)


@final
@dataclass(frozen=True)
class Selection:
    """The tensors of one round, and how they travel.

    Attributes:
        tensors: What lies on this rank.
        wholes: What that is of: the same, or the sharded tensor of which it is a part.
        lrs: The learning rate of each one's parameter group; None of those that came in none.
        layout: The plan.
    """

    tensors: Sequence[Tensor]
    wholes: Sequence[Tensor]
    lrs: Sequence[float | None]
    layout: Layout

    def part(self, positions: tuple[int, ...]) -> Selection:
        """Return the tensors at these positions as a selection."""
        return Selection(
            [self.tensors[position] for position in positions],
            [self.wholes[position] for position in positions],
            [self.lrs[position] for position in positions],
            self.layout.part(positions),
        )

    @property
    def sharded(self) -> list[Tensor]:
        """Those of which only a part lies here."""
        return [whole for whole, tensor in zip(self.wholes, self.tensors, strict=True) if whole is not tensor]

    @property
    def listing(self) -> Listing:
        """The tensors as the ranks compare them."""
        return self.layout.listing

    def anchored_lengths(self, *, with_float64: bool) -> list[int | None]:
        """Return how many values an anchor holds of each tensor; None of those that go as they are."""
        layout = self.layout
        return [
            size if (with_float64 or kind.itemsize <= 4) and not kind.is_aside else None
            for size, kind in zip(layout.sizes, layout.kinds, strict=True)
        ]


def select_tensors(params: Iterable[Any], once_trainable: set[int], operations: TensorOperations) -> list[Selected]:
    """Read ``params`` once and return what is averaged, each tensor once.

    Floating and complex tensors are averaged, except a parameter that is not trainable and whose
    position is not in ``once_trainable``. Positions of trainable parameters are added there.

    Raises:
        InvalidTypeError: an item is not a tensor, a ``(name, tensor)`` pair or a parameter group.
        UnsupportedTensorError: a tensor cannot be averaged in place.
    """
    parameter_type: Any = operations.parameter_type
    selected: dict[int | tuple[Any, ...], Selected] = {}
    for position, (name, tensor, origin) in enumerate(named_tensors(params, operations.tensor_type)):
        if type(tensor) is parameter_type or isinstance(tensor, parameter_type):  # the first is faster
            if tensor.requires_grad:
                once_trainable.add(position)
            elif position not in once_trainable:
                continue
        if tensor.is_floating_point() or tensor.is_complex():
            one = _checked(name, tensor, operations, any_dtype=False)
            if origin is not None:
                one = one._replace(lr=_learning_rate(origin), is_aside=isinstance(origin, Aside))
            place: int | tuple[Any, ...] = one.record.address or (position,)
            if place in selected:  # listed twice, or another view of memory that begins here
                place = place if selected[place].record[1:] == one.record[1:] else one.record[1:]
            selected.setdefault(place, one)
    return list(selected.values())


def select_every_tensor(tensors: Iterable[tuple[str, Any]], operations: TensorOperations) -> list[Selected]:
    """Read named tensors of any dtype, to copy them from rank to rank.

    Raises:
        InvalidTypeError: an item is not a ``(name, tensor)`` pair.
        UnsupportedTensorError: a tensor cannot be written in place.
    """
    named = named_tensors(tensors, operations.tensor_type)
    return [_checked(name, tensor, operations, any_dtype=True) for name, tensor, _ in named]


def describe(records: Sequence[Record], operations: TensorOperations) -> Listing:
    """Describe the tensors as the ranks compare them."""
    dtype_name = operations.dtype_name
    devices: dict[Any, str] = {}
    for record in records:
        devices.setdefault(record.device, f"{record.device.type}:{len(devices)}")
    descriptions = tuple(
        TensorDescription(name, tuple(shape), dtype_name(dtype), stride_order(shape, stride), devices[device], shard)
        for name, _, shape, stride, dtype, device, shard in records
    )
    return Listing(descriptions, sum(prod(record.shape) for record in records))


def overlapping(records: Sequence[Record]) -> frozenset[int]:
    """Return the positions of tensors whose span of memory overlaps another's, or that may overlap themselves."""
    spans = sorted((record.address, record.end, position) for position, record in enumerate(records) if record.address)
    positions = {position for position, record in enumerate(records) if record.may_overlap_itself}
    end, last = 0, -1
    for start, stop, position in spans:
        if start < end:
            positions.update((position, last))
        if stop > end:
            end, last = stop, position
    return frozenset(positions)


def in_memory_order(view: Tensor) -> Tensor:
    """Return a view whose last dimension lies closest in memory."""
    return view if view.is_contiguous() else view.permute(_memory_order(view))


def shaped_like(view: Tensor, flat: Tensor) -> Tensor:
    """Return ``flat``, which holds elements in the memory order of ``view``, as a view of the shape of ``view``."""
    dims = range(view.dim()) if view.is_contiguous() else _memory_order(view)
    return flat.view([view.shape[dim] for dim in dims]).permute([list(dims).index(dim) for dim in range(view.dim())])


def _memory_order(view: Tensor) -> tuple[int, ...]:
    unit_dims = [dim for dim, size in enumerate(view.shape) if size == 1]
    return (*unit_dims, *stride_order(tuple(view.shape), view.stride()))


def elements(view: Tensor, start: int, stop: int) -> list[Tensor]:
    """Return views that together hold elements ``start`` to ``stop`` of ``view``, counted row by row."""
    if start == stop:
        return []
    if view.is_contiguous():
        flat = view if view.dim() == 1 else view.view(-1)
        return [flat[start:stop] if stop - start < flat.numel() else flat]
    row_size = view.numel() // view.shape[0]
    first, last = -(-start // row_size), stop // row_size
    if first > last:
        return elements(view[last], start - last * row_size, stop - last * row_size)
    head = elements(view[first - 1], start % row_size, row_size) if start % row_size else []
    body = [view[first:last]] if first < last else []
    tail = elements(view[last], 0, stop % row_size) if stop % row_size else []
    return head + body + tail


def _learning_rate(origin: Any) -> float | None:
    """Return the learning rate of a parameter group; None if there is none."""
    lr = origin.get("lr") if isinstance(origin, Mapping) else None
    try:
        return None if lr is None else float(lr)
    except (TypeError, ValueError, RuntimeError):
        raise InvalidTypeError(
            f"lr of a parameter group in params must be a number, got {lr!r} of type {type(lr).__name__}"
        ) from None


def named_tensors(params: Any, tensor_type: type) -> Iterator[tuple[str, Tensor, Any]]:
    """Yield each tensor in ``params`` with its name, else ``#position``, and the group or `Aside` it came in."""
    if isinstance(params, (tensor_type, str, Mapping)) or not isinstance(params, Iterable):
        raise InvalidTypeError(
            "params must be an iterable of tensors, (name, tensor) pairs or parameter groups, such as "
            f"model.parameters(), got a single {type(params).__name__}"
        )
    position = 0
    for index, item in enumerate(params):
        if isinstance(item, tensor_type):
            yield f"#{position}", item, None
            position += 1
            continue
        origin = item if isinstance(item, Mapping | Aside) else None
        for name, tensor in _named_items(item, index, tensor_type):
            yield name or f"#{position}", tensor, origin
            position += 1


def _named_items(item: Any, index: int, tensor_type: type) -> Iterator[tuple[str | None, Tensor]]:
    if _is_pair(item, tensor_type):
        yield item
    elif isinstance(item, Mapping) and "params" in item:
        members = item["params"]
        if not isinstance(members, Iterable):
            raise _wrong_item(members, f"params[{index}]['params']")
        members = [members] if isinstance(members, tensor_type) else list(members)
        names = item.get("param_names", [None] * len(members))
        if len(names) != len(members):
            raise InvalidValueError(
                f"params[{index}]['param_names'] must name each parameter of the group: it has {len(names)} names, "
                f"and there are {len(members)} parameters"
            )
        for member_index, (name, member) in enumerate(zip(names, members, strict=True)):
            if isinstance(member, tensor_type):
                yield name, member
            elif _is_pair(member, tensor_type):
                yield member
            else:
                raise _wrong_item(member, f"params[{index}]['params'][{member_index}]")
    else:
        raise _wrong_item(item, f"params[{index}]")


def _is_pair(item: Any, tensor_type: type) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], tensor_type)


def _wrong_item(item: Any, where: str) -> InvalidTypeError:
    return InvalidTypeError(
        f"{where} must be a tensor, a (name, tensor) pair or a parameter group with 'params', got {type(item).__name__}"
    )


def _checked(name: str, whole: Tensor, operations: TensorOperations, *, any_dtype: bool) -> Selected:
    """Return what of a tensor lies here, or raise if it cannot be written in place."""
    tensor, shard = whole, ""
    if type(whole) not in operations.ordinary_types and not isinstance(whole, operations.lazy_types):
        tensor, shard = operations.local(whole)
    reason = _refusal_unread(tensor, operations, any_dtype)
    if reason is None:
        record = operations.record(name, tensor, shard)
        if record.address and 0 not in record.stride:
            return Selected(record, tensor, whole)
        reason = _refusal_of_memory(record)
        if reason is None:
            return Selected(record, tensor, whole)
    try:
        shape = str(tuple(tensor.shape))
    except RuntimeError:  # it has none
        shape = "unknown"
    raise UnsupportedTensorError(f"tensor {name} of shape {shape} cannot be averaged: {reason}")


def _refusal_unread(tensor: Tensor, operations: TensorOperations, any_dtype: bool) -> str | None:
    """Return why ``tensor`` cannot be written in place by what it is; None if it can."""
    if isinstance(tensor, operations.lazy_types):
        return "it is not initialized yet; run one forward pass of the lazy module first"
    reason = operations.refusal(tensor)
    if reason is not None:
        return reason
    if tensor.layout != operations.strided:
        return f"its layout is {tensor.layout}; only dense tensors can be"
    if not any_dtype and tensor.dtype not in operations.averaged_dtypes:
        return f"its dtype is {tensor.dtype}; keep a copy in float32, bfloat16 or float16 and average that"
    if tensor.is_inference():
        return "it was made in inference_mode(), and writing to it would break training after it"
    return None


def _refusal_of_memory(record: Record) -> str | None:
    """Return why a tensor cannot be written in place by where its elements lie; None if it can."""
    if record.is_freed:
        return "its memory is freed at the moment, as sharding does between steps"
    if record.repeats_elements:
        return "several of its elements share memory, as expand() makes them; pass the tensor it came from"
    return None
