"""What an averager refuses at construction, what it does alone, and where its end is."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from frameworks import averagers, dist, lib
from ranks_runner import run_ranks

pytestmark = pytest.mark.usefixtures("framework")


def refusal(build: Any) -> str:
    """Return type and message of what ``build`` raises."""
    with pytest.raises(averagers.AveragersError) as caught:
        build()
    return f"{type(caught.value).__name__}: {caught.value}"


def wrong_arguments(rank: int) -> list[str]:
    periodic, hierarchical = averagers.PeriodicModelAverager, averagers.HierarchicalModelAverager
    return [
        refusal(build)
        for build in (
            lambda: periodic(0),
            lambda: periodic(True),
            lambda: periodic(2.0),
            lambda: periodic(2, -1),
            lambda: periodic(2, "1"),
            lambda: periodic(2, bucket_bytes=0),
            lambda: periodic(2, bucket_bytes=1.5),
            lambda: periodic(2, timeout_s=0),
            lambda: periodic(2, timeout_s=float("nan")),
            lambda: periodic(2, timeout_s="1"),
            lambda: periodic(2, observers=[3]),
            lambda: periodic(2, observers=3),
            lambda: periodic(2, measure_drift=1),
            hierarchical,
            lambda: hierarchical({}),
            lambda: hierarchical([2, 2]),
            lambda: hierarchical({2: 1}),
            lambda: hierarchical({2: 2, 4: 3}),
            lambda: hierarchical({2: 2, 4: 1}),
            lambda: hierarchical({0: 2}),
            lambda: hierarchical({2: 0}),
            lambda: hierarchical({2: 2.0}),
            lambda: hierarchical({"2": 2}),
        )
    ]


def test_a_wrong_argument_is_refused_by_name_value_and_rule() -> None:
    results = run_ranks(wrong_arguments, 2)
    assert results[0] == results[1]
    for message, words in zip(
        results[0],
        (
            "InvalidValueError: period must be at least 1, got 0",
            "InvalidTypeError: period must be an int, got True of type bool",
            "InvalidTypeError: period must be an int, got 2.0 of type float",
            "InvalidValueError: warmup_steps must be at least 0, got -1",
            "InvalidTypeError: warmup_steps must be an int, got '1' of type str",
            "InvalidValueError: bucket_bytes must be at least 1, got 0",
            "InvalidTypeError: bucket_bytes must be an int, got 1.5",
            "InvalidValueError: timeout_s must be from 0.001 to 31622400 seconds, got 0",
            "InvalidValueError: timeout_s must be from 0.001 to 31622400 seconds, got nan",
            "InvalidTypeError: timeout_s must be a number of seconds or None, got '1'",
            "InvalidTypeError: each of observers must be callable with an event, got 3",
            "InvalidTypeError: observers must be a list of callables, got 3",
            "InvalidTypeError: measure_drift must be True or False, got 1",
            "InvalidValueError: period_group_size_dict must name at least one level, such as {4: 8, 16: 64}, got None",
            "InvalidValueError: period_group_size_dict must name at least one level, such as {4: 8, 16: 64}, got {}",
            "InvalidTypeError: period_group_size_dict must map periods to group sizes",
            "period 2 has groups of 1, the process group has 2 ranks",
            "period 4 has groups of 3, which is not a multiple of the 2 of period 2",
            "period 4 has groups of 1, which is not a multiple of the 2 of period 2",
            "InvalidValueError: each period in period_group_size_dict must be at least 1, got 0",
            "InvalidValueError: the group size of period 2 in period_group_size_dict must be at least 1, got 0",
            "InvalidTypeError: the group size of period 2 in period_group_size_dict must be an int, got 2.0",
            "InvalidTypeError: each period in period_group_size_dict must be an int, got '2'",
        ),
        strict=True,
    ):
        assert words in message


def alone(rank: int) -> Any:
    averager = averagers.HierarchicalModelAverager({1: 1, 2: 1})
    weight = lib.nn.Parameter(lib.tensor([1.0, -0.0]))
    address, version = weight.data_ptr(), weight._version
    for _ in range(3):
        averager.average_parameters([weight])
    averager.finish([weight])
    averager.broadcast([("weight", weight)])
    with averager.averaged([weight]):
        pass
    refused = refusal(lambda: averager.average_parameters(weight) or averager.finish(weight))
    return averager.step, weight.data_ptr() == address, weight._version == version, refused


def test_a_world_of_one_counts_checks_and_touches_nothing() -> None:
    step, same_place, untouched, refused = run_ranks(alone, 1)[0]
    assert (step, same_place, untouched) == (4, True, True)
    assert "got a single Parameter" in refused


def destroyed_world(rank: int) -> Any:
    averager = averagers.PeriodicModelAverager(2)
    usable = averager.is_usable
    dist.destroy_process_group()
    return usable, averager.is_usable, refusal(lambda: averager.average_parameters([lib.zeros(1)]))


def test_after_the_process_group_was_destroyed_a_round_says_so() -> None:
    for usable, usable_after, refused in run_ranks(destroyed_world, 2):
        assert usable
        assert not usable_after
        assert "ClosedError: the process group of this PeriodicModelAverager was destroyed" in refused


def unserved_device(rank: int) -> Any:
    averager = averagers.PeriodicModelAverager(2)
    averager._routes.levels[0].group.lanes[0].device_types = frozenset({"cuda"})  # as NCCL's are
    return refusal(lambda: averager.average_parameters([("weight", lib.zeros(1))]))


def test_a_tensor_where_the_backend_cannot_reach_is_refused_before_anything_is_sent() -> None:
    for refused in run_ranks(unserved_device, 2):
        assert "tensor weight is on cpu, but the process group's backend serves cuda only" in refused


def quiet_run(rank: int) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        averager = averagers.HierarchicalModelAverager({1: 1, 2: 2})
        averager.average_parameters([lib.zeros(3)])
    with pytest.warns(UserWarning, match="period of 1"):
        averagers.HierarchicalModelAverager({1: 2})
    return averager.step


def test_only_a_longest_period_of_one_warns() -> None:
    assert run_ranks(quiet_run, 2) == [1, 1]
