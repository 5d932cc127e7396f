"""`run_replicas`: several replicas in one process, to test a training loop or to study a method without any network."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, final

from averagers.arguments import check_seconds, check_whole_number
from averagers.errors import InvalidTypeError
from averagers.reduction.framework import Framework
from averagers.reduction.interface import GroupFactory, Lane, Marks, Tensor, TensorOperations, Work, wait_on_this_thread


def run_replicas(
    function: Callable[..., Any], num_replicas: int, *args: Any, timeout_s: float | None = 600.0
) -> list[Any]:
    """Call ``function`` for each replica, in threads of this process, and return what each returned.

    The averagers that it builds with the group it is given run the same rounds as on several machines, through memory
    in place of a network: what a loop does can be tested, and what a method is worth can be measured, in one process.
    Nothing of ``torch.distributed`` is needed. Threads share torch's random numbers: give each replica a
    ``torch.Generator`` of its own.

    Args:
        function: Called as ``function(group, *args)``; give ``group`` as ``process_group``. ``group.rank`` tells
            replicas apart.
        num_replicas: How many.
        args: For every replica.
        timeout_s: Seconds after which a round fails whose other replicas do not come; None for none.

    Raises:
        InvalidTypeError, InvalidValueError: an argument breaks a rule.
        Exception: the first that a replica raised; the others end too.

    Example:
        >>> def train(group):
        ...     weight = torch.full((3,), float(group.rank))
        ...     averager = averagers.PeriodicModelAverager(2, process_group=group)
        ...     averager.average_parameters([weight])
        ...     return weight.tolist()
        >>> averagers.run_replicas(train, 4)
        [[1.5, 1.5, 1.5], [1.5, 1.5, 1.5], [1.5, 1.5, 1.5], [1.5, 1.5, 1.5]]
    """
    if not callable(function):
        raise InvalidTypeError(f"function must be callable, got {function!r} of type {type(function).__name__}")
    check_whole_number("num_replicas", num_replicas, minimum=1)
    seconds = check_seconds("timeout_s", timeout_s)
    from averagers.reduction.pytorch import PYTORCH

    world = _World(num_replicas, inf if seconds is None else seconds)
    results: list[Any] = [None] * num_replicas

    def run(rank: int) -> None:
        try:
            results[rank] = function(ReplicaGroup(world, rank, PYTORCH.operations), *args)
        except BaseException as error:
            world.fail(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    world.has_ended = True
    if world.error is not None:
        raise world.error
    return results


class _World:
    """What the replicas share: where they meet, and the first error.

    Attributes:
        size: How many there are.
        timeout_s: After how many seconds a meeting fails.
        marks: That replicas left for each other.
        error: Of the first replica that failed.
        has_ended: All returned.
    """

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self.marks: set[str] = set()
        self.error: BaseException | None = None
        self.has_ended = False
        self.changed = threading.Condition()
        self._meetings: dict[tuple[str, int], _Meeting] = {}

    def meeting(self, name: str, number: int, size: int) -> _Meeting:
        """Return where the members of a group bring what they have for its so-and-so-many-th collective."""
        with self.changed:
            return self._meetings.setdefault((name, number), _Meeting(size))

    def leave(self, name: str, number: int) -> None:
        """A member has what it came for; the last one clears up."""
        with self.changed:
            meeting = self._meetings[name, number]
            meeting.num_left += 1
            if meeting.num_left == meeting.size:
                del self._meetings[name, number]

    def fail(self, error: BaseException) -> None:
        """Let every replica that waits fail too."""
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()


@dataclass
class _Meeting:
    size: int
    brought: dict[int, Any] = field(default_factory=dict)
    num_left: int = 0


@final
class ReplicaGroup:
    """All replicas of `run_replicas`, seen by one of them; for ``process_group=``.

    Attributes:
        rank: Which replica this is.
        size: How many there are.
    """

    def __init__(self, world: _World, rank: int, operations: TensorOperations) -> None:
        self.rank = rank
        self.size = world.size
        self.world = world
        self.averagers_framework = Framework(_Replicas(self), operations)


class _Meet(Work):
    """A collective: what all brought, and what to do with it."""

    def __init__(self, world: _World, name: str, number: int, size: int, take: Callable[[list[Any]], None]) -> None:
        self._world = world
        self._place = (name, number)
        self._meeting = world.meeting(name, number, size)
        self._take: Callable[[list[Any]], None] | None = take
        self._wait_began: float | None = None

    def bring(self, rank: int, value: Any) -> _Meet:
        with self._world.changed:
            self._meeting.brought[rank] = value
            if len(self._meeting.brought) == self._meeting.size:
                self._world.changed.notify_all()
        return self

    def wait(self, when_late: Callable[[], None] | None = None) -> None:
        wait_on_this_thread(self, when_late)

    def _ends_within_slice(self, seconds: float) -> bool:
        if self._take is None:
            return True
        self._wait_began = self._wait_began or time.monotonic()
        timeout_s, meeting = self._world.timeout_s, self._meeting
        if not self._is_complete_within(min(seconds, timeout_s)):
            if time.monotonic() - self._wait_began >= timeout_s:
                raise RuntimeError(f"the other replicas did not come within {timeout_s:g} s")
            return False
        self._take([meeting.brought[rank] for rank in range(meeting.size)])
        self._take = None
        self._world.leave(*self._place)
        return True

    def _is_complete_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        with self._world.changed:
            while len(self._meeting.brought) < self._meeting.size:
                if self._world.error is not None:
                    raise RuntimeError(f"another replica failed: {self._world.error}")
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._world.changed.wait(left)
        return True


@final
class _ReplicaLane(Lane):
    """Replicas that meet in memory."""

    def __init__(self, world: _World, ranks: tuple[int, ...], rank: int, name: str) -> None:
        self.handle = (name, ranks)
        self.size = len(ranks)
        self.rank = ranks.index(rank)
        self.device_types = frozenset({"cpu", "cuda"})
        self.parallel_device_types = frozenset()
        self._world = world
        self._name = name
        self._number = 0

    def all_reduce(self, values: Tensor) -> Work:
        def take(brought: list[Tensor]) -> None:
            values.copy_(brought[0])
            for other in brought[1:]:
                values.add_(other)

        return self._meet(values.clone(), take)

    def all_to_all(self, received: Tensor, values: Tensor) -> Work:
        size = values.numel() // self.size

        def take(brought: list[Tensor]) -> None:
            for row, other in zip(received.split(size), brought, strict=True):
                row.copy_(other[self.rank * size : (self.rank + 1) * size])

        return self._meet(values.clone(), take)

    def all_gather(self, gathered: Tensor, values: Tensor) -> Work:
        def take(brought: list[Tensor]) -> None:
            for row, other in zip(gathered.split(values.numel()), brought, strict=True):
                row.copy_(other)

        return self._meet(values.clone(), take)

    def broadcast(self, values: Tensor) -> Work:
        return self._meet(values.clone(), lambda brought: values.copy_(brought[0]))

    def gather_bytes(self, payload: bytes) -> tuple[Work, Callable[[], list[bytes]]]:
        rows: list[bytes] = []
        return self._meet(payload, rows.extend), lambda: rows

    def _meet(self, value: Any, take: Callable[[list[Any]], None]) -> Work:
        self._number += 1
        return _Meet(self._world, self._name, self._number, self.size, take).bring(self.rank, value)


@final
class _ReplicaMarks(Marks):
    def __init__(self, world: _World) -> None:
        self._world = world

    def leave(self, mark: str) -> None:
        self._world.marks.add(mark)

    def is_left(self, mark: str) -> bool:
        return mark in self._world.marks


@final
class _Replicas(GroupFactory):
    """Makes groups of replicas, for one of them."""

    group_type = ReplicaGroup
    group_type_name = "ReplicaGroup"
    non_member = NotImplemented
    how_to_start = "use averagers.run_replicas"

    def __init__(self, group: ReplicaGroup) -> None:
        self._group = group

    def group_of_mesh(self, mesh: Any) -> Any:
        return mesh

    def world(self) -> Any:
        return self._group

    def ranks(self, process_group: Any) -> tuple[int, ...]:
        return tuple(range(process_group.size))

    def own_rank(self) -> int:
        return self._group.rank

    def backend(self, process_group: Any) -> str:
        return "replicas"

    def timeout_s(self, process_group: Any) -> float:
        return self._group.world.timeout_s

    def name(self, process_group: Any) -> str:
        return "replicas"

    def is_alive(self, process_group: Any) -> bool:
        return not self._group.world.has_ended

    def lane(self, process_group: Any) -> Lane:
        return self._lane(self.ranks(process_group), "replicas")

    def new_lane(self, parent: Any, ranks: tuple[int, ...], *, timeout_s: float, name: str) -> Lane:
        return self._lane(ranks, name)

    def destroy(self, lane: Lane) -> None:
        return

    def marks(self) -> Marks:
        return _ReplicaMarks(self._group.world)

    def _lane(self, ranks: Sequence[int], name: str) -> Lane:
        return _ReplicaLane(self._group.world, tuple(ranks), self._group.rank, name)
