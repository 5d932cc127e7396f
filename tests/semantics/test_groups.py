"""Groups: made by members only, shared where equal, released by close, several hierarchies at once."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from frameworks import averagers, dist, lib, num_groups
from ranks_runner import run_ranks

pytestmark = pytest.mark.usefixtures("framework")


def mean_after_a_round(averager: Any, rank: int) -> float:
    tensor = lib.tensor([float(rank)])
    averager.average_parameters([tensor])
    return float(tensor.item())


def subset_then_world_then_reopened(rank: int) -> Any:
    subset = dist.new_group([1, 3])
    before = num_groups()
    found = []
    if rank in (1, 3):
        averager = averagers.PeriodicModelAverager(2, process_group=subset)
        found.append(mean_after_a_round(averager, rank))
        averager.close()
    for _ in range(3):
        averager = averagers.HierarchicalModelAverager({1: 2, 2: 4})
        found.append(mean_after_a_round(averager, rank))
        averager.close()
        averager.close()
    return found, num_groups() - before


def test_members_of_a_subset_need_nobody_else_and_groups_can_be_closed_and_reopened() -> None:
    results = run_ranks(subset_then_world_then_reopened, 4)
    assert [found for found, _ in results] == [[1.5] * 3, [2.0] + [1.5] * 3, [1.5] * 3, [2.0] + [1.5] * 3]
    assert [left for _, left in results] == [0, 0, 0, 0]


def non_contiguous_overall_group(rank: int) -> Any:
    overall = dist.new_group([0, 2, 3, 5])
    outside = rank in (1, 4)
    averager = averagers.HierarchicalModelAverager({1: 2, 2: 4}, process_group=overall)
    averager.step = 1
    inner = mean_after_a_round(averager, rank)
    outer = mean_after_a_round(averager, rank)
    groups = {period: dist.get_process_group_ranks(g) for period, g in averager.period_process_group_dict.items()}
    return inner, outer, averager.step, groups, outside, repr(averager)


def test_a_hierarchy_over_ranks_that_are_not_contiguous_has_blocks_in_their_order() -> None:
    results = run_ranks(non_contiguous_overall_group, 6)
    assert [result[0] for result in results] == [1.0, 1.0, 1.0, 4.0, 4.0, 4.0]
    assert [result[1] for result in results] == [2.5, 1.0, 2.5, 2.5, 4.0, 2.5]
    assert all(result[2] == 3 for result in results)
    assert results[0][3] == {1: [0, 2], 2: [0, 2, 3, 5]}
    assert results[5][3] == {1: [3, 5], 2: [0, 2, 3, 5]}
    assert results[1][3] == {}
    assert "no ranks (this one is outside)" in results[1][5]


def two_hierarchies_side_by_side(rank: int) -> Any:
    evens, odds = dist.new_group([0, 2, 4, 6]), dist.new_group([1, 3, 5, 7])
    mine = odds if rank % 2 else evens
    averager = averagers.HierarchicalModelAverager({1: 2, 2: 4}, process_group=mine)
    averager.step = 1
    return mean_after_a_round(averager, rank), mean_after_a_round(averager, rank)


def test_two_hierarchies_side_by_side_do_not_meet() -> None:
    results = run_ranks(two_hierarchies_side_by_side, 8)
    assert [result[0] for result in results] == [1.0, 2.0, 1.0, 2.0, 5.0, 6.0, 5.0, 6.0]
    assert [result[1] for result in results] == [3.0, 4.0] * 4


def sharing(rank: int) -> Any:
    before = num_groups()
    first = averagers.HierarchicalModelAverager({2: 2, 4: 2})
    one = num_groups() - before
    second = averagers.PeriodicModelAverager(2)
    twin = copy.deepcopy(second)
    shared = num_groups() - before
    first.close()
    second.close()
    after_two = num_groups() - before
    mean = mean_after_a_round(twin, rank)
    twin.close()
    return one, shared, after_two, num_groups() - before, mean


def test_equal_groups_are_shared_between_levels_averagers_and_copies_and_the_last_close_releases() -> None:
    for one, shared, after_two, at_end, mean in run_ranks(sharing, 2):
        assert one > 0
        assert one == shared == after_two
        assert at_end == 0
        assert mean == 0.5


def closed_and_destroyed(rank: int) -> Any:
    averager = averagers.PeriodicModelAverager(2)
    twin = copy.copy(averager)
    averager.close()
    messages = []
    for action in (averager.average_parameters, averager.finish, lambda p: averager.load_state_dict({})):
        with pytest.raises(averagers.ClosedError) as caught:
            action([lib.zeros(1)])
        messages.append(str(caught.value))
    with pytest.raises(averagers.ClosedError), averager.averaged([lib.zeros(1)]):
        pass
    dist.destroy_process_group()
    twin.close()
    with pytest.raises(averagers.NotInitializedError, match="init_process_group"):
        averagers.PeriodicModelAverager(2)
    with pytest.raises(averagers.NotInitializedError, match="start the script with"):
        averagers.average_parameters([lib.zeros(1)])
    return messages


def test_a_closed_averager_says_so_and_close_after_destroy_does_nothing() -> None:
    assert all("was closed: build a new one" in message for message in run_ranks(closed_and_destroyed, 2)[0])


def reinitialized(rank: int, folder: str) -> Any:
    means = []
    for attempt in range(2):
        dist.init_process_group("gloo", init_method=f"file://{folder}/{attempt}", rank=rank, world_size=2)
        averager = averagers.PeriodicModelAverager(2)
        means.append(mean_after_a_round(averager, rank))
        tensor = lib.tensor([float(rank)])
        averagers.average_parameters([tensor])
        means.append(tensor.item())
        dist.destroy_process_group()
    return means


def test_the_process_group_can_be_destroyed_and_made_again(tmp_path: Any) -> None:
    assert run_ranks(reinitialized, 2, str(tmp_path), initialize=False) == [[0.5] * 4] * 2


def wrong_groups(rank: int) -> Any:
    gone = dist.new_group([0, 1])
    dist.barrier(group=gone)  # a rank may have its connections before the other has its own
    dist.destroy_process_group(gone)
    messages = []
    for group in ("world", gone):
        with pytest.raises(averagers.AveragersError) as caught:
            averagers.PeriodicModelAverager(2, process_group=group)
        messages.append(str(caught.value))
    return messages


def test_a_process_group_that_is_none_or_destroyed_is_refused_by_name() -> None:
    not_a_group, destroyed = run_ranks(wrong_groups, 2)[0]
    assert ".distributed.ProcessGroup" in not_a_group
    assert "or None, got 'world' of type str" in not_a_group
    assert "process_group was destroyed" in destroyed


def copies(rank: int) -> Any:
    averager = averagers.HierarchicalModelAverager({2: 2}, warmup_steps=3)
    averager.step = 5
    twin = copy.deepcopy(averager)
    averager.step = 6
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(averager)
    return twin.step, twin.warmup_steps, list(twin.period_process_group_dict), repr(twin)


def test_deepcopy_copies_the_step_and_pickle_names_state_dict() -> None:
    text = "HierarchicalModelAverager(period_group_size_dict={2: 2}, warmup_steps=3, step=5, ranks 0-1)"
    assert run_ranks(copies, 2) == [(5, 3, [2], text)] * 2


def every_step() -> Any:
    """Return what a user may write, on the framework in use."""

    class EveryStep(averagers.ModelAverager):
        def average_parameters(self, params: Any) -> None:
            averagers.average_parameters(params, self.process_group)
            self.step += 1

    return EveryStep()


def subclass(rank: int) -> Any:
    averager = every_step()
    twin = copy.deepcopy(averager)
    mean = mean_after_a_round(averager, rank)
    shallow = copy.copy(averager)
    for wrong in (-1, 1.0, True, "1"):
        with pytest.raises((TypeError, ValueError), match="step"):
            averager.step = wrong
    return mean, averager.step, twin.step, shallow.step, averager.process_group is dist.GroupMember.WORLD


def test_a_subclass_of_model_averager_needs_average_parameters_only() -> None:
    assert run_ranks(subclass, 2) == [(0.5, 1, 0, 1, True)] * 2
    with pytest.raises(TypeError, match="abstract"):
        averagers.ModelAverager()


def round_amid_the_callers_collectives(rank: int) -> Any:
    averager = averagers.PeriodicModelAverager(2)
    other = lib.full((1000,), float(rank))
    pending = dist.all_reduce(other, async_op=True) if rank == 0 else None
    mean = mean_after_a_round(averager, rank)
    pending = pending or dist.all_reduce(other, async_op=True)
    pending.wait()
    return mean, other[0].item()


def test_a_round_never_pairs_with_a_collective_of_the_caller() -> None:
    assert run_ranks(round_amid_the_callers_collectives, 2) == [(0.5, 1.0)] * 2
