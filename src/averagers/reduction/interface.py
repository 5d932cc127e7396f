"""What a tensor framework gives: its process groups, and the operations on its tensors (pure).

Everything else in this package, and all above it, is the same for every framework, and knows tensors
only by the methods that all of them share.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from math import inf, prod
from typing import Any, NamedTuple, TypeAlias

from averagers.reduction.layout import Kind

Tensor: TypeAlias = Any
"""A tensor of the framework at hand."""


class Work(ABC):
    """A collective under way."""

    @abstractmethod
    def wait(self, when_late: Callable[[], None] | None = None) -> None:
        """Return when what follows on this rank sees the result; a failed collective raises `RuntimeError`.

        Args:
            when_late: Called once where this rank is held for a noticeable time.
        """

    def ends_within(self, seconds: float) -> bool:
        """Wait at most so long and tell whether it ended; a failed collective raises `RuntimeError`."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self._ends_within_slice(min(left, _SLICE_S)):
                return True
        return False

    @abstractmethod
    def _ends_within_slice(self, seconds: float) -> bool:
        """Wait at most so long, which is short, and tell whether it ended; as ``ends_within`` raises."""


_SLICE_S = 0.5
"""How long Ctrl-C may go unheard."""

LATE_AFTER_S = 0.5
"""A rank that is held for longer than this tells the others that it came."""


def wait_on_this_thread(work: Work, when_late: Callable[[], None] | None) -> None:
    """Wait until ``work`` has ended, for `Work.wait` where nothing can go on meanwhile."""
    if not work.ends_within(LATE_AFTER_S):
        if when_late is not None:
            when_late()
        work.ends_within(inf)


class Lane(ABC):
    """One process group of the framework, seen by one of its ranks.

    Attributes:
        handle: The framework's process group.
        size: How many ranks it has.
        rank: Which of them this one is.
        device_types: The types of device that it serves, such as ``cpu``.
        parallel_device_types: Those on which buckets travel faster through several lanes in turn.
    """

    handle: Any
    size: int
    rank: int
    device_types: frozenset[str]
    parallel_device_types: frozenset[str]

    @abstractmethod
    def all_reduce(self, values: Tensor) -> Work:
        """Replace ``values`` by their sum over the ranks."""

    @abstractmethod
    def all_to_all(self, received: Tensor, values: Tensor) -> Work:
        """Send the n-th part of ``values`` to the n-th rank; ``received`` has what the ranks sent, in order."""

    @abstractmethod
    def all_gather(self, gathered: Tensor, values: Tensor) -> Work:
        """Send ``values`` to all; ``gathered`` has those of all ranks, in order."""

    @abstractmethod
    def broadcast(self, values: Tensor) -> Work:
        """Replace ``values``, plain bytes, by those of the first rank."""

    @abstractmethod
    def gather_bytes(self, payload: bytes) -> tuple[Work, Callable[[], list[bytes]]]:
        """Start to send ``payload`` to all, and return what then reads every rank's, in order.

        All have the same length, of 1 at least.
        """


class Marks(ABC):
    """Where ranks leave marks for each other outside the process groups, so that they outlive a failed one.

    All raise `RuntimeError` where the process that keeps them is gone.
    """

    @abstractmethod
    def leave(self, mark: str) -> None:
        """Leave a mark."""

    @abstractmethod
    def is_left(self, mark: str) -> bool:
        """Tell whether some rank left this mark."""


class GroupFactory(ABC):
    """Reads the caller's process groups, and makes new ones by their members alone.

    Attributes:
        group_type: The class of the framework's process groups.
        group_type_name: How users write it.
        non_member: What the framework hands out in place of a group to a rank outside it.
        how_to_start: What to do where there is no process group yet.
    """

    group_type: type
    group_type_name: str
    non_member: Any
    how_to_start: str

    @abstractmethod
    def group_of_mesh(self, mesh: Any) -> Any:
        """Return the process group that a device mesh of one axis stands for; anything else as it is."""

    @abstractmethod
    def world(self) -> Any:
        """Return the process group of all ranks; None before the framework's ``init_process_group``."""

    @abstractmethod
    def ranks(self, process_group: Any) -> tuple[int, ...]:
        """Return the global ranks of ``process_group`` in its order."""

    @abstractmethod
    def own_rank(self) -> int:
        """Return the global rank of this process."""

    @abstractmethod
    def backend(self, process_group: Any) -> str:
        """Return the name of the backend that ``process_group`` was made with."""

    @abstractmethod
    def timeout_s(self, process_group: Any) -> float:
        """Return the timeout that ``process_group`` was made with, in seconds."""

    @abstractmethod
    def name(self, process_group: Any) -> str:
        """Return a name that is the same on all ranks of ``process_group``."""

    @abstractmethod
    def is_alive(self, process_group: Any) -> bool:
        """Tell whether ``process_group`` was not destroyed."""

    @abstractmethod
    def lane(self, process_group: Any) -> Lane:
        """Return ``process_group`` as a lane."""

    @abstractmethod
    def new_lane(self, parent: Any, ranks: tuple[int, ...], *, timeout_s: float, name: str) -> Lane:
        """Make a process group with the backend of ``parent``; only ``ranks`` call this, all with the same name."""

    @abstractmethod
    def destroy(self, lane: Lane) -> None:
        """Destroy what ``new_lane`` made."""

    @abstractmethod
    def marks(self) -> Marks:
        """Return where the ranks of the world leave marks."""


class Record(NamedTuple):
    """What there is to know of a tensor without reading it; equal records mean the same memory.

    Of a tensor that is spread over ranks it is the shard of this rank; ``shard`` says which one, and is empty else.
    """

    name: str
    address: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any
    device: Any
    shard: str = ""

    @property
    def is_freed(self) -> bool:
        """Whether there are elements, but no memory."""
        return not self.address and prod(self.shape) > 0

    @property
    def repeats_elements(self) -> bool:
        """Whether one element stands at several places, as in an expanded tensor."""
        repeats = any(stride == 0 and size > 1 for stride, size in zip(self.stride, self.shape, strict=True))
        return repeats and prod(self.shape) > 0

    @property
    def order(self) -> tuple[int, ...]:
        """The dimensions from the largest stride to the smallest, without those of size 1."""
        return stride_order(self.shape, self.stride)

    @property
    def end(self) -> int:
        """The address behind the last element."""
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return self.address + (last + 1) * int(self.dtype.itemsize)

    @property
    def may_overlap_itself(self) -> bool:
        """Whether two elements may lie at one address, as in a sliding window."""
        reach = 0
        for dim in reversed(self.order):
            if self.stride[dim] <= reach:
                return True
            reach += (self.shape[dim] - 1) * self.stride[dim]
        return False


@lru_cache(maxsize=4096)
def stride_order(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """Return the dimensions from the largest stride to the smallest, without those of size 1."""
    dims = [dim for dim, size in enumerate(shape) if size != 1]
    return tuple(sorted(dims, key=lambda dim: -stride[dim]))


class TensorOperations(ABC):
    """What averaging does with tensors beyond the methods that all frameworks share.

    Attributes:
        tensor_type: The class of all tensors.
        ordinary_types: Classes of tensors that lie whole on this rank.
        parameter_type: The class of those that a module trains.
        lazy_types: The classes of those that have no shape yet.
        strided: The layout of a dense tensor.
        averaged_dtypes: The dtypes that have a mean.
        sixteen_bit: Of these, those that are summed in float32.
        float32: The dtype.
        int8: The dtype.
        uint8: The dtype.
        int64: The dtype.
    """

    tensor_type: type
    ordinary_types: frozenset[type]
    parameter_type: type
    lazy_types: tuple[type, ...]
    strided: Any
    averaged_dtypes: frozenset[Any]
    sixteen_bit: frozenset[Any]
    float32: Any
    int8: Any
    uint8: Any
    int64: Any

    @abstractmethod
    def local(self, tensor: Tensor) -> tuple[Tensor, str]:
        """Return what of ``tensor`` lies on this rank, and which shard that is; the tensor and "" where it is whole.

        Two ranks' shards have the same name if and only if they are shards of the same place.
        """

    @abstractmethod
    def record(self, name: str, tensor: Tensor, shard: str) -> Record:
        """Return what there is to know of ``tensor``; its address is 0 where it has no elements."""

    @abstractmethod
    def refusal(self, tensor: Tensor) -> str | None:
        """Return why this framework cannot write ``tensor`` in place, beyond what is the same for all."""

    @abstractmethod
    def dtype_name(self, dtype: Any) -> str:
        """Return the dtype's name, the same for all frameworks."""

    @abstractmethod
    def kind(self, device: Any, dtype: Any) -> Kind:
        """Return what the buckets of such tensors hold: complex numbers travel as pairs of reals."""

    @abstractmethod
    def reals(self, tensor: Tensor) -> Tensor:
        """Return a view of reals as they lie in memory, outside autograd's graph.

        Writing through it bumps the tensor's own version counter, so that autograd notices a round
        between forward and backward.
        """

    @abstractmethod
    def plain_memory(self) -> AbstractContextManager[None]:
        """Write without autograd, and keep buffers usable where the caller is in inference mode."""

    @abstractmethod
    def beside(self, devices: Collection[Any]) -> AbstractContextManager[None]:
        """Return what another thread enters to work on ``devices`` while this one does too.

        The work comes after what this thread has queued there so far, and has ended when the other one leaves.
        """

    @abstractmethod
    def new_bytes(self, num_bytes: int, device: Any) -> Tensor:
        """Return so many bytes, with whatever was left there."""

    @abstractmethod
    def copy_(self, destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Copy each source into its destination; all have one dtype and device."""

    @abstractmethod
    def add_(self, destinations: Sequence[Tensor], sources: Sequence[Tensor], *, alpha: float) -> None:
        """Add ``alpha`` times each source to its destination; all have one dtype and device."""

    @abstractmethod
    def concatenated(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return a tensor of all, one after the other along the last dimension."""

    @abstractmethod
    def mark_written(self, tensors: Sequence[Tensor]) -> None:
        """Tell autograd that these changed where they lie: collectives do not."""

    @abstractmethod
    def squared_distance(self, values: Tensor, means: Tensor) -> Tensor:
        """Return the sum of squares of the difference, taken in float32 at least and summed in float64."""
