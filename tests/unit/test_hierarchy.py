"""With whom to average: how levels are checked and sorted, and which ranks a group has."""

from __future__ import annotations

from collections import OrderedDict
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from averagers.errors import AveragersError
from averagers.hierarchy import Hierarchy, Level, block_of, split_by_node


def _hierarchy(*sizes: int) -> Hierarchy:
    """Return a hierarchy with levels of these sizes."""
    return Hierarchy.from_periods({2**level: size for level, size in enumerate(sizes)}, overall_size=sizes[-1])


def test_groups_of_two_of_eight_ranks_are_neighbors() -> None:
    ranks = list(range(8))
    groups = [block_of(rank, ranks, 2) for rank in ranks]
    assert groups == [(0, 1), (0, 1), (2, 3), (2, 3), (4, 5), (4, 5), (6, 7), (6, 7)]


def test_groups_follow_the_order_of_the_overall_group_not_of_the_rank_numbers() -> None:
    assert block_of(2, [9, 2, 7, 4], 2) == (9, 2)
    assert block_of(7, [9, 2, 7, 4], 2) == (7, 4)
    assert block_of(4, [9, 2, 7, 4], 4) == (9, 2, 7, 4)


@given(data=st.data())
def test_groups_of_a_level_partition_the_ranks_and_nest_in_the_next(data: st.DataObject) -> None:
    factors = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    sizes = []
    for factor in factors:
        sizes.append(factor * (sizes[-1] if sizes else 1))
    overall = sizes[-1]
    ranks = data.draw(st.lists(st.integers(0, 10_000), min_size=overall, max_size=overall, unique=True))
    for level, size in enumerate(sizes):
        blocks = [tuple(ranks[start : start + size]) for start in range(0, overall, size)]
        for rank in ranks:
            assert block_of(rank, ranks, size) == next(block for block in blocks if rank in block)
            if level:
                assert set(block_of(rank, ranks, sizes[level - 1])) <= set(block_of(rank, ranks, size))


@given(order=st.permutations([(2, 2), (3, 4), (7, 8), (40, 16)]))
def test_levels_are_sorted_by_period_whatever_the_order_given(order: list[tuple[int, int]]) -> None:
    hierarchy = Hierarchy.from_periods(dict(order), overall_size=16)
    assert hierarchy.levels == (Level(2, 2), Level(3, 4), Level(7, 8), Level(40, 16))
    assert hierarchy.periods == (2, 3, 7, 40)


@pytest.mark.parametrize("kind", [dict, OrderedDict, lambda pairs: MappingProxyType(dict(pairs))])
def test_any_mapping_will_do(kind: object) -> None:
    hierarchy = Hierarchy.from_periods(kind([(2, 2), (4, 4)]), overall_size=4)  # type: ignore[operator]
    assert hierarchy.levels == (Level(2, 2), Level(4, 4))


def test_two_levels_of_one_size_are_accepted() -> None:
    hierarchy = Hierarchy.from_periods({2: 4, 6: 4}, overall_size=4)
    assert hierarchy.levels == (Level(2, 4), Level(6, 4))


def test_a_rank_outside_cannot_know_the_overall_size_and_is_not_asked() -> None:
    assert Hierarchy.from_periods({2: 2, 4: 6}, overall_size=None).periods == (2, 4)


@pytest.mark.parametrize("given_value", [None, {}, OrderedDict()])
def test_no_levels_are_refused_by_name_and_value(given_value: object) -> None:
    with pytest.raises(ValueError, match="period_group_size_dict must name at least one level") as caught:
        Hierarchy.from_periods(given_value, overall_size=4)
    assert repr(given_value) in str(caught.value)
    assert isinstance(caught.value, AveragersError)


@pytest.mark.parametrize("given_value", [[(2, 4)], {2, 4}, 4, "2:4"])
def test_what_is_no_mapping_is_refused_by_name_and_type(given_value: object) -> None:
    with pytest.raises(TypeError, match="period_group_size_dict must map periods to group sizes") as caught:
        Hierarchy.from_periods(given_value, overall_size=4)
    assert type(given_value).__name__ in str(caught.value)
    assert isinstance(caught.value, AveragersError)


@pytest.mark.parametrize("period", [0, -4])
def test_a_period_below_one_is_refused_wherever_it_stands(period: int) -> None:
    for sizes in ({period: 2, 8: 4}, {8: 4, period: 2}):
        with pytest.raises(ValueError, match=f"each period in .* must be at least 1, got {period}"):
            Hierarchy.from_periods(sizes, overall_size=4)


@pytest.mark.parametrize("size", [0, -2])
def test_a_size_below_one_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=rf"group size of period 2 .* must be at least 1, got {size}"):
        Hierarchy.from_periods({2: size, 8: 4}, overall_size=4)


@pytest.mark.parametrize("wrong", [True, 2.0, "2"])
def test_a_period_or_size_that_is_no_int_is_refused_by_name(wrong: object) -> None:
    with pytest.raises(TypeError, match="each period in period_group_size_dict must be an int"):
        Hierarchy.from_periods({wrong: 2, 8: 4}, overall_size=4)
    with pytest.raises(TypeError, match="group size of period 3 in period_group_size_dict must be an int"):
        Hierarchy.from_periods({3: wrong, 8: 4}, overall_size=4)


@pytest.mark.parametrize(("inner", "outer"), [(4, 2), (4, 6), (3, 8)])
def test_sizes_that_do_not_nest_are_refused_with_both_numbers(inner: int, outer: int) -> None:
    with pytest.raises(ValueError, match="must each divide the next longer period's") as caught:
        Hierarchy.from_periods({2: inner, 4: outer}, overall_size=outer)
    assert f"groups of {outer}" in str(caught.value)
    assert f"the {inner} of period 2" in str(caught.value)


@pytest.mark.parametrize("overall_size", [1, 3, 5, 8])
def test_the_longest_periods_size_must_be_the_overall_groups(overall_size: int) -> None:
    with pytest.raises(ValueError, match="must be the size of the overall process group") as caught:
        Hierarchy.from_periods({4: 4, 2: 2}, overall_size=overall_size)
    assert "period 4 has groups of 4" in str(caught.value)
    assert f"has {overall_size} rank" in str(caught.value)


def test_the_longest_period_decides_not_the_last_one_given() -> None:
    assert Hierarchy.from_periods({16: 8, 4: 2}, overall_size=8).levels[-1] == Level(16, 8)
    with pytest.raises(ValueError, match="period 16 has groups of 2"):
        Hierarchy.from_periods({16: 2, 4: 1}, overall_size=8)


# Nodes


def test_a_level_over_two_nodes_of_two_ranks_is_split_by_node_and_by_place() -> None:
    found = [split_by_node(range(4), "aabb", group_size=4, rank=rank) for rank in range(4)]
    assert found == [((0, 1), (0, 2)), ((0, 1), (1, 3)), ((2, 3), (0, 2)), ((2, 3), (1, 3))]


def test_ranks_of_a_node_need_not_be_neighbors() -> None:
    found = [split_by_node([9, 2, 7, 4], "abab", group_size=4, rank=rank) for rank in (9, 2, 7, 4)]
    assert found == [((9, 7), (9, 2)), ((2, 4), (9, 2)), ((9, 7), (7, 4)), ((2, 4), (7, 4))]


@pytest.mark.parametrize(
    ("nodes", "group_size"),
    [
        ("aaaa", 4),  # one node
        ("abcd", 4),  # one rank on each
        ("aaab", 4),  # unequal
        ("aabb", 2),  # the groups of the level do not leave their nodes
        ("aabbcccc", 4),  # one group of the level would be split and the other not
    ],
)
def test_a_level_that_gains_nothing_is_not_split_on_any_rank(nodes: str, group_size: int) -> None:
    ranks = range(len(nodes))
    assert {split_by_node(ranks, nodes, group_size=group_size, rank=rank) for rank in ranks} == {None}


@given(num_nodes=st.integers(2, 4), ranks_per_node=st.integers(2, 4), num_groups=st.integers(1, 3), data=st.data())
def test_every_pair_of_a_node_and_a_place_is_one_rank(
    num_nodes: int, ranks_per_node: int, num_groups: int, data: st.DataObject
) -> None:
    size = num_nodes * ranks_per_node
    blocks = [data.draw(st.permutations(list(range(num_nodes)) * ranks_per_node)) for _ in range(num_groups)]
    nodes = [(block, node) for block, order in enumerate(blocks) for node in order]
    ranks = list(range(size * num_groups))
    for rank in ranks:
        split = split_by_node(ranks, nodes, group_size=size, rank=rank)
        assert split is not None
        within, across = split
        assert {nodes[member] for member in within} == {nodes[rank]}
        assert len({nodes[member] for member in across}) == len(across) == num_nodes
        assert set(within) & set(across) == {rank}
        for other in across:
            assert split_by_node(ranks, nodes, group_size=size, rank=other)[1] == across  # type: ignore[index]
