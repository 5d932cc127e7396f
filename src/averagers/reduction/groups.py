"""Groups of our own, made by their members only, shared and released (pure).

The frameworks' ``new_group`` must be called by every rank of the world, or names a group by a count of
all groups of this process, so that ranks with different histories wait for each other under different
names. Here a group is named by its member ranks and a number that they agreed on.
"""

from __future__ import annotations

import math
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, final

from averagers.errors import InvalidTypeError, InvalidValueError, NotInitializedError
from averagers.reduction.interface import LATE_AFTER_S, GroupFactory, Lane, Marks, Work

# Where a backend runs few operations of a process group at a time, buckets take as many groups in turn.
_PARALLEL_LANES = 4

# A rank that is held leaves a mark, so that after a failure the ranks that came can be told from those that did not.
# How long others wait for it.
_MARK_GRACE_S = 2.0


@final
class Group:
    """Ranks that communicate, seen by one of them.

    Attributes:
        lanes: Process groups of the same ranks, see ``lane``.
        ranks: Global ranks of the members, in the group's order.
        rank: Global rank of this process.
        timeout_s: After how many seconds without an answer a collective fails.
        name: The same on all its ranks, and no other group's.
    """

    def __init__(
        self, lanes: Sequence[Lane], ranks: tuple[int, ...], rank: int, *, timeout_s: float, name: str, marks: Marks
    ) -> None:
        self.lanes = tuple(lanes)
        self.ranks = ranks
        self.rank = rank
        self.timeout_s = timeout_s
        self.name = name
        self._marks = marks
        self._openings = 0
        self._opened_at = 0.0

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return len(self.ranks)

    @property
    def handle(self) -> Any:
        """The framework's process group."""
        return self.lanes[0].handle

    @property
    def device_types(self) -> frozenset[str]:
        """The types of device that the group serves."""
        return self.lanes[0].device_types

    def lane(self, index: int, device_type: str) -> Lane:
        """Return the process group for the bucket of this index.

        Where a backend gains nothing by several process groups, all buckets go through one.
        """
        is_parallel = device_type in self.lanes[0].parallel_device_types
        return self.lanes[index % len(self.lanes) if is_parallel else 0]

    def open_round(self, form: str, *values: float) -> list[tuple[Any, ...]]:
        """Return the values of each rank, in the group's order; the message that opens a round.

        Args:
            form: Of the values, as `struct` has it; the same on all ranks.
            values: Of this rank.
        """
        self._openings += 1
        self._opened_at = time.monotonic()
        work, read = self.lanes[0].gather_bytes(struct.pack(form, *values))
        self._wait_for_peers(work)
        return [struct.unpack(form, row) for row in read()]

    def gather(self, payload: bytes) -> list[bytes]:
        """Return every rank's payload, in the group's order."""
        lengths = [int.from_bytes(length, "big") for length in self._gather_equal(len(payload).to_bytes(8, "big"))]
        rows = self._gather_equal(payload.ljust(max(1, *lengths), b"\0"))
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]

    def total(self, value: float) -> float:
        """Return the sum of ``value`` over the ranks."""
        return math.fsum(struct.unpack("d", row)[0] for row in self._gather_equal(struct.pack("d", value)))

    def _gather_equal(self, payload: bytes) -> list[bytes]:
        work, read = self.lanes[0].gather_bytes(payload)
        work.wait()
        return read()

    def missing_ranks(self) -> tuple[int, ...] | None:
        """After a failure, return which ranks did not come to the last message; None if unknown.

        Every rank that fails leaves a mark that it came, and gives the others a moment to do so too.
        """
        try:
            self.mark_arrival()
            # Who comes after the timeout is late. But where a rank died early, others may be on their way.
            is_over = time.monotonic() - self._opened_at >= self.timeout_s
            grace_s = 1.5 * LATE_AFTER_S if is_over else _MARK_GRACE_S
            deadline = time.monotonic() + min(grace_s, self.timeout_s)
            missing = self._unmarked()
            while missing and time.monotonic() < deadline:
                time.sleep(0.05)
                missing = self._unmarked()
        except RuntimeError:  # the process that keeps the marks, mostly rank 0, is gone
            return None
        return missing

    def _wait_for_peers(self, work: Work) -> None:
        """Wait for ``work``; after a while leave a mark that this rank came, at the timeout give up."""
        patience = min(LATE_AFTER_S, self.timeout_s)
        if work.ends_within(patience):
            return
        self.mark_arrival()
        # Not left to the backend: its timeout may be longer, or end the process.
        if not work.ends_within(self.timeout_s - patience):
            raise RuntimeError(f"the other ranks did not answer within {self.timeout_s:g} s")

    def _mark(self, rank: int) -> str:
        return f"{self.name}/{self._openings}/{rank}"

    def mark_arrival(self) -> None:
        """Tell the other ranks that this one came to the last message, should they fail."""
        self._marks.leave(self._mark(self.rank))

    def _unmarked(self) -> tuple[int, ...]:
        return tuple(rank for rank in self.ranks if not self._marks.is_left(self._mark(rank)))


@final
@dataclass(frozen=True)
class Route:
    """How the mean of one level travels.

    Attributes:
        group: All ranks of the level's group.
        legs: The groups that a bucket goes through: ``group`` alone; or first this node's ranks, then those with the
            same place on each node.
    """

    group: Group
    legs: tuple[Group, ...]

    @property
    def groups(self) -> tuple[Group, ...]:
        """Every group that was opened for it, once."""
        return self.legs if self.group in self.legs else (self.group, *self.legs)


@final
class Groups:
    """Makes groups, shares them between averagers, and releases them.

    Args:
        factory: Makes the framework's process groups.

    Attributes:
        serial: Above every number that this rank has used to name a group or an averager.
    """

    def __init__(self, factory: GroupFactory) -> None:
        # Never reset: a name must not come back while peers may still hold the old one.
        self.serial = 0
        self._factory = factory
        self._users: dict[Group, int] = {}
        self._by_key: dict[tuple[object, ...], Group] = {}
        self._borrowed: dict[Any, Group] = {}

    def resolve(self, process_group: Any) -> Any:
        """Return the process group that is meant; None means the world.

        Raises:
            NotInitializedError: the framework's ``init_process_group`` was not called.
            InvalidTypeError: ``process_group`` is not a process group.
            InvalidValueError: ``process_group`` was destroyed.
        """
        world = self._factory.world()
        if world is None:
            raise NotInitializedError(f"averaging needs a process group: {self._factory.how_to_start}")
        if process_group is None:
            return world
        process_group = self._factory.group_of_mesh(process_group)
        if self._is_non_member(process_group):
            return process_group
        if not isinstance(process_group, self._factory.group_type):
            raise InvalidTypeError(
                f"process_group must be a {self._factory.group_type_name} or None, got {process_group!r} "
                f"of type {type(process_group).__name__}"
            )
        if not self._factory.is_alive(process_group):
            raise InvalidValueError("process_group was destroyed: give one that is in use, or None for all ranks")
        return process_group

    def members(self, process_group: Any) -> tuple[int, ...] | None:
        """Return the global ranks of ``process_group`` in its order; None outside it."""
        return None if self._is_non_member(process_group) else self._factory.ranks(process_group)

    def borrow(self, process_group: Any, *, timeout_s: float | None) -> Group:
        """Return the caller's own group, to compare configurations on.

        Args:
            process_group: The caller's, in which this rank is.
            timeout_s: How long to wait for the other ranks; None for the group's own timeout.
        """
        self._forget_destroyed()
        if process_group not in self._borrowed:
            ranks = self._factory.ranks(process_group)
            name = f"caller/{self._factory.name(process_group)}"
            self._borrowed[process_group] = self._group([self._factory.lane(process_group)], ranks, 0.0, name)
        group = self._borrowed[process_group]
        group.timeout_s = self._timeout_s(process_group, timeout_s)
        return group

    def has(
        self, process_group: Any, ranks: tuple[int, ...], *, timeout_s: float | None, purpose: str = "rounds"
    ) -> bool:
        """Tell whether ``open`` would find such a group on this rank."""
        self._forget_destroyed()
        return (purpose, *self._key(process_group, ranks, timeout_s)) in self._by_key

    def open(
        self,
        process_group: Any,
        ranks: tuple[int, ...],
        *,
        timeout_s: float | None,
        anew: int | None,
        purpose: str = "rounds",
    ) -> Group:
        """Return a group of our own of ``ranks``, made by its members only; equal ones are shared.

        Args:
            process_group: The parent, whose backend the group has.
            ranks: Global ranks of the members, this one among them.
            timeout_s: Of each collective; None for the parent's.
            anew: None to share the group that all members have; else a number that all members agree on
                and that none has used, by which a new group is named.
            purpose: Groups of different purposes are never shared.
        """
        key = (purpose, *self._key(process_group, ranks, timeout_s))
        if anew is not None:
            name = f"{blake2b(repr((purpose, ranks)).encode(), digest_size=12).hexdigest()}/{anew}"
            if key not in self._by_key or self._by_key[key].name != name:
                timeout_s = self._timeout_s(process_group, timeout_s)
                lanes = self._new_lanes(process_group, ranks, timeout_s, name)
                self._by_key[key] = self._group(lanes, ranks, timeout_s, name)
        group = self._by_key[key]
        self._users[group] = self._users.get(group, 0) + 1
        return group

    def share(self, group: Group) -> None:
        """Count one more user of a group that ``open`` returned."""
        self._users[group] += 1

    def release(self, group: Group) -> None:
        """Count one user less of a group that ``open`` returned; the last one destroys it."""
        self._forget_destroyed()
        if group not in self._users:  # the world was destroyed before
            return
        self._users[group] -= 1
        if self._users[group] == 0:
            self._forget(group)
            for lane in group.lanes:
                self._factory.destroy(lane)

    def abandon(self, group: Group) -> None:
        """Share a group no more: a collective on it failed, and the next ``open`` makes a new one."""
        self._by_key = {key: kept for key, kept in self._by_key.items() if kept is not group}

    def is_alive(self, group: Group) -> bool:
        """Tell whether a group that ``open`` returned can still communicate."""
        return self._factory.is_alive(group.handle)

    def _is_non_member(self, process_group: Any) -> bool:
        non_member = self._factory.non_member
        return type(process_group) is type(non_member) and bool(process_group == non_member)

    def _forget_destroyed(self) -> None:
        """Drop what the framework's ``destroy_process_group`` has taken with it."""
        is_alive = self._factory.is_alive
        self._borrowed = {handle: group for handle, group in self._borrowed.items() if is_alive(handle)}
        for group in [group for group in self._users if not is_alive(group.handle)]:
            self._forget(group)

    def _forget(self, group: Group) -> None:
        del self._users[group]
        self.abandon(group)

    def _timeout_s(self, process_group: Any, timeout_s: float | None) -> float:
        return self._factory.timeout_s(process_group) if timeout_s is None else timeout_s

    def _key(self, process_group: Any, ranks: tuple[int, ...], timeout_s: float | None) -> tuple[object, ...]:
        """Return what two groups must have in common to be shared."""
        return ranks, self._factory.backend(process_group), self._timeout_s(process_group, timeout_s)

    def _group(self, lanes: Sequence[Lane], ranks: tuple[int, ...], timeout_s: float, name: str) -> Group:
        own_rank = self._factory.own_rank()
        return Group(lanes, ranks, own_rank, timeout_s=timeout_s, name=name, marks=self._factory.marks())

    def _new_lanes(self, parent: Any, ranks: tuple[int, ...], timeout_s: float, name: str) -> list[Lane]:
        is_parallel = bool(self._factory.lane(parent).parallel_device_types) and len(ranks) > 1
        lanes: list[Lane] = []
        try:
            for index in range(_PARALLEL_LANES if is_parallel else 1):
                lane_name = f"averagers/{name}/{index}"
                lanes.append(self._factory.new_lane(parent, ranks, timeout_s=timeout_s, name=lane_name))
            if is_parallel:
                # A rank may have its connections before the others have theirs, and must not close them yet.
                work, _ = lanes[-1].gather_bytes(b"?")
                work.wait()
        except RuntimeError:  # a member died in the meantime
            for lane in lanes:
                self._factory.destroy(lane)
            raise
        return lanes


def node_of_each_rank(group: Group) -> list[str]:
    """Return the host name of each rank of ``group``, in its order. All its ranks must call this."""
    return [name.decode() for name in group.gather(socket.gethostname().encode())]
