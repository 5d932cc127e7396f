"""What ranks compare before a round, and what a disagreement says; in one process."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from averagers.errors import DisagreementError
from averagers.reduction.groups import Group
from averagers.reduction.selection import Listing, TensorDescription
from averagers.safety.agreement import Statement, agree, explain_difference, format_ranks


class Done:
    """A collective that has ended."""

    def wait(self) -> None:
        pass

    def ends_within(self, seconds: float) -> bool:
        return True


class ThreadLane:
    """A process group whose ranks are threads of this process."""

    def __init__(self, rank: int, size: int, shared: dict[str, object], barrier: threading.Barrier) -> None:
        self._rank = rank
        self._size = size
        self._shared = shared
        self._barrier = barrier

    def _exchange(self, kind: str, value: object) -> list[object]:
        self._shared[f"{kind}{self._rank}"] = value
        self._barrier.wait(5)
        values = [self._shared[f"{kind}{rank}"] for rank in range(self._size)]
        self._barrier.wait(5)
        return values

    def gather_bytes(self, payload: bytes) -> tuple[Done, Callable[[], list[bytes]]]:
        payloads = self._exchange("gather", payload)
        assert len({len(one) for one in payloads}) == 1
        return Done(), lambda: payloads


def thread_group(rank: int, size: int, shared: dict[str, object], barrier: threading.Barrier) -> Group:
    lane = ThreadLane(rank, size, shared, barrier)
    return Group([lane], tuple(range(size)), rank, timeout_s=5.0, name="threads", marks=None)


def agree_in_threads(statements: Sequence[Statement]) -> list[str | None]:
    """Return each rank's error message, or None where it agreed."""
    shared: dict[str, object] = {}
    barrier = threading.Barrier(len(statements))
    outcomes: list[str | None] = [None] * len(statements)

    def run(rank: int) -> None:
        try:
            agree(thread_group(rank, len(statements), shared, barrier), statements[rank])
        except DisagreementError as error:
            outcomes[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(statements))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return outcomes


def tensor(name: str, *shape: int, dtype: str = "float32", order: tuple[int, ...] | None = None) -> TensorDescription:
    return TensorDescription(name, shape, dtype, tuple(range(len(shape))) if order is None else order, "cpu:0")


def statement(*tensors: TensorDescription, **facts: object) -> Statement:
    return Statement({"call": "average_parameters", "step": 4, **facts}, Listing(tensors, 0))


def difference(*statements: Statement) -> str:
    return explain_difference(range(len(statements)), [json.loads(one.details()) for one in statements])


facts = st.dictionaries(st.sampled_from(["call", "step", "period"]), st.integers(0, 3), min_size=1)
shapes = st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 3)), max_size=3)


@given(st.lists(st.tuples(facts, shapes), min_size=2, max_size=4))
def test_all_ranks_say_the_same_and_agree_exactly_if_their_statements_are_equal(given_: list) -> None:
    statements = [Statement(f, Listing(tuple(tensor(n, s) for n, s in ts), 0)) for f, ts in given_]
    outcomes = agree_in_threads(statements)
    if all(one == given_[0] for one in given_):
        assert outcomes == [None] * len(statements)
    else:
        assert outcomes[0] is not None
        assert len(set(outcomes)) == 1


def test_a_different_step_names_the_ranks_on_each_side() -> None:
    text = difference(statement(), statement(), statement(), statement(step=5))
    assert text.startswith("the ranks disagree: step is 5 on rank 3, 4 on ranks 0-2; every rank must call")


def test_a_different_setting_is_named() -> None:
    assert "period is 4 on rank 0, 8 on rank 1" in difference(statement(period=4), statement(period=8))


def test_a_setting_that_one_rank_lacks_is_missing_there() -> None:
    assert "period is 4 on rank 0, missing on rank 1" in difference(statement(period=4), statement())


def test_counts_and_the_first_different_tensor_are_named() -> None:
    three = [statement(tensor("a", 2), tensor("head.weight", 12, 64), tensor("b", 1)) for _ in range(3)]
    text = difference(*three, statement(tensor("a", 2), tensor("head.weight", 10, 64)))
    assert "there are 2 tensors on rank 3, 3 tensors on ranks 0-2" in text
    assert "the first difference is `head.weight`: (10, 64) float32 on rank 3, (12, 64) float32 on ranks 0-2" in text


def test_a_different_order_of_names_shows_both_names() -> None:
    text = difference(statement(tensor("a", 2), tensor("b", 2)), statement(tensor("b", 2), tensor("a", 2)))
    assert "tensor 0: `a` (2,) float32 on rank 0, `b` (2,) float32 on rank 1" in text


def test_a_different_memory_order_is_shown() -> None:
    text = difference(statement(tensor("w", 2, 3)), statement(tensor("w", 2, 3, order=(1, 0))))
    assert "`w`: (2, 3) float32 on rank 0, (2, 3) float32 with dimensions in memory order (1, 0) on rank 1" in text


def test_a_different_device_is_shown() -> None:
    there = TensorDescription("w", (2,), "float32", (0,), "cuda:0")
    assert "(2,) float32 on device cuda:0 on rank 1" in difference(statement(tensor("w", 2)), statement(there))


def test_no_tensors_against_some_is_a_difference() -> None:
    assert "there are 0 tensors on rank 0, 1 tensor on rank 1" in difference(statement(), statement(tensor("w", 2)))


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([0, 1], "ranks 0-1"), ([2, 0, 1, 5], "ranks 0-2, 5"), ([1, 3], "ranks 1, 3")],
)
def test_ranks_are_written_in_runs(ranks: list[int], text: str) -> None:
    assert format_ranks(ranks) == text
