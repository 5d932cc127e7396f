"""The bytes of a collective on the links within nodes and between them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from averagers.cli.traffic import Traffic, grouped_all_reduce, ring_all_reduce

# By hand: (ranks, ranks per node) of a ring, then bytes within nodes and between them for 1200 bytes a rank.
# Each link carries 2(P-1)/P x 1200: 1200, 1800, 1600 and 2100 for 2, 4, 3 and 8 ranks.
RINGS = [
    ((0,), 2, 0, 0),
    ((0, 1), 2, 2 * 1200, 0),
    ((1, 2), 2, 0, 2 * 1200),
    ((0, 1, 2, 3), 2, 2 * 1800, 2 * 1800),
    ((0, 1, 2, 3), 4, 4 * 1800, 0),
    ((0, 1, 2, 3), 1, 0, 4 * 1800),
    ((0, 2, 1, 3), 2, 0, 4 * 1800),
    ((0, 1, 2), 2, 1600, 2 * 1600),
    (tuple(range(8)), 4, 6 * 2100, 2 * 2100),
]


@pytest.mark.parametrize(("ranks", "ranks_per_node", "within", "between"), RINGS)
def test_a_ring_sends_these_bytes(ranks: tuple[int, ...], ranks_per_node: int, within: int, between: int) -> None:
    assert ring_all_reduce(1200, ranks, ranks_per_node) == Traffic(within, between)


def test_a_level_sends_what_all_its_groups_send() -> None:
    assert grouped_all_reduce(1200, 1, 4, 2) == Traffic(0, 0)
    assert grouped_all_reduce(1200, 2, 4, 2) == Traffic(4 * 1200, 0)
    assert grouped_all_reduce(1200, 4, 4, 2) == Traffic(2 * 1800, 2 * 1800)


@given(st.integers(0, 10**9), st.integers(1, 12), st.integers(1, 12))
def test_within_and_between_are_all_that_the_ranks_send(payload_bytes: int, size: int, ranks_per_node: int) -> None:
    traffic = ring_all_reduce(payload_bytes, range(size), ranks_per_node)
    all_links = traffic.intra_node_bytes + traffic.inter_node_bytes
    assert all_links == pytest.approx(2 * (size - 1) * payload_bytes, abs=size)


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=5))
def test_traffic_adds_up_part_by_part(parts: list[tuple[int, int]]) -> None:
    total = sum((Traffic(within, between) for within, between in parts), Traffic())
    assert total == Traffic(sum(within for within, _ in parts), sum(between for _, between in parts))
