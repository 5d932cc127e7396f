"""averagers for TensorPlay: the same three classes on its tensors and process groups.

Start with ``tensorplay.distributed.init_process_group("gloo")``. What this package has beside the classes
(errors, events, sinks) is the same as in `averagers`, and can be had from here too.
A piece that TensorPlay lacks is named in the `MissingDependencyError` of this import.

Example:
    >>> import averagers.tensorplay as averagers
    >>> averager = averagers.PeriodicModelAverager(period=4, warmup_steps=100)
    >>> averager.average_parameters(model.parameters())  # after each optimizer.step()
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import lru_cache
from typing import Any, NoReturn, final

from averagers import averager, base
from averagers.errors import (
    AveragersError,
    ClosedError,
    DisagreementError,
    InvalidTypeError,
    InvalidValueError,
    MissingDependencyError,
    NotInitializedError,
    RoundFailedError,
    StateDictError,
    UnsupportedTensorError,
)
from averagers.events import Event, Observer, RoundFailed, RoundFinished, RoundStarted
from averagers.mixing.mixers import Assign, Elastic, Mixer, Nesterov, Outer, SlowMo
from averagers.mixing.overlap import Delayed, Overlap
from averagers.observe.console import Console
from averagers.observe.jsonl import JsonLines
from averagers.pace import Adaptive, EverySeconds
from averagers.reduction.codecs import Cast, Codec, Int4, Int8, TopK
from averagers.reduction.framework import Framework
from averagers.reduction.interface import (
    GroupFactory,
    Lane,
    Marks,
    Record,
    Tensor,
    TensorOperations,
    Work,
    wait_on_this_thread,
)
from averagers.reduction.layout import Kind
from averagers.reduction.rules import CenteredClipping, Median, Rule, TrimmedMean
from averagers.schedule import (
    Every,
    Growing,
    QuadraticRule,
    Schedule,
    Shrinking,
    equivalent_period,
)

try:
    import tensorplay as tp
    import tensorplay.distributed as dist
    import tensorplay.distributed.distributed_core as core
    from tensorplay.nn.parameter import Parameter, UninitializedBuffer, UninitializedParameter
except ImportError as error:
    raise MissingDependencyError(
        f"TensorPlay cannot be imported ({error}): pip install 'averagers[tensorplay]'"
    ) from error

__all__ = [
    "HierarchicalModelAverager",
    "ModelAverager",
    "PeriodicModelAverager",
    "average_parameters",
    "AveragersError",
    "ClosedError",
    "DisagreementError",
    "InvalidTypeError",
    "InvalidValueError",
    "MissingDependencyError",
    "NotInitializedError",
    "RoundFailedError",
    "StateDictError",
    "UnsupportedTensorError",
    "Event",
    "Observer",
    "RoundFailed",
    "RoundFinished",
    "RoundStarted",
    "Console",
    "JsonLines",
    "Cast",
    "CenteredClipping",
    "Codec",
    "Int4",
    "Int8",
    "Median",
    "Rule",
    "TopK",
    "TrimmedMean",
    "Assign",
    "Elastic",
    "Mixer",
    "Nesterov",
    "Outer",
    "SlowMo",
    "Delayed",
    "Overlap",
    "Adaptive",
    "Every",
    "EverySeconds",
    "Growing",
    "QuadraticRule",
    "Schedule",
    "Shrinking",
    "equivalent_period",
]


_STORE_PATIENCE_S = 3.0

_PIECES = {
    dist: (
        "GroupMember",
        "PrefixStore",
        "ProcessGroup",
        "TCPStore",
        "all_gather_single",
        "all_reduce",
        "all_to_all_single",
        "broadcast",
    ),
    core: ("_current_store", "_ensure_comm", "_groups"),
}

# By name: tensorplay.distributed.is_available() tells of NCCL alone.
for _module, _names in _PIECES.items():
    for _name in _names:
        if not hasattr(_module, _name):
            raise MissingDependencyError(
                f"averaging needs {_module.__name__}.{_name}, which TensorPlay {tp.__version__} lacks here: "
                "pip install 'tensorplay==1.0.0' is known to have it"
            )


@final
class _Work(Work):
    """A collective of `tensorplay.distributed` under way."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, when_late: Callable[[], None] | None = None) -> None:
        wait_on_this_thread(self, when_late)

    def _ends_within_slice(self, seconds: float) -> bool:
        # In whole milliseconds, of which 0 would only ask.
        return bool(self._work.wait(timedelta(milliseconds=math.ceil(1e3 * seconds))))


@final
class _Lane(Lane):
    """A process group of `tensorplay.distributed`."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.size = handle.size()
        self.rank = handle.rank()
        backend = dist.get_backend(handle)
        self.device_types = frozenset({"cuda" if backend == "nccl" else "cpu"})
        # gloo runs two operations of a process group at a time.
        self.parallel_device_types = self.device_types if backend == "gloo" else frozenset()
        self._message_device = "cpu" if backend != "nccl" else f"cuda:{tp.cuda.current_device()}"

    def all_reduce(self, values: Tensor) -> Work:
        return _Work(dist.all_reduce(values, group=self.handle, async_op=True))

    # As bytes, because the backend need not know the dtype.

    def all_to_all(self, received: Tensor, values: Tensor) -> Work:
        return _Work(
            dist.all_to_all_single(received.view(tp.uint8), values.view(tp.uint8), group=self.handle, async_op=True)
        )

    def all_gather(self, gathered: Tensor, values: Tensor) -> Work:
        return _Work(
            dist.all_gather_single(gathered.view(tp.uint8), values.view(tp.uint8), group=self.handle, async_op=True)
        )

    def broadcast(self, values: Tensor) -> Work:
        return _Work(dist.broadcast(values, group=self.handle, group_src=0, async_op=True))

    def gather_bytes(self, payload: bytes) -> tuple[Work, Callable[[], list[bytes]]]:
        with tp.inference_mode(False):
            # Not frombuffer: freeing its memory takes the interpreter's lock, for which gloo's threads must not wait.
            copies = tp.tensor(list(payload) * self.size, dtype=tp.uint8, device=self._message_device)
            gathered = tp.empty(len(copies), dtype=tp.uint8, device=self._message_device)
        # One hop, where gloo's rings take as many as there are ranks.
        work = self.all_to_all(gathered, copies)
        return work, lambda: [bytes(row) for row in gathered.view(self.size, len(payload)).tolist()]


@final
class _StoreMarks(Marks):
    """Marks in the job's store."""

    def __init__(self) -> None:
        self._store = _own_store()

    def leave(self, mark: str) -> None:
        self._store.set(mark, "left")

    def is_left(self, mark: str) -> bool:
        return bool(self._store.has(mark))

    def meet(self, place: str, num_ranks: int, *, timeout_s: float) -> None:
        """Return when so many ranks have called this for ``place``; a rank that is not there is a `RuntimeError`."""
        deadline = time.monotonic() + timeout_s
        if self._store.add(f"{place}/arrived", 1) == num_ranks:
            self.leave(f"{place}/complete")
        pause_s = 1e-4
        while not self.is_left(f"{place}/complete"):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the other ranks did not come within {timeout_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)


def _own_store() -> Any:
    """Return the job's store under a prefix of ours.

    Where the process that serves it is gone, TensorPlay's client tries to reach it for as long as the job's
    timeout, and Ctrl-C is not heard meanwhile: take another client, with less patience.
    """
    store = core._current_store()
    if isinstance(store, dist.TCPStore):
        store = _impatient_client(store.host, store.port)
    return dist.PrefixStore("averagers", store)


@lru_cache(maxsize=1)
def _impatient_client(host: str, port: int) -> Any:
    return dist.TCPStore(host, port, is_master=False, timeout=_STORE_PATIENCE_S)


@final
class _GroupFactory(GroupFactory):
    """Makes process groups of `tensorplay.distributed`.

    `tensorplay.distributed.new_group` names a group by a count of this process. To make one under a name of ours
    takes what ``new_group`` itself does after counting, which is private to TensorPlay, and is kept to this class.
    """

    group_type = dist.ProcessGroup
    group_type_name = "tensorplay.distributed.ProcessGroup"
    non_member = dist.GroupMember.NON_GROUP_MEMBER
    how_to_start = (
        "start the script with `python -m tensorplay.distributed.run` and call "
        'tensorplay.distributed.init_process_group("gloo") before building an averager'
    )

    def group_of_mesh(self, mesh: Any) -> Any:
        return mesh

    def world(self) -> Any:
        return dist.GroupMember.WORLD

    def ranks(self, process_group: Any) -> tuple[int, ...]:
        return tuple(dist.get_process_group_ranks(process_group))

    def own_rank(self) -> int:
        return int(dist.get_rank())

    def backend(self, process_group: Any) -> str:
        return str(dist.get_backend(process_group))

    def timeout_s(self, process_group: Any) -> float:
        return float(process_group._timeout_s)

    def name(self, process_group: Any) -> str:
        return str(process_group.group_name)

    def is_alive(self, process_group: Any) -> bool:
        is_world = process_group is dist.GroupMember.WORLD
        return is_world or core._groups.get(process_group.group_name) is process_group

    def lane(self, process_group: Any) -> Lane:
        return _Lane(process_group)

    def new_lane(self, parent: Any, ranks: tuple[int, ...], *, timeout_s: float, name: str) -> Lane:
        handle = dist.ProcessGroup(list(ranks), group_name=name, backend=dist.get_backend(parent))
        handle._backend_config = dist.get_backend_config(parent)
        handle._timeout_s = timeout_s
        # TensorPlay waits half an hour for members that never come, and then crashes.
        _StoreMarks().meet(name, len(ranks), timeout_s=timeout_s)
        core._ensure_comm(handle, timeout_s)
        core._groups[name] = handle
        return _Lane(handle)

    def destroy(self, lane: Lane) -> None:
        dist.destroy_process_group(lane.handle)

    def marks(self) -> Marks:
        return _StoreMarks()


@final
class _TensorOperations(TensorOperations):
    """Operations on TensorPlay's tensors."""

    tensor_type = tp.Tensor
    ordinary_types = frozenset({tp.Tensor, Parameter})
    parameter_type = Parameter
    lazy_types = (UninitializedParameter, UninitializedBuffer)
    strided = tp.strided
    sixteen_bit = frozenset({tp.bfloat16, tp.float16})
    averaged_dtypes = sixteen_bit | {tp.float64, tp.float32, tp.complex128, tp.complex64, tp.complex32}
    float32 = tp.float32
    int8 = tp.int8
    uint8 = tp.uint8
    int64 = tp.int64

    def local(self, tensor: Tensor) -> tuple[Tensor, str]:
        return tensor, ""

    def record(self, name: str, tensor: Tensor, shard: str) -> Record:
        # Tensors without elements have an address too, the same for all.
        address = tensor.data_ptr() if tensor.numel() else 0
        return Record(name, address, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, shard)

    def refusal(self, tensor: Tensor) -> str | None:
        # TensorPlay's layouts are numbers without a name.
        return None if tensor.layout == tp.strided else "it is sparse; only dense tensors can be"

    def dtype_name(self, dtype: Any) -> str:
        return str(dtype).removeprefix("tensorplay.")

    def kind(self, device: Any, dtype: Any) -> Kind:
        return _kind(device, dtype)

    def reals(self, tensor: Tensor) -> Tensor:
        view = tensor.detach()
        return tp.view_as_real(view) if view.is_complex() else view

    @contextmanager
    def plain_memory(self) -> Iterator[None]:
        with tp.inference_mode(False), tp.no_grad():
            yield

    def beside(self, devices: Collection[Any]) -> AbstractContextManager[None]:
        return nullcontext()

    def new_bytes(self, num_bytes: int, device: Any) -> Tensor:
        return tp.empty(num_bytes, dtype=tp.uint8, device=device)

    def copy_(self, destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        tp._foreach_copy_(destinations, sources)

    def add_(self, destinations: Sequence[Tensor], sources: Sequence[Tensor], *, alpha: float) -> None:
        tp._foreach_add_(destinations, sources, alpha=alpha)

    def concatenated(self, tensors: Sequence[Tensor]) -> Tensor:
        return tp.cat(list(tensors), dim=-1)

    def mark_written(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            tensor.view(-1)[:0].zero_()

    def squared_distance(self, values: Tensor, means: Tensor) -> Tensor:
        wide = tp.promote_types(values.dtype, tp.float32)
        return (values.to(wide) - means).to(tp.float64).square().sum()


@lru_cache(maxsize=256)
def _kind(device: Any, dtype: Any) -> Kind:
    reals = {tp.complex128: tp.float64, tp.complex64: tp.float32, tp.complex32: tp.float16}
    real = reals.get(dtype, dtype)
    return Kind(device, real, real.itemsize)


_FRAMEWORK = Framework(_GroupFactory(), _TensorOperations())


class ModelAverager(base.ModelAverager):
    """Base class of all model averagers for TensorPlay; subclass it to write one of your own.

    Args:
        process_group: The ranks that average; None means all of them.

    Attributes:
        process_group: The process group given, or the default one.

    Raises:
        NotInitializedError: ``tensorplay.distributed.init_process_group`` was not called.
        InvalidTypeError: ``process_group`` is not a process group of TensorPlay.
    """

    @classmethod
    def _default_framework(cls) -> Framework:
        return _FRAMEWORK


class PeriodicModelAverager(averager.PeriodicModelAverager, ModelAverager):
    """Averages parameters among all ranks, every ``period`` steps after the warm-up.

    `averagers.PeriodicModelAverager` for TensorPlay: the same arguments, rules and errors.

    Example:
        >>> averager = averagers.PeriodicModelAverager(period=4, warmup_steps=100)
        >>> averager.average_parameters(model.parameters())  # after each optimizer.step()
    """


class HierarchicalModelAverager(averager.HierarchicalModelAverager, ModelAverager):
    """Averages parameters in small groups often and in large groups seldom.

    `averagers.HierarchicalModelAverager` for TensorPlay: the same arguments, rules and errors.

    Example:
        Every 4 steps among 2 neighbors, every 32 steps among all 4 ranks:

        >>> averager = averagers.HierarchicalModelAverager({4: 2, 32: 4}, warmup_steps=100)
        >>> averager.average_parameters(model.parameters())  # after each optimizer.step()
    """

    @classmethod
    def from_mesh(cls, *arguments: Any, **options: Any) -> NoReturn:
        """Refuse: it is for torch's device meshes."""
        raise InvalidTypeError(
            "from_mesh takes a DeviceMesh of torch: on TensorPlay give the levels' sizes and a process_group"
        )


@final
class _SingleRounds(averager.SingleRounds, ModelAverager):
    """One round at each call, without a count."""


def average_parameters(params: Iterable[Any], process_group: Any = None) -> None:
    """Average ``params`` in place now, once, without schedule or state: `averagers.average_parameters` for TensorPlay.

    Args:
        params: ``model.parameters()``, ``model.named_parameters()``, ``optimizer.param_groups`` or any
            iterable of tensors. Floating and complex tensors are averaged, except frozen parameters.
        process_group: The ranks that average; None means all of them.

    Raises:
        InvalidTypeError, UnsupportedTensorError: ``params`` cannot be averaged; nothing was sent.
        DisagreementError: the ranks passed different tensors; nothing was averaged.
        RoundFailedError: a rank died, or did not come within the process group's timeout.
    """
    _SingleRounds.of(process_group).average_parameters(params)


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(f"module 'averagers.tensorplay' has no attribute {name!r}{_instead(name)}")


def _instead(name: str) -> str:
    """Return what to do without a name that `averagers` has and TensorPlay does not allow."""
    if name in ("attach", "Attachment", "ModelAveragingOptimizer", "PostLocalSGDOptimizer"):
        return (
            ": it works on torch's optimizers; call averager.average_parameters(model.parameters()) after each "
            "optimizer.step(), or wrap the optimizer in tensorplay.distributed.optim.PostLocalSGDOptimizer"
        )
    if name == "DistributedState":
        return ": it is for torch.distributed.checkpoint; save the averager's state_dict() on each rank"
    if name in ("PostLocalSGD", "PostLocalSGDState", "post_local_sgd_hook"):
        return f": {_hook_of_ddp()}; average gradients in the warm-up with tensorplay.distributed.all_reduce"
    return ""


def _hook_of_ddp() -> str:
    if hasattr(tp.nn.parallel.DistributedDataParallel, "register_comm_hook"):
        return "it works on torch's DistributedDataParallel"
    return f"it needs DistributedDataParallel.register_comm_hook, which TensorPlay {tp.__version__} lacks"
