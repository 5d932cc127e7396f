"""What is averaged: reads the caller's ``params`` once, checks every tensor, and describes the list."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import Parameter, is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from averagers.errors import InvalidTypeError, UnsupportedTensorError
from averagers.reduction.interface import Listing, TensorDescription

_ORDINARY_TYPES = frozenset({Tensor, Parameter})

_SUPPORTED_DTYPES = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.complex128,
        torch.complex64,
        torch.complex32,
    }
)


class Record(NamedTuple):
    """What there is to know of a tensor without reading it; equal records mean the same memory."""

    name: str
    address: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def order(self) -> tuple[int, ...]:
        """The dimensions from the largest stride to the smallest, without those of size 1."""
        return _stride_order(self.shape, self.stride)

    @property
    def end(self) -> int:
        """The address behind the last element."""
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return self.address + (last + 1) * self.dtype.itemsize

    @property
    def may_overlap_itself(self) -> bool:
        """Whether two elements may lie at one address, as in a sliding window."""
        reach = 0
        for dim in reversed(self.order):
            if self.stride[dim] <= reach:
                return True
            reach += (self.shape[dim] - 1) * self.stride[dim]
        return False


def select_tensors(params: Iterable[Any], once_trainable: set[int]) -> list[tuple[Record, Tensor]]:
    """Read ``params`` once and return what is averaged, each tensor once, with what tells it apart.

    Floating and complex tensors are averaged, except a `torch.nn.Parameter` that is not trainable and
    whose position is not in ``once_trainable``. Positions of trainable parameters are added there.

    Raises:
        InvalidTypeError: an item is not a tensor, a ``(name, tensor)`` pair or a parameter group.
        UnsupportedTensorError: a tensor cannot be averaged in place.
    """
    selected: dict[int | tuple[Any, ...], tuple[Record, Tensor]] = {}
    for position, (name, tensor) in enumerate(_named_tensors(params)):
        if type(tensor) is Parameter or isinstance(tensor, Parameter):  # the first is faster
            if tensor.requires_grad:
                once_trainable.add(position)
            elif position not in once_trainable:
                continue
        if tensor.is_floating_point() or tensor.is_complex():
            record = _checked_record(name, tensor, _SUPPORTED_DTYPES)
            place: int | tuple[Any, ...] = record.address or (position,)
            if place in selected:  # listed twice, or another view of memory that begins here
                place = place if selected[place][0][1:] == record[1:] else record[1:]
            selected.setdefault(place, (record, tensor))
    return list(selected.values())


def select_every_tensor(tensors: Iterable[tuple[str, Any]]) -> list[tuple[Record, Tensor]]:
    """Read named tensors of any dtype, to copy them from rank to rank.

    Raises:
        InvalidTypeError: an item is not a ``(name, tensor)`` pair.
        UnsupportedTensorError: a tensor cannot be written in place.
    """
    return [(_checked_record(name, tensor, {tensor.dtype}), tensor) for name, tensor in _named_tensors(tensors)]


def describe(records: Sequence[Record]) -> Listing:
    """Describe the tensors as the ranks compare them."""
    devices: dict[torch.device, str] = {}
    for record in records:
        devices.setdefault(record.device, f"{record.device.type}:{len(devices)}")
    descriptions = tuple(
        TensorDescription(name, tuple(shape), _dtype_name(dtype), _stride_order(shape, stride), devices[device])
        for name, _, shape, stride, dtype, device in records
    )
    return Listing(descriptions, sum(record.shape.numel() for record in records))


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


@lru_cache(maxsize=256)
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@lru_cache(maxsize=4096)
def _stride_order(shape: torch.Size, stride: tuple[int, ...]) -> tuple[int, ...]:
    dims = [dim for dim, size in enumerate(shape) if size != 1]
    return tuple(sorted(dims, key=lambda dim: -stride[dim]))


def in_memory_order(tensor: Tensor) -> Tensor:
    """Return a view of reals, outside autograd's graph, whose last dimension lies closest in memory.

    Writing through it bumps the tensor's own version counter, so that autograd notices a round
    between forward and backward.
    """
    view = tensor.detach()
    # The mean of conjugates is the conjugate of the mean, and so for negatives: average what lies in memory.
    if view.is_complex():
        view = torch.view_as_real(view.conj() if view.is_conj() else view)
    if view.is_neg():
        view = torch._neg_view(view)
    if view.is_contiguous():
        return view
    unit_dims = [dim for dim, size in enumerate(view.shape) if size == 1]
    return view.permute((*unit_dims, *_stride_order(view.shape, view.stride())))


def elements(view: Tensor, start: int, stop: int) -> list[Tensor]:
    """Return views that together hold elements ``start`` to ``stop`` of ``view``, counted row by row."""
    if start == stop:
        return []
    if view.is_contiguous():
        return [view.view(-1)[start:stop]]
    row_size = view.numel() // view.shape[0]
    first, last = -(-start // row_size), stop // row_size
    if first > last:
        return elements(view[last], start - last * row_size, stop - last * row_size)
    head = elements(view[first - 1], start % row_size, row_size) if start % row_size else []
    body = [view[first:last]] if first < last else []
    tail = elements(view[last], 0, stop % row_size) if stop % row_size else []
    return head + body + tail


def _named_tensors(params: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield ``(name, tensor)`` of everything in ``params``; a tensor without a name is ``#position``."""
    if isinstance(params, Tensor | str | Mapping) or not isinstance(params, Iterable):
        raise InvalidTypeError(
            "params must be an iterable of tensors, (name, tensor) pairs or parameter groups, such as "
            f"model.parameters(), got a single {type(params).__name__}"
        )
    position = 0
    for index, item in enumerate(params):
        if isinstance(item, Tensor):
            yield f"#{position}", item
            position += 1
            continue
        for name, tensor in _named_items(item, index):
            yield name or f"#{position}", tensor
            position += 1


def _named_items(item: Any, index: int) -> Iterator[tuple[str | None, Tensor]]:
    if _is_pair(item):
        yield item
    elif isinstance(item, Mapping) and "params" in item:
        members = item["params"]
        members = [members] if isinstance(members, Tensor) else list(members)
        names = item.get("param_names", [None] * len(members))
        for member_index, (name, member) in enumerate(zip(names, members, strict=True)):
            if isinstance(member, Tensor):
                yield name, member
            elif _is_pair(member):
                yield member
            else:
                raise _wrong_item(member, f"params[{index}]['params'][{member_index}]")
    else:
        raise _wrong_item(item, f"params[{index}]")


def _is_pair(item: Any) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], Tensor)


def _wrong_item(item: Any, where: str) -> InvalidTypeError:
    return InvalidTypeError(
        f"{where} must be a tensor, a (name, tensor) pair or a parameter group with 'params', got {type(item).__name__}"
    )


def _checked_record(name: str, tensor: Tensor, dtypes: Container[torch.dtype]) -> Record:
    """Return the record of ``tensor``, or raise if it cannot be written in place."""
    if _is_ordinary(tensor, dtypes):
        record = Record(name, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if record.address and 0 not in record.stride:
            return record
    reason = _unsupported(tensor, dtypes)
    if reason:
        shape = "unknown" if is_lazy(tensor) or tensor.is_nested else str(tuple(tensor.shape))
        raise UnsupportedTensorError(f"tensor {name} of shape {shape} cannot be averaged: {reason}")
    return Record(name, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def _is_ordinary(tensor: Tensor, dtypes: Container[torch.dtype]) -> bool:
    """Tell quickly of nearly all tensors that there is nothing special about their kind."""
    return (
        type(tensor) in _ORDINARY_TYPES
        and tensor.layout is torch.strided
        and tensor.dtype in dtypes
        and not tensor.is_nested
        and not tensor.is_inference()
    )


def _unsupported(tensor: Tensor, dtypes: Container[torch.dtype]) -> str | None:
    """Return why ``tensor`` cannot be written in place, or None if it can."""
    if is_lazy(tensor):
        return "it is not initialized yet; run one forward pass of the lazy module first"
    if is_traceable_wrapper_subclass(tensor):
        return f"it is a {type(tensor).__name__}; average the plain tensors it is made of"
    if tensor.layout is not torch.strided or tensor.is_nested:
        return f"its layout is {'nested' if tensor.is_nested else tensor.layout}; only dense tensors can be"
    if tensor.dtype not in dtypes:
        return f"its dtype is {tensor.dtype}; keep a copy in float32, bfloat16 or float16 and average that"
    if tensor.is_meta:
        return "it is on the meta device and has no values"
    if tensor.is_inference():
        return "it was made in torch.inference_mode(), and writing to it would break training after it"
    if tensor.data_ptr() == 0 and tensor.numel():
        return "its memory is freed at the moment, as sharding does between steps"
    if 0 in tensor.stride() and _shares_elements(tensor):
        return "several of its elements share memory, as expand() makes them; pass the tensor it came from"
    return None


def _shares_elements(tensor: Tensor) -> bool:
    repeats = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return repeats and tensor.numel() > 0
