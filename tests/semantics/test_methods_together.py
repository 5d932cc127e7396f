"""Methods together, where one reaches into another: ends, resumption, weights, settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from frameworks import averagers, bits, lib
from ranks_runner import run_ranks

pytestmark = pytest.mark.usefixtures("framework")


def _joined(rank: int, name: str, lengths: list[int]) -> list[float]:
    options: dict[str, Any] = {
        "delayed": {"overlap": averagers.Delayed(2)},
        "at once, keeping": {"overlap": averagers.Delayed(0, keep=0.5)},
        "carried": {"overlap": averagers.Delayed(2, carry=True)},
        "elastic": {"mixer": averagers.Elastic(0.2)},
    }[name]
    averager = averagers.PeriodicModelAverager(4, **options)
    weight = lib.zeros(3)
    for _ in range(lengths[rank]):
        weight.add_(float(rank + 1))
        averager.average_parameters([weight])
    averager.join([weight])
    return weight.tolist()


@pytest.mark.parametrize("lengths", [[5, 5], [2, 9], [1, 1], [0, 7]])
@pytest.mark.parametrize("name", ["delayed", "at once, keeping", "carried", "elastic"])
def test_ranks_that_a_round_left_apart_join_as_one_model(name: str, lengths: list[int]) -> None:
    results = run_ranks(_joined, 2, name, lengths)
    assert results[0] == results[1]


def _ended(rank: int, name: str) -> tuple[list[list[bytes]], list[list[bytes]]]:
    """End a run right after a round and between rounds, by finish and by join, stopped or not before the end."""
    makers: dict[str, Callable[[], Any]] = {
        "nesterov": lambda: averagers.PeriodicModelAverager(4, mixer=averagers.Nesterov()),
        "delayed": lambda: averagers.PeriodicModelAverager(4, overlap=averagers.Delayed(1)),
        "weights": lambda: averagers.PeriodicModelAverager(4),
    }
    found: tuple[list[list[bytes]], list[list[bytes]]] = ([], [])
    for steps in (9, 11):
        for end in ("finish", "join"):
            for is_stopped in (False, True):
                averager, tensor = makers[name](), lib.zeros(3)
                for _ in range(steps):
                    tensor.add_(float(rank + 1))
                    averager.average_parameters([tensor], weight=1 + rank if name == "weights" else None)
                if is_stopped:
                    state = averager.state_dict()
                    averager = makers[name]()
                    averager.load_state_dict(state)
                getattr(averager, end)([tensor])
                found[is_stopped].append([bits(tensor)])
    return found


@pytest.mark.parametrize("name", ["nesterov", "delayed", "weights"])
def test_a_run_stopped_before_its_end_ends_as_the_one_that_was_not(name: str) -> None:
    for straight, resumed in run_ranks(_ended, 2, name):
        assert straight == resumed


def _inner_weights(rank: int) -> list[float]:
    """An outer round that leaves replicas apart leaves the weights of the levels within as they are."""
    averager = averagers.HierarchicalModelAverager({4: 2, 8: 4}, overlap={8: averagers.Delayed(2, keep=1.0)})
    weight = lib.zeros(2)
    for step in range(13):
        weight.add_(float(rank))
        averager.average_parameters([weight], weight=(100.0 if rank == 0 else 1.0) if step == 6 else 1.0)
        if step == 10:
            weight.fill_(float(rank))
    return weight.tolist()


def test_weights_of_a_level_are_summed_since_its_own_last_round() -> None:
    # Round of ranks 0 and 1 at step 12, two steps after they were at 0 and 1; steps 5 to 12, of which one weighed 100.
    results = run_ranks(_inner_weights, 4)
    assert results[0] == results[1] == pytest.approx([(0.0 * 107 + 3.0 * 8) / 115] * 2)


def _settings(rank: int) -> str:
    averager = averagers.PeriodicModelAverager(
        2, mixer=averagers.Outer(lambda params: lib.optim.SGD(params, lr=0.1 * (rank + 1)))
    )
    weight = lib.zeros(3)
    averager.average_parameters([weight])
    averager.step = 2
    with pytest.raises(averagers.DisagreementError) as caught:
        averager.average_parameters([weight])
    return str(caught.value)


def test_outer_optimizers_of_other_settings_are_told_apart() -> None:
    for message in run_ranks(_settings, 2):
        assert "the mixer's settings is SGD with" in message


def _step_set_back(rank: int) -> int:
    events: list[Any] = []
    averager = averagers.PeriodicModelAverager(schedule=averagers.Adaptive(), observers=[events.append])
    averager.load_state_dict({**averager.state_dict(), "step": 500, "schedule": {"next_step": 600, "period": 8}})
    averager.step = 0
    for _ in range(20):
        averager.average_parameters([lib.zeros(3)])
    return sum(isinstance(event, averagers.RoundFinished) for event in events)


def test_rounds_go_on_where_the_step_is_set_back() -> None:
    assert all(rounds >= 1 for rounds in run_ranks(_step_set_back, 2))


def _elastic_above_a_codec(rank: int) -> float:
    """Return how far a codec of the level within, below elastic averaging, takes the weights from those without."""
    makers = [
        averagers.HierarchicalModelAverager({2: 2, 8: 4}, mixer={8: averagers.Elastic(0.2)}, codec={2: codec})
        for codec in (averagers.Int8(), None)
    ]
    tensors, worst = [lib.zeros(300), lib.zeros(300)], 0.0
    for _ in range(21):
        for averager, tensor in zip(makers, tensors, strict=True):
            tensor.add_(lib.linspace(-1, 1, 300), alpha=rank + 1)
            averager.average_parameters([tensor])
        worst = max(worst, float((tensors[0] - tensors[1]).abs().max().item()))
    return worst


def test_a_codec_within_counts_from_what_its_group_has_in_common_below_elastic_averaging() -> None:
    # Counted from each replica's own weights they were 1.5 apart.
    assert max(run_ranks(_elastic_above_a_codec, 4)) <= 0.3
