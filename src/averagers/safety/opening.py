"""How an averager comes to its groups: the ranks compare what they were given, then make the same groups."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from averagers.errors import DisagreementError
from averagers.hierarchy import block_of, split_by_node
from averagers.reduction.groups import Group, Groups, Route, node_of_each_rank
from averagers.safety.agreement import Statement, agree
from averagers.safety.failure import explain_failure


def open_routes(
    groups: Groups,
    process_group: Any,
    levels: Sequence[tuple[int, bool]],
    nodes: Sequence[Hashable] | None,
    facts: Mapping[str, Any],
    *,
    timeout_s: float | None,
) -> tuple[int, list[Route]]:
    """Compare ``facts`` on the caller's group, then open a route for each level.

    Args:
        groups: Of the framework.
        process_group: The overall group, in which this rank is.
        levels: How many ranks the groups of each level have, from the innermost, and whether they may add up what they
            have within a node.
        nodes: The node of each rank of ``process_group``; None to tell it by the host names.
        facts: What must be equal on all ranks.
        timeout_s: Of each collective; None for the process group's own.

    Returns:
        A number that tells this averager from all others of these ranks, and the routes; each of its groups is to be
        released.

    Raises:
        DisagreementError: the facts differ.
        RoundFailedError: a rank died, or did not come.
    """
    caller_group = groups.borrow(process_group, timeout_s=timeout_s)
    ranks, rank = caller_group.ranks, caller_group.rank
    opened: list[Group] = []

    def open_group(members: tuple[int, ...]) -> Group:
        is_missing = not groups.has(process_group, members, timeout_s=timeout_s)
        is_missing_anywhere = agree(caller_group, Statement({"group": len(opened)}), int(is_missing)).wish
        anew = number if is_missing_anywhere else None
        opened.append(groups.open(process_group, members, timeout_s=timeout_s, anew=anew))
        return opened[-1]

    try:
        # The ranks may have built and lost other averagers before: the largest number is new to all.
        number = agree(caller_group, Statement(facts), groups.serial).wish
        groups.serial = number + 1
        if nodes is None and len(ranks) >= 4:  # with fewer there are no two nodes of two ranks
            nodes = node_of_each_rank(caller_group)
        routes = []
        for size, is_sum in levels:
            group = open_group(block_of(rank, ranks, size))
            split = split_by_node(ranks, nodes, group_size=size, rank=rank) if nodes and is_sum else None
            routes.append(Route(group, (group,) if split is None else (open_group(split[0]), open_group(split[1]))))
        return number, routes
    except DisagreementError:
        raise
    except RuntimeError as error:
        for group in opened:
            groups.release(group)
        raise explain_failure(caller_group, error) from error
