"""What the engine asks of a tensor framework: groups of its own, and a reducer (pure).

The engine decides, compares and counts; these classes move numbers. One framework implements all of
them, so that nothing above this package branches on tensors.
"""

from __future__ import annotations

import marshal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any, NamedTuple


class Group(ABC):
    """Ranks that communicate, seen by one of them.

    Attributes:
        ranks: Global ranks of the members, in the group's order.
        rank: Global rank of this process.
        timeout_s: After how many seconds without an answer a collective fails.
    """

    ranks: tuple[int, ...]
    rank: int
    timeout_s: float

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return len(self.ranks)

    @abstractmethod
    def maximum(self, values: Sequence[int]) -> list[int]:
        """Return the largest of each value over the ranks; the message that opens a round."""

    @abstractmethod
    def gather(self, payload: bytes) -> list[bytes]:
        """Return every rank's payload, in the group's order."""

    @abstractmethod
    def total(self, value: float) -> float:
        """Return the sum of ``value`` over the ranks."""

    @abstractmethod
    def missing_ranks(self) -> tuple[int, ...] | None:
        """After a failure, return which ranks did not come to the last message; None if unknown."""


class Groups(ABC):
    """Makes groups, shares them between averagers, and releases them.

    Attributes:
        serial: Above every number that this rank has used to name a group or an averager.
    """

    serial: int

    @abstractmethod
    def resolve(self, process_group: Any) -> Any:
        """Return the process group that is meant; None means the world."""

    @abstractmethod
    def members(self, process_group: Any) -> tuple[int, ...] | None:
        """Return the global ranks of ``process_group`` in its order; None outside it."""

    @abstractmethod
    def borrow(self, process_group: Any, *, timeout_s: float | None) -> Group:
        """Return the caller's own group, to compare configurations on."""

    @abstractmethod
    def has(self, process_group: Any, ranks: tuple[int, ...], *, timeout_s: float | None) -> bool:
        """Tell whether ``open`` would find such a group on this rank."""

    @abstractmethod
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

    @abstractmethod
    def share(self, group: Group) -> None:
        """Count one more user of a group that ``open`` returned."""

    @abstractmethod
    def release(self, group: Group) -> None:
        """Count one user less of a group that ``open`` returned; the last one destroys it."""

    @abstractmethod
    def abandon(self, group: Group) -> None:
        """Share a group no more: a collective on it failed, and the next ``open`` makes a new one."""

    @abstractmethod
    def is_alive(self, group: Group) -> bool:
        """Tell whether a group that ``open`` returned can still communicate."""

    @abstractmethod
    def handle(self, group: Group) -> Any:
        """Return the framework's process group behind a group that ``open`` returned."""


class TensorDescription(NamedTuple):
    """What the ranks must agree on of one tensor; a tuple, because a model has thousands.

    Attributes:
        name: Its name where one was given, else its position in the list, as ``#3``.
        shape: Its shape.
        dtype: Its dtype, as the framework writes it.
        order: Its dimensions from the largest stride to the smallest, without those of size 1.
        device: Which of this rank's devices it is on: the type, and the order of first appearance.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    order: tuple[int, ...]
    device: str


@dataclass(frozen=True)
class Listing:
    """The tensors of one round as the ranks compare them."""

    descriptions: tuple[TensorDescription, ...]
    num_elements: int

    @cached_property
    def digest(self) -> bytes:
        """Bytes that differ where the descriptions do."""
        plain = [tuple(description) for description in self.descriptions]
        # Only digested, never read back; version 2 writes equal values as equal bytes.
        return blake2b(marshal.dumps(plain, 2), digest_size=16).digest()


@dataclass(frozen=True)
class Selection:
    """The tensors of one round, and their listing."""

    tensors: Sequence[Any]
    listing: Listing


@dataclass(frozen=True)
class Reduced:
    """What a reduction cost and found.

    Attributes:
        wire_bytes: Bytes that this rank sent, by the formula of its collectives.
        drift: Root mean square over the ranks of the distance from the mean; None if not asked for.
    """

    wire_bytes: int
    drift: float | None


class Reducer(ABC):
    """Chooses what is averaged and replaces it by its mean, in place."""

    @abstractmethod
    def select(self, params: Iterable[Any], once_trainable: set[int]) -> Selection:
        """Read ``params`` once and return what is averaged of it.

        Args:
            params: Tensors, ``(name, tensor)`` pairs, or optimizer parameter groups of those.
            once_trainable: Positions of parameters that were trainable before; those trainable now
                are added.

        Raises:
            InvalidTypeError: an item is none of those.
            UnsupportedTensorError: a tensor cannot be averaged in place.
        """

    @abstractmethod
    def select_all(self, tensors: Iterable[tuple[str, Any]]) -> Selection:
        """Return named tensors of any dtype as a selection, to broadcast.

        Raises:
            InvalidTypeError: an item is not a ``(name, tensor)`` pair.
            UnsupportedTensorError: a tensor cannot be written in place.
        """

    @abstractmethod
    def check(self, selection: Selection, group: Group) -> None:
        """Raise what must be raised before any communication of ``selection`` over ``group``."""

    @abstractmethod
    def average_(self, selection: Selection, group: Group, *, measure_drift: bool) -> Reduced:
        """Replace every selected tensor by its mean over ``group``, in place."""

    @abstractmethod
    def broadcast_(self, selection: Selection, group: Group) -> None:
        """Replace every selected tensor by that of the group's first rank, in place."""

    @abstractmethod
    def snapshot(self, selection: Selection) -> Sequence[Any]:
        """Return copies of the selected tensors."""

    @abstractmethod
    def restore_(self, selection: Selection, snapshot: Sequence[Any]) -> None:
        """Write copies made by ``snapshot`` back, in place."""

    @abstractmethod
    def close(self) -> None:
        """Free the buffers kept between rounds."""


@dataclass(frozen=True)
class Framework:
    """A tensor framework: how to make its groups, and its reducers.

    Attributes:
        groups: Makes and shares groups, one for the whole process.
        new_reducer: Takes the most bytes of a bucket and returns a reducer for one averager.
    """

    groups: Groups
    new_reducer: Callable[[int], Reducer]
