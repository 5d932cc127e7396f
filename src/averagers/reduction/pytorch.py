"""PyTorch as averagers sees it: its process groups, and the operations on its tensors."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import lru_cache
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import Parameter, UninitializedBuffer, UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from averagers.reduction.framework import Framework
from averagers.reduction.interface import (
    GroupFactory,
    Lane,
    Marks,
    Record,
    TensorOperations,
    Work,
    wait_on_this_thread,
)
from averagers.reduction.layout import Kind


@final
class _Work(Work):
    """A collective of `torch.distributed` under way."""

    def __init__(self, work: dist.Work | None, device_type: str) -> None:
        assert work is not None
        self._work = work
        self._device_type = device_type

    def wait(self, when_late: Callable[[], None] | None = None) -> None:
        """On the CPU return when it has ended; on CUDA only the current stream waits."""
        if self._device_type == "cpu":
            wait_on_this_thread(self, when_late)
        else:
            self._work.wait()  # pragma: only cuda

    def _ends_within_slice(self, seconds: float) -> bool:
        if self._device_type != "cpu":  # pragma: only cuda
            # NCCL's wait takes a timeout as a reason to abort the communicator: ask instead.
            deadline = time.monotonic() + seconds  # pragma: only cuda
            while not self._work.is_completed():  # pragma: only cuda
                if time.monotonic() > deadline:  # pragma: only cuda
                    return False  # pragma: only cuda
                time.sleep(2e-5)  # pragma: only cuda
            return bool(self._work.wait())  # pragma: only cuda
        try:
            # In whole milliseconds, of which 0 would mean for ever.
            return bool(self._work.wait(timedelta(milliseconds=math.ceil(1e3 * seconds))))
        except RuntimeError:
            # This slice is over, or the collective failed. Where it has ended by now, this tells how.
            return self._work.is_completed() and bool(self._work.wait())


@final
class _Lane(Lane):
    """A process group of `torch.distributed`."""

    def __init__(self, handle: dist.ProcessGroup) -> None:
        self.handle = handle
        self.size = handle.size()
        self.rank = handle.rank()
        # The backend's name for each type of device, such as {"cpu": "gloo", "cuda": "nccl"}.
        backends = dict(pair.split(":") for pair in dist.get_backend_config(handle).split(","))
        self.device_types = frozenset(backends)
        # gloo runs about two operations of a process group at a time. Other backends run them one after
        # the other on a stream of their own, and would only gain communicators.
        self.parallel_device_types = frozenset(device for device, backend in backends.items() if backend == "gloo")
        self._message_device = _message_device(self.device_types)

    def all_reduce(self, values: Tensor) -> Work:
        return _Work(dist.all_reduce(values, group=self.handle, async_op=True), values.device.type)

    def all_to_all(self, received: Tensor, values: Tensor) -> Work:
        return _Work(dist.all_to_all_single(received, values, group=self.handle, async_op=True), values.device.type)

    def all_gather(self, gathered: Tensor, values: Tensor) -> Work:
        return _Work(dist.all_gather_single(gathered, values, group=self.handle, async_op=True), values.device.type)

    def broadcast(self, values: Tensor) -> Work:
        return _Work(dist.broadcast(values, group=self.handle, group_src=0, async_op=True), values.device.type)

    def gather_bytes(self, payload: bytes) -> tuple[Work, Callable[[], list[bytes]]]:
        device = self._message_device
        own = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device)
        gathered = torch.empty(self.size * len(payload), dtype=torch.uint8, device=device)
        if device.type in self.parallel_device_types:
            # One hop, where gloo's rings take as many as there are ranks.
            work = self.all_to_all(gathered, own.repeat(self.size))
        else:
            work = self.all_gather(gathered, own)
        return work, lambda: [bytes(row) for row in gathered.view(self.size, -1).tolist()]


def _message_device(device_types: frozenset[str]) -> torch.device:
    """Return where a small message must lie: on the CPU where the backend serves it."""
    if "cpu" in device_types:
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()  # pragma: only cuda
    assert accelerator is not None  # pragma: only cuda
    return torch.device(accelerator.type, torch.accelerator.current_device_index())  # pragma: only cuda


@final
class _StoreMarks(Marks):
    """Marks in the job's store."""

    def __init__(self) -> None:
        self._store = c10d.PrefixStore("averagers", c10d._get_default_store())

    def leave(self, mark: str) -> None:
        self._store.set(mark, "left")

    def is_left(self, mark: str) -> bool:
        return bool(self._store.check([mark]))


@final
class _GroupFactory(GroupFactory):
    """Makes process groups of `torch.distributed`.

    `torch.distributed.new_group` must be called by every rank of the world, or, with
    ``use_local_synchronization=True``, names a group by a count of this process. To make one under a name of
    ours takes one private call of torch, which this file keeps to itself.
    """

    group_type = dist.ProcessGroup
    group_type_name = "torch.distributed.ProcessGroup, a DeviceMesh of one axis"
    non_member = dist.GroupMember.NON_GROUP_MEMBER
    how_to_start = (
        "start the script with torchrun and call torch.distributed.init_process_group() before building an averager"
    )

    def group_of_mesh(self, mesh: Any) -> Any:
        return mesh.get_group() if isinstance(mesh, DeviceMesh) and mesh.ndim == 1 else mesh

    def world(self) -> Any:
        return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None

    def ranks(self, process_group: Any) -> tuple[int, ...]:
        return tuple(dist.get_process_group_ranks(process_group))

    def own_rank(self) -> int:
        return dist.get_rank()

    def backend(self, process_group: Any) -> str:
        # As it was spelled when the parent was made: torch takes the spelled out name for another kind.
        return str(dist.get_backend(process_group))

    def timeout_s(self, process_group: Any) -> float:
        for device in process_group._device_types:
            options = getattr(process_group._get_backend(device), "options", None)
            timeout = getattr(options, "_timeout", None)
            if timeout is not None:
                return float(timeout.total_seconds())
        return float(dist.constants.default_pg_timeout.total_seconds())

    def name(self, process_group: Any) -> str:
        return str(process_group.group_name)

    def is_alive(self, process_group: Any) -> bool:
        return process_group in c10d._world.pg_map

    def lane(self, process_group: Any) -> Lane:
        return _Lane(process_group)

    def new_lane(self, parent: Any, ranks: tuple[int, ...], *, timeout_s: float, name: str) -> Lane:
        world = dist.group.WORLD
        assert world is not None
        # With a device bound to the world, torch would split the new communicator off the world's, and
        # that is a collective of the whole world: hide the binding while the members make theirs.
        bound_device, world.bound_device_id = world.bound_device_id, None
        try:
            handle: dist.ProcessGroup
            handle, _ = c10d._new_process_group_helper(
                len(ranks),
                ranks.index(dist.get_rank()),
                list(ranks),
                dist.Backend(dist.get_backend(parent)),
                c10d._get_default_store(),
                c10d.GroupName(name),
                timeout=timedelta(seconds=timeout_s),
                group_desc="averagers",
            )
        finally:
            world.bound_device_id = bound_device
        c10d._world.pg_group_ranks[handle] = {rank: index for index, rank in enumerate(ranks)}
        return _Lane(handle)

    def destroy(self, lane: Lane) -> None:
        dist.destroy_process_group(lane.handle)

    def marks(self) -> Marks:
        return _StoreMarks()


@final
class _TensorOperations(TensorOperations):
    """Operations on torch's tensors."""

    tensor_type = Tensor
    ordinary_types = frozenset({Tensor, Parameter})
    parameter_type = Parameter
    lazy_types = (UninitializedParameter, UninitializedBuffer)
    strided = torch.strided
    sixteen_bit = frozenset({torch.bfloat16, torch.float16})
    averaged_dtypes = sixteen_bit | {
        torch.float64,
        torch.float32,
        torch.complex128,
        torch.complex64,
        torch.complex32,
    }
    float32 = torch.float32
    int8 = torch.int8
    uint8 = torch.uint8
    int64 = torch.int64

    def local(self, tensor: Tensor) -> tuple[Tensor, str]:
        if not is_traceable_wrapper_subclass(tensor):
            return tensor, ""
        from torch.distributed.tensor import DTensor

        if not isinstance(tensor, DTensor) or any(placement.is_partial() for placement in tensor.placements):
            return tensor, ""
        return tensor.detach().to_local(), _shard_name(tensor)

    def record(self, name: str, tensor: Tensor, shard: str) -> Record:
        return Record(name, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, shard)

    def refusal(self, tensor: Tensor) -> str | None:
        if type(tensor) not in self.ordinary_types and is_traceable_wrapper_subclass(tensor):
            return f"it is a {type(tensor).__name__}; average the plain tensors it is made of"
        if tensor.is_nested:
            return "its layout is nested; only dense tensors can be"
        if tensor.is_meta:
            return "it is on the meta device and has no values"
        return None

    def dtype_name(self, dtype: torch.dtype) -> str:
        return _dtype_name(dtype)

    def kind(self, device: torch.device, dtype: torch.dtype) -> Kind:
        return _kind(device, dtype)

    def reals(self, tensor: Tensor) -> Tensor:
        view = tensor.detach()
        # The mean of conjugates is the conjugate of the mean, and so for negatives: average what lies in memory.
        if view.is_complex():
            view = torch.view_as_real(view.conj() if view.is_conj() else view)
        return torch._neg_view(view) if view.is_neg() else view

    @contextmanager
    def plain_memory(self) -> Iterator[None]:
        with torch.inference_mode(False), torch.no_grad():
            yield

    def beside(self, devices: Collection[torch.device]) -> AbstractContextManager[None]:
        queued = {
            device: torch.cuda.current_stream(device).record_event() for device in devices if device.type == "cuda"
        }
        return _on_streams_beside(queued) if queued else nullcontext()

    def new_bytes(self, num_bytes: int, device: torch.device) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def copy_(self, destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        torch._foreach_copy_(list(destinations), list(sources))

    def add_(self, destinations: Sequence[Tensor], sources: Sequence[Tensor], *, alpha: float) -> None:
        torch._foreach_add_(list(destinations), list(sources), alpha=alpha)

    def concatenated(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(tensors), dim=-1)

    def mark_written(self, tensors: Sequence[Tensor]) -> None:
        torch.autograd.graph.increment_version(tensors)

    def squared_distance(self, values: Tensor, means: Tensor) -> Tensor:
        wide = torch.promote_types(values.dtype, torch.float32)
        distance: Tensor = torch.linalg.vector_norm(values.to(wide) - means, dtype=torch.float64)
        return distance.square()


@contextmanager
def _on_streams_beside(queued: Mapping[torch.device, torch.cuda.Event]) -> Iterator[None]:
    with ExitStack() as stack:
        for device, event in queued.items():
            stack.enter_context(torch.cuda.stream(_stream_beside(device)))
            _stream_beside(device).wait_event(event)
        yield
        for device in queued:
            _stream_beside(device).synchronize()


@lru_cache(maxsize=64)
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    """Return one stream for all rounds: torch keeps memory apart for each."""
    return torch.cuda.Stream(device)


def _shard_name(tensor: Any) -> str:
    """Return which shard of a ``DTensor`` this rank has, such as ``0 of 2 along dim 0 (mesh axis 'shard')``."""
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or range(mesh.ndim)
    return ", ".join(
        f"{place} of {mesh.size(axis)} along dim {placement.dim} (mesh axis {name!r})"
        for axis, (name, place, placement) in enumerate(
            zip(names, mesh.get_coordinate(), tensor.placements, strict=True)
        )
        if not placement.is_replicate()
    )


@lru_cache(maxsize=256)
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@lru_cache(maxsize=256)
def _kind(device: torch.device, dtype: torch.dtype) -> Kind:
    real = dtype.to_real() if dtype.is_complex else dtype
    return Kind(device, real, real.itemsize)


PYTORCH = Framework(_GroupFactory(), _TensorOperations())
