"""Fragments: parts of the model that are averaged each on its own, at its own place in the period (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from averagers.arguments import check_whole_number
from averagers.errors import InvalidTypeError, InvalidValueError
from averagers.reduction.selection import Listing

if TYPE_CHECKING:
    from typing import TypeGuard


@final
@dataclass(frozen=True)
class Fragments:
    """Which tensors belong to which fragment.

    Attributes:
        count: How many fragments there are.
        names: Of the parameters or modules of each; None to take tensors in turn.
    """

    count: int
    names: tuple[tuple[str, ...], ...] | None = None

    @classmethod
    def of(cls, value: object, period: int) -> Fragments:
        """Check what the user gave for a level of this period.

        Raises:
            InvalidTypeError: it is neither a whole number nor lists of names.
            InvalidValueError: there are none, or more than steps in the period.
        """
        if value is None:
            return WHOLE
        if isinstance(value, int):
            fragments = cls(check_whole_number("fragments", value, minimum=1))
        else:
            names = [[*group] if _is_list(group) else [] for group in value] if _is_list(value) else []
            if not names or not all(group and all(isinstance(name, str) for name in group) for group in names):
                raise InvalidTypeError(
                    "fragments must be how many there are, or lists of names such as [['embedding', 'layers.0'], "
                    f"['layers.1', 'head']], got {value!r}"
                )
            fragments = cls(len(names), tuple(map(tuple, names)))
        if period and fragments.count > period:
            raise InvalidValueError(
                "fragments must be at most the period, so that each has a step of its own, got "
                f"{fragments.count} with period {period}"
            )
        return fragments

    def positions(self, listing: Listing) -> list[tuple[int, ...]]:
        """Return the positions of each fragment's tensors.

        Raises:
            InvalidValueError: a tensor belongs to no fragment, or to several.
        """
        if self.names is None:
            size = len(listing.descriptions)
            return [tuple(range(fragment, size, self.count)) for fragment in range(self.count)]
        found: list[list[int]] = [[] for _ in range(self.count)]
        given = [description.name for description in listing.descriptions]
        for name in (name for names in self.names for name in names):
            if not any(other == name or other.startswith(f"{name}.") for other in given):
                raise InvalidValueError(f"fragments must name parameters or modules that are averaged, got {name!r}")
        for position, description in enumerate(listing.descriptions):
            owners = [
                fragment
                for fragment, names in enumerate(self.names)
                if any(description.name == name or description.name.startswith(f"{name}.") for name in names)
            ]
            if len(owners) != 1:
                raise InvalidValueError(
                    f"fragments must name each tensor in one list, and {description.name} is in "
                    f"{len(owners) or 'none'}: names are those of model.named_parameters(), or of modules, and params "
                    "must have them"
                )
            found[owners[0]].append(position)
        return [tuple(positions) for positions in found]


WHOLE = Fragments(1)


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
