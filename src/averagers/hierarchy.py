"""With whom to average: levels of nested, contiguous groups of ranks (pure)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from averagers.arguments import check_whole_number
from averagers.errors import InvalidTypeError, InvalidValueError


@dataclass(frozen=True)
class Level:
    """One tier of the hierarchy: every ``period`` steps, groups of ``group_size`` ranks average."""

    period: int
    group_size: int


@dataclass(frozen=True)
class Hierarchy:
    """Levels in ascending order of their periods, each group nested in one of the next level."""

    levels: tuple[Level, ...]

    @classmethod
    def from_periods(cls, period_group_size_dict: object, *, overall_size: int | None) -> Hierarchy:
        """Build the levels from ``{period: group size}``, given in any order.

        Args:
            period_group_size_dict: Maps each level's period in steps to its groups' size in ranks.
            overall_size: Size of the overall group; None where this rank is not in it and cannot know.

        Raises:
            InvalidTypeError: not a mapping, or a period or size that is not an ``int``.
            InvalidValueError: empty; a period or size below 1; sizes that do not nest; the largest
                period's size is not ``overall_size``.
        """
        name = "period_group_size_dict"
        if period_group_size_dict is not None and not isinstance(period_group_size_dict, Mapping):
            raise InvalidTypeError(
                f"{name} must map periods to group sizes, such as {{4: 8, 16: 64}}, "
                f"got {period_group_size_dict!r} of type {type(period_group_size_dict).__name__}"
            )
        if not period_group_size_dict:
            raise InvalidValueError(
                f"{name} must name at least one level, such as {{4: 8, 16: 64}}, got {period_group_size_dict!r}"
            )
        levels = []
        for period, size in period_group_size_dict.items():
            check_whole_number(f"each period in {name}", period, minimum=1)
            check_whole_number(f"the group size of period {period} in {name}", size, minimum=1)
            levels.append(Level(period, size))
        levels.sort(key=lambda level: level.period)
        for inner, outer in pairwise(levels):
            if outer.group_size % inner.group_size:
                raise InvalidValueError(
                    f"group sizes in {name} must each divide the next longer period's: period {outer.period} has "
                    f"groups of {outer.group_size}, which is not a multiple of the {inner.group_size} of "
                    f"period {inner.period}"
                )
        if overall_size is not None and levels[-1].group_size != overall_size:
            raise InvalidValueError(
                f"the group size of the longest period in {name} must be the size of the overall process group: "
                f"period {levels[-1].period} has groups of {levels[-1].group_size}, "
                f"the process group has {overall_size} rank{'s' if overall_size != 1 else ''}"
            )
        return cls(tuple(levels))

    @property
    def periods(self) -> tuple[int, ...]:
        """The period of each level, ascending."""
        return tuple(level.period for level in self.levels)


def block_of(rank: int, ranks: Sequence[int], group_size: int) -> tuple[int, ...]:
    """Return the ranks of the group of ``rank``, where groups are contiguous blocks of the overall group.

    Args:
        rank: A global rank.
        ranks: The overall group's global ranks, in its order.
        group_size: How many ranks a group has.

    Example:
        >>> from averagers.hierarchy import block_of
        >>> block_of(2, [0, 1, 2, 3], 2)
        (2, 3)
    """
    start = ranks.index(rank) // group_size * group_size
    return tuple(ranks[start : start + group_size])


def split_by_node(
    ranks: Sequence[int], nodes: Sequence[Hashable], *, group_size: int, rank: int
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return which ranks of its group are on the node of ``rank``, and which have its place on each node.

    None where a mean gains nothing by going through the nodes one by one: unless every group of the level spans
    several nodes, with equally many ranks on each, two at least.

    Args:
        ranks: The overall group's global ranks, in its order.
        nodes: The node of each.
        group_size: Of the level; its groups are contiguous blocks of ``ranks``.
        rank: A global rank among them.

    Example:
        >>> from averagers.hierarchy import split_by_node
        >>> split_by_node([0, 1, 2, 3], ["a", "a", "b", "b"], group_size=4, rank=2)
        ((2, 3), (0, 2))
    """
    own: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    for start in range(0, len(ranks), group_size):
        by_node: dict[Hashable, list[int]] = {}
        for member, node in zip(ranks[start : start + group_size], nodes[start : start + group_size], strict=True):
            by_node.setdefault(node, []).append(member)
        places = list(by_node.values())
        if len(places) < 2 or len(places[0]) < 2 or len({len(members) for members in places}) > 1:
            return None
        for members in places:
            if rank in members:
                place = members.index(rank)
                own = tuple(members), tuple(others[place] for others in places)
    return own
