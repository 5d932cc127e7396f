"""Ranks that disagree: all raise the same error, nothing is averaged, and the next round works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from frameworks import averagers, lib
from ranks_runner import run_ranks

pytestmark = pytest.mark.usefixtures("framework")


def outcome(action: Callable[[], Any]) -> str:
    """Return what ``action`` raised, or that it raised nothing."""
    try:
        action()
    except averagers.AveragersError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


def values(count: int = 3) -> list[lib.nn.Parameter]:
    return [lib.nn.Parameter(lib.full((4, 4), float(index))) for index in range(count)]


def every_disagreement(rank: int) -> dict[str, str]:
    params = values()
    averager = averagers.PeriodicModelAverager(2)
    found = {}

    def attempt(what: str, action: Callable[[], Any]) -> None:
        averager.step = 0
        found[what] = outcome(action)

    def off_by_a_round() -> None:
        averager.step = 2 if rank == 3 else 0
        averager.average_parameters(params)

    attempt("step", off_by_a_round)
    found["step did not advance"] = str(averager.step == (2 if rank == 3 else 0))
    attempt("count", lambda: averager.average_parameters(params[: 2 if rank == 3 else 3]))
    attempt("shape", lambda: averager.average_parameters([("w", params[0] if rank else lib.zeros(4, 5))]))
    attempt("dtype", lambda: averager.average_parameters([params[0] if rank else lib.zeros(4, 4).double()]))
    attempt("strides", lambda: averager.average_parameters([params[0] if rank else lib.zeros(4, 4).t()]))
    attempt("names", lambda: averager.average_parameters([("a" if rank else "b", params[0])]))
    attempt("call", lambda: averager.average_parameters(params) if rank else averager.finish(params))
    attempt("emptiness", lambda: averager.average_parameters(params if rank else []))
    found["unchanged"] = str(all((p == index).all().item() for index, p in enumerate(params)))
    with lib.no_grad():
        params[0].fill_(rank)
    attempt("agreement afterwards", lambda: averager.average_parameters(params))
    found["averaged"] = str(params[0][0, 0].item())
    return found


def test_every_rank_says_the_same_of_every_disagreement_and_the_next_round_works() -> None:
    results = run_ranks(every_disagreement, 4)
    assert all(result == results[0] for result in results)
    found = results[0]
    assert "step is 2 on rank 3, 0 on ranks 0-2" in found["step"]
    assert found["step did not advance"] == "True"
    assert "there are 2 tensors on rank 3, 3 tensors on ranks 0-2" in found["count"]
    assert "`w`: (4, 5) float32 on rank 0, (4, 4) float32 on ranks 1-3" in found["shape"]
    assert "(4, 4) float64 on rank 0" in found["dtype"]
    assert "in memory order (1, 0) on rank 0" in found["strides"]
    assert "`b` (4, 4) float32 on rank 0, `a` (4, 4) float32 on ranks 1-3" in found["names"]
    assert "call is finish on rank 0, average_parameters on ranks 1-3" in found["call"]
    assert "there are 0 tensors on rank 0" in found["emptiness"]
    assert found["unchanged"] == "True"
    assert found["agreement afterwards"] == "nothing raised"
    assert found["averaged"] == "1.5"


def unequal_construction(rank: int) -> list[str]:
    build = [
        lambda: averagers.PeriodicModelAverager(4 if rank == 3 else 2),
        lambda: averagers.PeriodicModelAverager(4, warmup_steps=rank // 2),
        lambda: averagers.PeriodicModelAverager(4, bucket_bytes=100 + rank // 3),
        lambda: averagers.PeriodicModelAverager(4, timeout_s=5 + rank // 3),
        lambda: averagers.PeriodicModelAverager(4, measure_drift=rank == 0),
        lambda: averagers.PeriodicModelAverager(4) if rank else averagers.HierarchicalModelAverager({4: 4}),
        lambda: averagers.HierarchicalModelAverager({2: 2, 4: 4} if rank else {2: 1, 4: 4}),
        lambda: averagers.PeriodicModelAverager(4, codec=averagers.Int8(), offload=None if rank else "cpu"),
        lambda: averagers.PeriodicModelAverager(4, observers=[print] if rank else []),
    ]
    return [outcome(one) for one in build]


def test_unequal_arguments_are_found_at_construction() -> None:
    results = run_ranks(unequal_construction, 4)
    assert all(result == results[0] for result in results)
    period, warmup, bucket, timeout, drift, kind, levels, offload, observers = results[0]
    assert "DisagreementError: the ranks disagree: period is 4 on rank 3, 2 on ranks 0-2" in period
    assert "warmup_steps is 0 on ranks 0-1, 1 on ranks 2-3" in warmup
    assert "bucket_bytes is 101 on rank 3, 100 on ranks 0-2" in bucket
    assert "timeout_s is 6.0 on rank 3, 5.0 on ranks 0-2" in timeout
    assert "measure_drift is True on rank 0, False on ranks 1-3" in drift
    assert "class is HierarchicalModelAverager on rank 0, PeriodicModelAverager on ranks 1-3" in kind
    assert "period_group_size_dict is {2: 1, 4: 4} on rank 0, {2: 2, 4: 4} on ranks 1-3" in levels
    assert "offload is ['cpu'] on rank 0, [None] on ranks 1-3" in offload
    assert observers == "nothing raised"
