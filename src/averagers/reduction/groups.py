"""Process groups of our own, made by their members only, shared and released.

`torch.distributed.new_group` must be called by every rank of the world, or, with
``use_local_synchronization=True``, names a group by a count of all groups of this process, so that
ranks with different histories wait for each other under different names. Here a group is named by
its member ranks and a count for those ranks alone. That takes one private call of torch, which this
file keeps to itself.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from hashlib import blake2b
from typing import Any, final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from averagers.errors import InvalidTypeError, InvalidValueError, NotInitializedError
from averagers.reduction.interface import Group, Groups

_GLOO_LANES = 4

# A rank that waits longer than this for the others leaves a mark in the store, so that after a
# failure the ranks that came can be told from those that did not.
_MARK_AFTER_S = 0.5
_MARK_GRACE_S = 2.0


@final
class TorchGroup(Group):
    """A group of ranks on `torch.distributed`.

    Attributes:
        lanes: Process groups of the same ranks, see ``lane``.
        device: Where small messages must lie for the backend.
        device_types: The types of device that the backend serves.
        name: The same on all its ranks, and no other group's.
    """

    def __init__(self, lanes: Sequence[dist.ProcessGroup], ranks: tuple[int, ...], timeout_s: float, name: str) -> None:
        self.lanes = tuple(lanes)
        self.ranks = ranks
        self.rank = dist.get_rank()
        self.timeout_s = timeout_s
        self._backends = _backend_of_each_device(self.lanes[0])
        self.device_types = frozenset(self._backends)
        self.device = _message_device(self.device_types)
        self._store = c10d.PrefixStore("averagers", _default_store())
        self.name = name
        self._openings = 0
        self._opened_at = 0.0

    def lane(self, index: int, device_type: str) -> dist.ProcessGroup:
        """Return the process group for the bucket of this index.

        gloo runs about two operations of a process group at a time: there buckets take the lanes in
        turn. Other backends run a group's operations one after the other on a stream of its own, and
        would only gain communicators.
        """
        return self.lanes[index % len(self.lanes) if self._backends[device_type] == "gloo" else 0]

    def maximum(self, values: Sequence[int]) -> list[int]:
        """Return the largest of each value over the ranks; the message that opens a round."""
        self._openings += 1
        self._opened_at = time.monotonic()
        message = torch.tensor(values, dtype=torch.int64, device=self.device)
        work = dist.all_reduce(message, dist.ReduceOp.MAX, self.lanes[0], async_op=True)
        self._wait_for_peers(work)
        return message.tolist()

    def gather(self, payload: bytes) -> list[bytes]:
        """Return every rank's payload, in the group's order."""
        lengths = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        own = torch.tensor([len(payload)], dtype=torch.int64, device=self.device)
        dist.all_gather_single(lengths, own, group=self.lanes[0])
        longest = max(1, int(lengths.max()))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else 0
        gathered = torch.zeros(self.size * longest, dtype=torch.uint8, device=self.device)
        dist.all_gather_single(gathered, padded.to(self.device), group=self.lanes[0])
        rows = gathered.view(self.size, longest).cpu()
        return [bytes(row[:length].tolist()) for row, length in zip(rows, lengths.tolist(), strict=True)]

    def total(self, value: float) -> float:
        """Return the sum of ``value`` over the ranks."""
        message = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(message, group=self.lanes[0])
        return float(message.item())

    def missing_ranks(self) -> tuple[int, ...] | None:
        """After a failure, return which ranks did not come to the last message; None if unknown.

        Every rank that fails says through the job's store that it came, and gives the others a
        moment to say so too.
        """
        try:
            self._mark_arrival()
            # Who comes after the timeout is late. But where a rank died early, others may be on their way.
            is_over = time.monotonic() - self._opened_at >= self.timeout_s
            grace_s = 1.5 * _MARK_AFTER_S if is_over else _MARK_GRACE_S
            deadline = time.monotonic() + min(grace_s, self.timeout_s)
            missing = self._unmarked()
            while missing and time.monotonic() < deadline:
                time.sleep(0.05)
                missing = self._unmarked()
        except RuntimeError:  # the process that hosts the store, mostly rank 0, is gone
            return None
        return missing

    def _wait_for_peers(self, work: dist.Work) -> None:
        """Wait for ``work``; after a while leave a mark that this rank came, at the timeout give up."""
        patience = min(_MARK_AFTER_S, self.timeout_s)
        if _ends_within(work, patience, self.device.type):
            return
        self._mark_arrival()
        # Not left to the backend: its timeout may be longer, or end the process.
        if not _ends_within(work, self.timeout_s - patience, self.device.type):
            raise RuntimeError(f"the other ranks did not answer within {self.timeout_s:g} s")

    def _mark(self, rank: int) -> str:
        return f"{self.name}/{self._openings}/{rank}"

    def _mark_arrival(self) -> None:
        self._store.set(self._mark(self.rank), "came")

    def _unmarked(self) -> tuple[int, ...]:
        return tuple(rank for rank in self.ranks if not self._store.check([self._mark(rank)]))


@final
class TorchGroups(Groups):
    """Makes, shares and releases groups on `torch.distributed`."""

    def __init__(self) -> None:
        # Never reset: a name must not come back while peers may still hold the old one.
        self.serial = 0
        self._users: dict[TorchGroup, int] = {}
        self._by_key: dict[tuple[object, ...], TorchGroup] = {}
        self._borrowed: dict[dist.ProcessGroup, TorchGroup] = {}

    def resolve(self, process_group: Any) -> Any:
        """Return the process group that is meant; None means the world.

        Raises:
            NotInitializedError: `torch.distributed.init_process_group` was not called.
            InvalidTypeError: ``process_group`` is not a process group.
            InvalidValueError: ``process_group`` was destroyed.
        """
        if not dist.is_available() or not dist.is_initialized():
            raise NotInitializedError(
                "averaging needs a process group: start the script with torchrun and call "
                "torch.distributed.init_process_group() before building an averager"
            )
        if process_group is None:
            return dist.group.WORLD
        if process_group == dist.GroupMember.NON_GROUP_MEMBER:
            return process_group
        if not isinstance(process_group, dist.ProcessGroup):
            raise InvalidTypeError(
                f"process_group must be a torch.distributed.ProcessGroup or None, got {process_group!r} "
                f"of type {type(process_group).__name__}"
            )
        if process_group not in c10d._world.pg_map:
            raise InvalidValueError("process_group was destroyed: give one that is in use, or None for all ranks")
        return process_group

    def members(self, process_group: Any) -> tuple[int, ...] | None:
        """Return the global ranks of ``process_group`` in its order; None outside it."""
        if process_group == dist.GroupMember.NON_GROUP_MEMBER:
            return None
        return tuple(dist.get_process_group_ranks(process_group))

    def borrow(self, process_group: Any, *, timeout_s: float | None) -> TorchGroup:
        """Return the caller's own group, to compare configurations on.

        Args:
            process_group: The caller's.
            timeout_s: How long to wait for the other ranks; None for the group's own timeout.
        """
        self._forget_destroyed()
        if process_group not in self._borrowed:
            ranks = tuple(dist.get_process_group_ranks(process_group))
            name = f"caller/{process_group.group_name}"
            self._borrowed[process_group] = TorchGroup([process_group], ranks, _timeout_s(process_group), name)
        group = self._borrowed[process_group]
        group.timeout_s = _timeout_s(process_group) if timeout_s is None else timeout_s
        return group

    def has(self, process_group: Any, ranks: tuple[int, ...], *, timeout_s: float | None) -> bool:
        """Tell whether ``open`` would find such a group on this rank."""
        self._forget_destroyed()
        return ("rounds", *_key(process_group, ranks, timeout_s)) in self._by_key

    def open(
        self,
        process_group: Any,
        ranks: tuple[int, ...],
        *,
        timeout_s: float | None,
        anew: int | None,
        purpose: str = "rounds",
    ) -> TorchGroup:
        """Return a group of our own of ``ranks``, made by its members only; equal ones are shared.

        Args:
            process_group: The parent, whose backend the group has.
            ranks: Global ranks of the members, this one among them.
            timeout_s: Of each collective; None for the parent's.
            anew: None to share the group that all members have; else a number that all members agree on
                and that none has used, by which a new group is named.
            purpose: Groups of different purposes are never shared.
        """
        key = (purpose, *_key(process_group, ranks, timeout_s))
        if anew is not None:
            name = f"{blake2b(repr(ranks).encode(), digest_size=12).hexdigest()}/{anew}"
            if key not in self._by_key or self._by_key[key].name != name:
                self._by_key[key] = _new_group_of_lanes(process_group, ranks, timeout_s, name)
        group = self._by_key[key]
        self._users[group] = self._users.get(group, 0) + 1
        return group

    def share(self, group: Group) -> None:
        """Count one more user of a group that ``open`` returned."""
        assert isinstance(group, TorchGroup)
        self._users[group] += 1

    def release(self, group: Group) -> None:
        """Count one user less of a group that ``open`` returned; the last one destroys it."""
        self._forget_destroyed()
        assert isinstance(group, TorchGroup)
        if group not in self._users:  # the world was destroyed before
            return
        self._users[group] -= 1
        if self._users[group] == 0:
            self._forget(group)
            for lane in group.lanes:
                dist.destroy_process_group(lane)

    def is_alive(self, group: Group) -> bool:
        """Tell whether a group that ``open`` returned can still communicate."""
        assert isinstance(group, TorchGroup)
        return group.lanes[0] in c10d._world.pg_map

    def handle(self, group: Group) -> Any:
        """Return the process group behind a group that ``open`` returned."""
        assert isinstance(group, TorchGroup)
        return group.lanes[0]

    def abandon(self, group: Group) -> None:
        """Share a group no more: a collective on it failed, and the next ``open`` makes a new one."""
        self._by_key = {key: kept for key, kept in self._by_key.items() if kept is not group}

    def _forget_destroyed(self) -> None:
        """Drop what `torch.distributed.destroy_process_group` has taken with it."""
        alive = c10d._world.pg_map
        self._borrowed = {handle: group for handle, group in self._borrowed.items() if handle in alive}
        for group in [group for group in self._users if group.lanes[0] not in alive]:
            self._forget(group)

    def _forget(self, group: TorchGroup) -> None:
        del self._users[group]
        self.abandon(group)


def node_of_each_rank(group: Group) -> list[str]:
    """Return the host name of each rank of ``group``, in its order. All its ranks must call this."""
    return [name.decode() for name in group.gather(socket.gethostname().encode())]


def _key(process_group: dist.ProcessGroup, ranks: tuple[int, ...], timeout_s: float | None) -> tuple[object, ...]:
    """Return what two groups must have in common to be shared."""
    timeout_s = _timeout_s(process_group) if timeout_s is None else timeout_s
    # By the name that the parent was made with: torch takes one that is spelled out for another kind.
    return ranks, dist.get_backend(process_group), timeout_s


def _new_group_of_lanes(
    process_group: dist.ProcessGroup, ranks: tuple[int, ...], timeout_s: float | None, name: str
) -> TorchGroup:
    timeout_s = _timeout_s(process_group) if timeout_s is None else timeout_s
    is_gloo = _backend_of_each_device(process_group).get("cpu") == "gloo"
    num_lanes = _GLOO_LANES if is_gloo and len(ranks) > 1 else 1
    lanes = _new_lanes(num_lanes, ranks, dist.get_backend(process_group), timeout_s, name)
    return TorchGroup(lanes, ranks, timeout_s, name)


def _new_lanes(
    num_lanes: int, ranks: tuple[int, ...], backend: str, timeout_s: float, name: str
) -> list[dist.ProcessGroup]:
    lanes: list[dist.ProcessGroup] = []
    try:
        for lane in range(num_lanes):
            lanes.append(_new_group(ranks, backend, timeout_s, f"averagers/{name}/{lane}"))
        if num_lanes > 1:
            # A rank may have its connections before the others have theirs, and must not close them yet.
            dist.all_reduce(torch.zeros(1), group=lanes[-1])
    except RuntimeError:  # a member died in the meantime
        for made in lanes:
            dist.destroy_process_group(made)
        raise
    return lanes


def _new_group(ranks: tuple[int, ...], backend: str, timeout_s: float, name: str) -> dist.ProcessGroup:
    """Make a process group of ``ranks``, called by them alone."""
    world = dist.group.WORLD
    assert world is not None
    # With a device bound to the world, torch would split the new communicator off the world's, and
    # that is a collective of the whole world: hide the binding while the members make theirs.
    bound_device, world.bound_device_id = world.bound_device_id, None
    try:
        process_group: dist.ProcessGroup
        process_group, _ = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(dist.get_rank()),
            list(ranks),
            dist.Backend(backend),
            _default_store(),
            c10d.GroupName(name),
            timeout=timedelta(seconds=timeout_s),
            group_desc="averagers",
        )
    finally:
        world.bound_device_id = bound_device
    c10d._world.pg_group_ranks[process_group] = {rank: index for index, rank in enumerate(ranks)}
    return process_group


def _default_store() -> c10d.Store:
    store: c10d.Store = c10d._get_default_store()
    return store


def wait(work: dist.Work, device_type: str) -> None:
    """Wait for a collective: on the CPU until it has ended, on CUDA only the current stream does."""
    if device_type == "cpu":
        _ends_within(work, float("inf"), device_type)
    else:
        work.wait()  # pragma: only cuda


def _ends_within(work: dist.Work, seconds: float, device_type: str) -> bool:
    """Wait for ``work`` and tell whether it ended in time; in slices, so that Ctrl-C is heard."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if device_type != "cpu":  # pragma: only cuda
            # NCCL's wait takes a timeout as a reason to abort the communicator: ask instead.
            if work.is_completed():  # pragma: only cuda
                return bool(work.wait())  # pragma: only cuda
            time.sleep(2e-5)  # pragma: only cuda
            continue  # pragma: only cuda
        try:
            # In whole milliseconds, of which 0 would mean for ever.
            return bool(work.wait(timedelta(milliseconds=math.ceil(1e3 * min(left, 0.5)))))
        except RuntimeError:
            if work.is_completed():  # it failed; else this slice is over
                raise
    return False


def _backend_of_each_device(process_group: dist.ProcessGroup) -> dict[str, str]:
    """Return the backend's name for each type of device, such as ``{"cpu": "gloo", "cuda": "nccl"}``."""
    return dict(pair.split(":") for pair in dist.get_backend_config(process_group).split(","))


def _timeout_s(process_group: dist.ProcessGroup) -> float:
    """Return the timeout that ``process_group`` was made with, in seconds."""
    for device in process_group._device_types:
        options = getattr(process_group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        if timeout is not None:
            return float(timeout.total_seconds())
    return float(dist.constants.default_pg_timeout.total_seconds())


def _message_device(device_types: frozenset[str]) -> torch.device:
    """Return where a small message must lie: on the CPU where the backend serves it."""
    if "cpu" in device_types:
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()  # pragma: only cuda
    assert accelerator is not None  # pragma: only cuda
    return torch.device(accelerator.type, torch.accelerator.current_device_index())  # pragma: only cuda
