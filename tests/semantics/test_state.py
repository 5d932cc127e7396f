"""What an averager saves and loads, how a run ends, and the mean for evaluation."""

from __future__ import annotations

from typing import Any

import pytest

from frameworks import averagers, bits, lib
from ranks_runner import run_ranks

pytestmark = pytest.mark.usefixtures("framework")


def _train(averager: Any, weight: Any, rank: int, steps: int) -> None:
    for _ in range(steps):
        with lib.no_grad():
            weight.add_((rank + 1) * 0.1)
        averager.average_parameters([("weight", weight)])


def _stopped_and_resumed(rank: int) -> list[bytes]:
    straight, through = lib.zeros(5), averagers.HierarchicalModelAverager({2: 2, 4: 4}, warmup_steps=1)
    _train(through, straight, rank, 11)
    before, first = lib.zeros(5), averagers.HierarchicalModelAverager({2: 2, 4: 4}, warmup_steps=1)
    _train(first, before, rank, 5)
    saved, values = first.state_dict(), before.tolist()
    first.close()
    resumed, second = lib.tensor(values), averagers.HierarchicalModelAverager({2: 2, 4: 4}, warmup_steps=1)
    second.load_state_dict(saved)
    _train(second, resumed, rank, 6)
    return [bits(straight), bits(resumed)]


def test_a_resumed_run_equals_the_one_that_was_not_stopped() -> None:
    for straight, resumed in run_ranks(_stopped_and_resumed, 4):
        assert straight == resumed


def _wrong_states(rank: int) -> list[str]:
    averager = averagers.PeriodicModelAverager(4)
    messages = []
    for state in (
        averagers.PeriodicModelAverager(8).state_dict(),
        {"step": 3},
        {**averager.state_dict(), "step": -1},
        None,
    ):
        with pytest.raises(averagers.StateDictError) as caught:
            averager.load_state_dict(state)
        messages.append(str(caught.value))
    return [*messages, str(averager.step)]


def test_a_state_of_another_configuration_or_a_damaged_one_is_refused() -> None:
    for other, missing, negative, nothing, step in run_ranks(_wrong_states, 2):
        assert "period=8, this one has period=4" in other
        assert (
            "lacks ['configuration', 'num_rounds', 'num_steps_since', 'once_trainable', 'one_model_at', 'weights']"
            in missing
        )
        assert "step in state_dict must be at least 0, got -1" in negative
        assert "got NoneType" in nothing
        assert step == "0"


def _wrong_anchors(rank: int) -> list[str]:
    def build(**options: Any) -> Any:
        return averagers.PeriodicModelAverager(2, **{"codec": averagers.Int8(error_feedback=0.9), **options})

    averager = build()
    averager.average_parameters([lib.zeros(300)])
    good = averager.state_dict()
    messages = []
    for change in (
        {"moved_at": "x"},
        {"num_tensors": -1},
        {"values": {"0": lib.zeros(2, 3)}},
        {"values": {"0": lib.zeros(6, dtype=lib.int64)}},
        {"residuals": [{"sent": lib.zeros(2, 3)}]},
    ):
        with pytest.raises(averagers.StateDictError) as caught:
            averager.load_state_dict({**good, "anchor_0": {**good["anchor_0"], **change}})
        messages.append(str(caught.value))
    for options in (
        {"codec": averagers.Int8()},
        {"codec": None},
        {"bucket_bytes": 5000},
        {"mixer": averagers.Nesterov()},
        {"rule": averagers.Median()},
    ):
        with pytest.raises(averagers.StateDictError) as caught:
            build(**options).load_state_dict(good)
        messages.append(str(caught.value))
    # Fewer residuals than there are buckets: none.
    averager.load_state_dict({**good, "anchor_0": {**good["anchor_0"], "residuals": []}})
    weight = lib.full((300,), float(rank))
    averager.step = 2
    averager.average_parameters([weight])
    return [*messages, str(weight[3].item())]


def test_damaged_anchors_and_those_of_other_methods_are_refused() -> None:
    for *damaged, codec, none, buckets, mixer, rule, mean in run_ranks(_wrong_anchors, 2):
        assert all("anchor_0 in state_dict is damaged" in message for message in damaged)
        assert "codec=['Int8(error_feedback=0.9)'], this one has codec=['Int8()']" in codec
        assert "this one has codec=None" in none
        assert "bucket_bytes=4194304, this one has bucket_bytes=5000" in buckets
        assert "mixer=None, this one has mixer=['Nesterov(lr=0.7, momentum=0.9)']" in mixer
        assert "rule=None, this one has rule=['Median()']" in rule
        assert float(mean) == pytest.approx(0.5, rel=0.01)


def _frozen_after_saving(rank: int) -> list[float]:
    weight = lib.nn.Parameter(lib.tensor([float(rank)]))
    first = averagers.PeriodicModelAverager(2)
    first.average_parameters([weight])
    with lib.no_grad():
        weight.fill_(2.0 * rank)
    weight.requires_grad_(False)
    second = averagers.PeriodicModelAverager(2)
    second.load_state_dict({**first.state_dict(), "step": 0})
    second.average_parameters([weight])
    return weight.tolist()


def test_a_resumed_run_remembers_which_parameters_were_ever_trainable() -> None:
    assert run_ranks(_frozen_after_saving, 2) == [[1.0]] * 2


def _ends(rank: int) -> tuple[list[float], int]:
    averager = averagers.HierarchicalModelAverager({2: 2, 8: 4})
    weight = lib.tensor([float(rank)])
    averager.step = 2
    averager.average_parameters([weight])
    among_two = weight.item()
    averager.finish([weight])
    averager.finish([weight])
    return [among_two, weight.item()], averager.step


def test_finish_averages_once_more_among_all_ranks() -> None:
    assert run_ranks(_ends, 4) == [([0.5, 1.5], 3)] * 2 + [([2.5, 1.5], 3)] * 2


def _evaluates(rank: int) -> tuple[list[float], list[float], list[float]]:
    averager = averagers.PeriodicModelAverager(4, 100)
    weight = lib.nn.Parameter(lib.tensor([float(rank), 3.0]))
    address = weight.data_ptr()
    with averager.averaged([weight]):
        inside = weight.tolist()
    after = weight.tolist()
    with pytest.raises(KeyError), averager.averaged([weight]):
        raise KeyError
    assert weight.data_ptr() == address
    return inside, after, weight.tolist()


def test_averaged_shows_the_mean_and_gives_the_own_values_back() -> None:
    for rank, found in enumerate(run_ranks(_evaluates, 2)):
        assert found == ([0.5, 3.0], [float(rank), 3.0], [float(rank), 3.0])


def _broadcasts(rank: int) -> list[Any]:
    averager = averagers.PeriodicModelAverager(4)
    dtypes = (lib.float32, lib.float64, lib.bfloat16, lib.float16, lib.int64, lib.int32, lib.uint8, lib.bool)
    tensors = [(str(dtype), lib.tensor([rank, rank + 1, 5]).to(dtype)) for dtype in dtypes]
    tensors.append(("complex", lib.complex(lib.tensor([float(rank)]), lib.tensor([2.0 * rank]))))
    tensors.append(("transposed", lib.tensor([[rank, 1], [2, 3 * rank]]).t()))
    averager.broadcast(tensors)
    return [tensor.tolist() for _, tensor in tensors]


def test_broadcast_gives_all_ranks_the_firsts_tensors_of_any_dtype() -> None:
    found = run_ranks(_broadcasts, 3)
    assert found[0][0] == [0.0, 1.0, 5.0]
    assert found == [found[0]] * 3


def _counts(rank: int) -> tuple[list[Any], list[Any]]:
    def rounds(averager: Any, events: list[Any], calls: int) -> list[Any]:
        for _ in range(calls):
            averager.average_parameters([lib.zeros(2)])
        return [(event.step, event.group_size) for event in events if isinstance(event, averagers.RoundFinished)]

    one: list[Any] = []
    many: list[Any] = []
    periodic = averagers.PeriodicModelAverager(3, 5, observers=[one.append])
    hierarchical = averagers.HierarchicalModelAverager({4: 4, 2: 2}, 3, observers=[many.append])
    return rounds(periodic, one, 20), rounds(hierarchical, many, 11)


def test_rounds_come_at_the_steps_and_among_as_many_ranks_as_the_schedule_says() -> None:
    periodic = [(step, 4) for step in (5, 8, 11, 14, 17)]
    hierarchical = [(4, 4), (6, 2), (8, 4), (10, 2)]
    assert run_ranks(_counts, 4) == [(periodic, hierarchical)] * 4
