"""How an averager comes to its groups: the ranks compare what they were given, then make the same groups."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from averagers.errors import DisagreementError
from averagers.hierarchy import block_of, split_by_node
from averagers.reduction.groups import Group, Groups, Route, node_of_each_rank
from averagers.safety.agreement import Statement, agree
from averagers.safety.failure import explain_failure


@dataclass(frozen=True)
class Level:
    """What a level needs of its groups.

    Attributes:
        group_size: How many ranks they have.
        is_sum: They may add up what they have within a node.
        has_beside: Rounds are under way while others begin, and need groups of their own.
    """

    group_size: int
    is_sum: bool
    has_beside: bool


@final
class Routes:
    """How the mean of each level travels, and the groups that were opened for it.

    Attributes:
        number: Tells this averager from all others of these ranks.
        levels: The route of each level; none outside the process group, nor after ``release``.
        beside: That of rounds under way while others begin; None of levels without.
    """

    def __init__(
        self, groups: Groups, number: int = 0, levels: Sequence[Route] = (), beside: Sequence[Route | None] = ()
    ) -> None:
        self.number = number
        self.levels = tuple(levels)
        self.beside = tuple(beside)
        self._groups = groups

    @property
    def are_alive(self) -> bool:
        """Whether all groups can still communicate."""
        return all(self._groups.is_alive(group) for group in self._opened)

    def shared(self) -> Routes:
        """Return the same for one more user."""
        for group in self._opened:
            self._groups.share(group)
        return Routes(self._groups, self.number, self.levels, self.beside)

    def abandon(self) -> None:
        """Share the groups of all levels no more: others may have failed at another one, and all make the same anew."""
        for group in self._opened:
            self._groups.abandon(group)

    def release(self) -> None:
        """Count one user of each group less, and have none."""
        for group in self._opened:
            self._groups.release(group)
        self.levels, self.beside = (), ()

    @property
    def _opened(self) -> list[Group]:
        beside = [route for route in self.beside if route is not None]
        return [group for route in [*self.levels, *beside] for group in route.groups]


def open_routes(
    groups: Groups,
    process_group: Any,
    levels: Sequence[Level],
    nodes: Sequence[Hashable] | None,
    facts: Mapping[str, Any],
    *,
    timeout_s: float | None,
) -> Routes:
    """Compare ``facts`` on the caller's group, then open a route for each level.

    Args:
        groups: Of the framework.
        process_group: The overall group, in which this rank is.
        levels: From the innermost.
        nodes: The node of each rank of ``process_group``; None to tell it by the host names.
        facts: What must be equal on all ranks.
        timeout_s: Of each collective; None for the process group's own.

    Raises:
        DisagreementError: the facts differ.
        RoundFailedError: a rank died, or did not come.
    """
    caller_group = groups.borrow(process_group, timeout_s=timeout_s)
    ranks, rank = caller_group.ranks, caller_group.rank
    opened: list[Group] = []

    def open_group(members: tuple[int, ...], purpose: str = "rounds") -> Group:
        is_missing = not groups.has(process_group, members, timeout_s=timeout_s, purpose=purpose)
        is_missing_anywhere = agree(caller_group, Statement({"group": len(opened)}), int(is_missing)).wish
        anew = number if is_missing_anywhere else None
        opened.append(groups.open(process_group, members, timeout_s=timeout_s, anew=anew, purpose=purpose))
        return opened[-1]

    try:
        # The ranks may have built and lost other averagers before: the largest number is new to all.
        number = agree(caller_group, Statement(facts), groups.serial).wish
        groups.serial = number + 1
        if nodes is None and len(ranks) >= 4:  # with fewer there are no two nodes of two ranks
            nodes = node_of_each_rank(caller_group)
        ways: list[Route] = []
        ways_beside: list[Route | None] = []
        for level in levels:
            block = block_of(rank, ranks, level.group_size)
            split = split_by_node(ranks, nodes, group_size=level.group_size, rank=rank) if nodes else None
            legs = (block,) if split is None or not level.is_sum else split

            def open_route(purpose: str, block: tuple[int, ...] = block, legs: tuple[Any, ...] = legs) -> Route:
                group = open_group(block, purpose)
                return Route(group, tuple(group if leg == block else open_group(leg, purpose) for leg in legs))

            # Not shared with other averagers either, whose rounds may be under way at the same time.
            ways_beside.append(open_route(f"beside averager {number}") if level.has_beside else None)
            ways.append(open_route("rounds"))
        return Routes(groups, number, ways, ways_beside)
    except DisagreementError:
        raise
    except RuntimeError as error:
        for group in opened:
            groups.release(group)
        raise explain_failure(caller_group, error) from error
