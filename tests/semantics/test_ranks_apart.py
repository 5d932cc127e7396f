"""Ranks whose ways parted: other orders, other histories, late comers; errors name it, and all find together again."""

from __future__ import annotations

import time
from typing import Any

import pytest

from frameworks import averagers, dist, lib
from ranks_runner import run_ranks

pytestmark = pytest.mark.usefixtures("framework")


def message_of(action: Any) -> str:
    """Return type and message of what ``action`` raises, or an empty text."""
    try:
        action()
    except averagers.AveragersError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def value(rank: int) -> lib.Tensor:
    return lib.tensor([float(rank)])


def swapped_averagers(rank: int) -> Any:
    first, second = averagers.PeriodicModelAverager(4), averagers.PeriodicModelAverager(4)
    tensors = [value(rank), value(rank)]
    order = [(first, tensors[0]), (second, tensors[1])]
    averager, tensor = order[rank]
    return message_of(lambda: averager.average_parameters([tensor])), [one.item() for one in tensors]


def test_two_averagers_called_in_another_order_on_each_rank_are_not_averaged_into_each_other() -> None:
    results = run_ranks(swapped_averagers, 2)
    assert results[0][0] == results[1][0]
    assert "DisagreementError: the ranks disagree: averager is" in results[0][0]
    assert "in the same order on every rank" in results[0][0]
    assert [tensors for _, tensors in results] == [[0.0, 0.0], [1.0, 1.0]]


def generator_read_twice(rank: int) -> Any:
    averager = averagers.PeriodicModelAverager(4, warmup_steps=1)
    params = lib.nn.Linear(1, 1).parameters()
    averager.average_parameters(params)
    return message_of(lambda: averager.average_parameters(params)), averager.step


def test_an_iterator_that_was_read_before_is_refused_and_not_an_empty_round() -> None:
    for message, step in run_ranks(generator_read_twice, 2):
        assert "InvalidValueError: params is an iterator that was read to its end at the first call" in message
        assert step == 1


def finishes(rank: int) -> Any:
    averager = averagers.PeriodicModelAverager(4)
    one, other = value(rank), value(10 * rank)
    for tensor in (one, other, one, other, one):  # the round at step 4 is for `one` alone
        averager.average_parameters([("model", tensor)])
        tensor.add_(0 if tensor is one else rank)
    averager.finish([("another model", other)])
    apart = value(rank)
    averager.step = 9
    averager.finish([("a third", apart)])
    return one.item(), other.item(), apart.item()


def test_finish_averages_unless_these_tensors_were_averaged_by_all_at_the_last_step() -> None:
    first, second = run_ranks(finishes, 2)
    assert first == second
    assert first[2] == 0.5


def finish_after_a_round(rank: int) -> Any:
    seen: list[averagers.Event] = []
    averager = averagers.PeriodicModelAverager(4, observers=[seen.append])
    tensor = value(rank)
    averager.average_parameters([tensor])
    averager.finish([tensor])
    averager.average_parameters([tensor])
    tensor.add_(rank)
    averager.finish([tensor])
    return [event.call for event in seen if isinstance(event, averagers.RoundFinished)], tensor.item()


def test_finish_right_after_a_round_of_all_ranks_only_compares() -> None:
    assert run_ranks(finish_after_a_round, 2) == [(["average_parameters", "finish"], 1.0)] * 2


def histories(rank: int) -> Any:
    """One rank alone closes an averager, one alone failed to build another; then all build one together."""
    first = averagers.PeriodicModelAverager(4)
    if rank:
        first.close()
    if rank == 0:
        with pytest.raises(averagers.InvalidValueError):
            averagers.PeriodicModelAverager(0)
    dist.barrier()
    tensor = value(rank)
    averagers.PeriodicModelAverager(4).average_parameters([tensor])
    return tensor.item()


def test_ranks_of_different_histories_build_an_averager_together() -> None:
    assert run_ranks(histories, 2) == [0.5] * 2


def refused_by_one(rank: int, how: str) -> Any:
    averager = averagers.PeriodicModelAverager(4, timeout_s=2)
    saved = averager.state_dict()
    tensor = value(rank)
    message = message_of(lambda: averager.average_parameters([tensor] if rank else [3]))
    dist.barrier()
    if how == "load":
        averager.load_state_dict(saved)
    else:
        averager = averagers.PeriodicModelAverager(4, timeout_s=2)
    averager.average_parameters([tensor])
    return message, tensor.item()


@pytest.mark.parametrize("how", ["load", "build"])
def test_after_one_rank_refused_its_input_all_go_on_by_loading_or_building(how: str) -> None:
    (own, first), (others, second) = run_ranks(refused_by_one, 2, how)
    assert own.startswith("InvalidTypeError")
    assert "rank 0 did not come" in others
    assert first == second == 0.5


def late(rank: int) -> Any:
    averager = averagers.PeriodicModelAverager(4, timeout_s=2)
    if rank:
        time.sleep(3.2)
    return message_of(lambda: averager.average_parameters([value(rank)]))


def test_a_rank_that_comes_after_the_timeout_is_named_as_one_that_did_not() -> None:
    assert "rank 1 did not come within the timeout of 2 s" in run_ranks(late, 2)[0]
