"""How an averager comes to its groups: the ranks compare what they were given, then make the same groups."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


def open_routes(
    groups: Groups,
    process_group: Any,
    levels: Sequence[Level],
    nodes: Sequence[Hashable] | None,
    facts: Mapping[str, Any],
    *,
    timeout_s: float | None,
) -> tuple[int, list[tuple[Route, Route | None]]]:
    """Compare ``facts`` on the caller's group, then open a route for each level.

    Args:
        groups: Of the framework.
        process_group: The overall group, in which this rank is.
        levels: From the innermost.
        nodes: The node of each rank of ``process_group``; None to tell it by the host names.
        facts: What must be equal on all ranks.
        timeout_s: Of each collective; None for the process group's own.

    Returns:
        A number that tells this averager from all others of these ranks, and of each level the route, and the one
        beside it; each of their groups is to be released.

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
        routes = []
        for level in levels:
            block = block_of(rank, ranks, level.group_size)
            split = split_by_node(ranks, nodes, group_size=level.group_size, rank=rank) if nodes else None
            legs = (block,) if split is None or not level.is_sum else split

            def open_route(purpose: str, block: tuple[int, ...] = block, legs: tuple[Any, ...] = legs) -> Route:
                group = open_group(block, purpose)
                return Route(group, tuple(group if leg == block else open_group(leg, purpose) for leg in legs))

            # Not shared with other averagers either, whose rounds may be under way at the same time.
            beside = open_route(f"beside averager {number}") if level.has_beside else None
            routes.append((open_route("rounds"), beside))
        return number, routes
    except DisagreementError:
        raise
    except RuntimeError as error:
        for group in opened:
            groups.release(group)
        raise explain_failure(caller_group, error) from error
