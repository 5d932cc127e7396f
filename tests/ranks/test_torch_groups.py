"""Process groups as torch has them: timeouts, worlds of thousands, bound devices."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import averagers
from ranks_runner import run_ranks


def num_groups() -> int:
    return len(c10d._world.pg_map)


def own_timeout(rank: int) -> Any:
    default = averagers.PeriodicModelAverager(2)
    short = averagers.PeriodicModelAverager(2, timeout_s=7.5)
    groups = [averager._routes.levels[0].group for averager in (default, short)]
    options = [g.handle._get_backend(torch.device("cpu")).options._timeout.total_seconds() for g in groups]
    return options, groups[0] is groups[1]


def test_a_group_has_its_parents_timeout_unless_given_another() -> None:
    assert run_ranks(own_timeout, 2, group_timeout_s=23) == [([23.0, 7.5], False)] * 2


def fake_world() -> Any:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1234, world_size=4096)
    averager = averagers.HierarchicalModelAverager({2: 8, 8: 64, 32: 512, 128: 2048, 512: 4096})
    groups = averager.period_process_group_dict
    return {period: (g.size(), dist.get_process_group_ranks(g)[0]) for period, g in groups.items()}


def members_only(rank: int) -> Any:
    before = num_groups()
    found = fake_world()
    return found, num_groups() - before


def test_a_rank_of_4096_makes_only_its_own_groups() -> None:
    found, made = run_ranks(members_only, 1, initialize=False)[0]
    assert found == {2: (8, 1232), 8: (64, 1216), 32: (512, 1024), 128: (2048, 0), 512: (4096, 0)}
    assert made == 5 + 1  # and the world


def bound_device(rank: int) -> Any:
    world = dist.group.WORLD
    world.bound_device_id = torch.device("cuda", 0)
    averager = averagers.PeriodicModelAverager(2)
    return str(world.bound_device_id), str(averager._routes.levels[0].group.handle.bound_device_id)


def test_a_device_bound_to_the_world_does_not_make_new_groups_a_collective_of_the_world() -> None:
    assert run_ranks(bound_device, 2) == [("cuda:0", "None")] * 2
