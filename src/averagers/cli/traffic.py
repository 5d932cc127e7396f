"""How many bytes a collective sends within nodes and between them, by the formula of the ring (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class Traffic:
    """Bytes on the links of all ranks together.

    Attributes:
        intra_node_bytes: Bytes between ranks of one node.
        inter_node_bytes: Bytes between ranks of different nodes.
    """

    intra_node_bytes: int = 0
    inter_node_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.intra_node_bytes + other.intra_node_bytes, self.inter_node_bytes + other.inter_node_bytes)


def ring_all_reduce(payload_bytes: int, ranks: Sequence[int], ranks_per_node: int) -> Traffic:
    """Return what an all-reduce of ``payload_bytes`` among ``ranks`` sends.

    The ranks form a ring in their order, and each of the P sends ``2 (P - 1) / P`` times the payload
    to the next; a link crosses nodes if its two ranks are of different nodes. Among 2 nodes of 2 ranks,
    two of the four links do.

    Args:
        payload_bytes: Bytes that each rank contributes, gradients or weights.
        ranks: Global ranks in the order of the ring.
        ranks_per_node: How many consecutive ranks share a node.
    """
    size = len(ranks)
    link_bytes = 2 * (size - 1) * payload_bytes // size
    nodes = [rank // ranks_per_node for rank in ranks]
    links = [(nodes[index], nodes[(index + 1) % size]) for index in range(size)]
    crossing = sum(sender != receiver for sender, receiver in links)
    return Traffic((size - crossing) * link_bytes, crossing * link_bytes)


def grouped_all_reduce(payload_bytes: int, group_size: int, world_size: int, ranks_per_node: int) -> Traffic:
    """Return what all groups of a level send in one round: contiguous groups of ``group_size`` ranks."""
    rounds = [
        ring_all_reduce(payload_bytes, range(first, first + group_size), ranks_per_node)
        for first in range(0, world_size, group_size)
    ]
    return sum(rounds, Traffic())
