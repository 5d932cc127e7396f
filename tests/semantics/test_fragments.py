"""Parts of the model that are averaged each on its own, at its own place in the period."""

from __future__ import annotations

import math
from typing import Any

import pytest

from frameworks import averagers, bits, lib
from ranks_runner import run_ranks

pytestmark = pytest.mark.usefixtures("framework")


def _move(tensors: list[Any], rank: int, step: int) -> None:
    for tensor in tensors:
        tensor.add_(lib.linspace(-1, 1, tensor.numel()).view(tensor.shape), alpha=math.sin(step + rank))


def _places(rank: int, names: bool) -> tuple[list[tuple[int, int]], list[list[float]]]:
    """Return step and number of tensors of each round, and the values after each step."""
    events: list[Any] = []
    fragments: Any = [["a", "c.0"], ["b"], ["c.1", "d"]] if names else 3
    averager = averagers.PeriodicModelAverager(7, 1, fragments=fragments, observers=[events.append])
    tensors = {name: lib.full((2,), float(rank)) for name in ("a", "b", "c.0", "c.1", "d")}
    values = []
    for _ in range(9):
        averager.average_parameters(tensors.items())
        values.append([float(tensor[0].item()) for tensor in tensors.values()])
    return [(event.step, event.num_tensors) for event in events if isinstance(event, averagers.RoundFinished)], values


@pytest.mark.parametrize("names", [False, True])
def test_each_fragment_has_its_own_place_in_the_period(names: bool) -> None:
    for rank, (rounds, values) in enumerate(run_ranks(_places, 2, names)):
        assert rounds == ([(1, 2), (3, 1), (5, 2), (8, 2)] if names else [(1, 2), (3, 2), (5, 1), (8, 2)])
        r = float(rank)
        assert values[0] == [r] * 5
        # In turn: a and c.1, b and d, c.0. By name: a and c.0, b, c.1 and d.
        assert values[1] == ([0.5, r, 0.5, r, r] if names else [0.5, r, r, 0.5, r])
        assert values[3] == ([0.5, 0.5, 0.5, r, r] if names else [0.5, 0.5, r, 0.5, 0.5])
        assert values[5] == [0.5] * 5


def _run(rank: int, options: dict[str, Any], stop: int | None = None) -> list[bytes]:
    def build() -> Any:
        return averagers.PeriodicModelAverager(6, **options)

    tensors = [lib.zeros(30), lib.zeros(4, 5), lib.zeros(7), lib.zeros(1)]
    averager = build()
    for step in range(20):
        if step == stop:
            saved, averager = averager.state_dict(), build()
            averager.load_state_dict(saved)
        _move(tensors, rank, step)
        averager.average_parameters([{"params": tensors, "lr": 0.5}])
    averager.finish([{"params": tensors, "lr": 0.5}])
    return [bits(tensor) for tensor in tensors]


def _options(name: str) -> dict[str, Any]:
    return {
        "plain": {},
        "int8": {"codec": averagers.Int8()},
        "top-k": {"codec": averagers.TopK(8)},
        "nesterov": {"mixer": averagers.Nesterov()},
        "slowmo": {"mixer": averagers.SlowMo(0.5)},
        "streaming": {
            "mixer": averagers.Nesterov(),
            "codec": averagers.Int4(),
            "overlap": averagers.Delayed(2, keep=0.5),
        },
        "late": {"overlap": averagers.Delayed(5)},  # several under way at once
    }[name]


def _one_fragment(rank: int, name: str) -> bool:
    return _run(rank, {**_options(name), "fragments": 1}) == _run(rank, _options(name))


@pytest.mark.parametrize("name", ["plain", "nesterov", "streaming"])
def test_one_fragment_is_no_fragments(name: str) -> None:
    assert run_ranks(_one_fragment, 2, name) == [True] * 2


@pytest.mark.parametrize("name", ["plain", "int8", "top-k", "nesterov", "slowmo", "streaming", "late"])
def test_finish_leaves_one_model_and_a_resumed_run_equals_the_one_that_was_not_stopped(name: str) -> None:
    whole = run_ranks(_run, 3, {**_options(name), "fragments": 3})
    assert whole[0] == whole[1] == whole[2]
    for stop in (9, 10):
        assert run_ranks(_run, 3, {**_options(name), "fragments": 3}, stop) == whole


def _by_hand(rank: int) -> float:
    """Fragments with an outer optimizer, by an averager for each part at its own steps."""
    together = averagers.PeriodicModelAverager(4, mixer=averagers.Nesterov(), fragments=2)
    apart = [averagers.PeriodicModelAverager(4, mixer=averagers.Nesterov()) for _ in range(2)]
    tensors, twins = [lib.zeros(9), lib.zeros(5), lib.zeros(2)], [lib.zeros(9), lib.zeros(5), lib.zeros(2)]
    worst = 0.0
    for step in range(15):
        for one in (tensors, twins):
            _move(one, rank, step)
        together.average_parameters(tensors)
        for fragment, averager in enumerate(apart):
            if (step - 2 * fragment) % 4 == 0 and step >= 2 * fragment:
                averager.step = step - 2 * fragment
                averager.average_parameters(twins[fragment::2])
        worst = max(worst, *(float((a - b).abs().max().item()) for a, b in zip(tensors, twins, strict=True)))
    return worst


def test_fragments_equal_an_averager_for_each_part() -> None:
    assert max(run_ranks(_by_hand, 2)) == 0.0


def _levels(rank: int) -> tuple[list[tuple[int, int, int]], list[float]]:
    events: list[Any] = []
    averager = averagers.HierarchicalModelAverager({2: 2, 8: 4}, fragments={8: 2}, observers=[events.append])
    tensors = [lib.full((2,), float(rank)), lib.full((3,), float(rank))]
    for _ in range(9):
        averager.average_parameters(tensors)
    rounds = [
        (event.step, event.level, event.num_tensors) for event in events if isinstance(event, averagers.RoundFinished)
    ]
    return rounds, [float(tensor[0].item()) for tensor in tensors]


def test_the_rest_of_the_model_is_averaged_within_at_a_fragments_step() -> None:
    for rounds, values in run_ranks(_levels, 4):
        assert rounds == [
            (0, 0, 2), (0, 1, 1), (2, 0, 2), (4, 0, 2), (4, 1, 1), (6, 0, 2), (8, 0, 2), (8, 1, 1)
        ]  # fmt: skip
        assert values == [1.5, 1.5]


def _peak(rank: int, fragments: int) -> int:
    events: list[Any] = []
    averager = averagers.PeriodicModelAverager(8, fragments=fragments, observers=[events.append])
    tensors = [lib.zeros(1000) for _ in range(8)]
    for _ in range(9):
        averager.average_parameters(tensors)
    return max(event.wire_bytes for event in events if isinstance(event, averagers.RoundFinished))


def test_the_peak_of_traffic_is_a_fragments() -> None:
    assert run_ranks(_peak, 2, 4) == [run_ranks(_peak, 2, 1)[0] // 4] * 2


def _refused(rank: int) -> list[str]:
    messages = []
    named = averagers.PeriodicModelAverager(4, fragments=[["a"], ["b"]])
    for build in (
        lambda: averagers.PeriodicModelAverager(4, fragments=0),
        lambda: averagers.PeriodicModelAverager(4, fragments=5),
        lambda: averagers.PeriodicModelAverager(4, fragments="ab"),
        lambda: averagers.PeriodicModelAverager(4, fragments=[["a"], []]),
        lambda: averagers.PeriodicModelAverager(4, fragments=2.0),
        lambda: averagers.PeriodicModelAverager(schedule=averagers.Adaptive(), fragments=2),
        lambda: averagers.PeriodicModelAverager(schedule=averagers.Growing(2, 4, total_steps=9), fragments=2),
        lambda: averagers.HierarchicalModelAverager({2: 1, 4: 2}, codec={2: averagers.Int8()}, fragments={4: 2}),
        lambda: averagers.PeriodicModelAverager(4, fragments=2 + rank),
        lambda: named.average_parameters([(name, lib.zeros(2)) for name in ("a", "b", "c")]),
        lambda: named.average_parameters([("a", lib.zeros(2)), ("c", lib.zeros(2))]),
        lambda: named.average_parameters([lib.zeros(2)]),
    ):
        with pytest.raises(averagers.AveragersError) as caught:
            build()
        messages.append(str(caught.value))
    return messages


def test_fragments_that_cannot_work_are_refused_by_name() -> None:
    first, second = run_ranks(_refused, 2)
    assert first == second
    for message, part in zip(
        first,
        [
            "fragments must be at least 1, got 0",
            "fragments must be at most the period, so that each has a step of its own, got 5 with period 4",
            "fragments must be how many there are, or lists of names such as",
            "fragments must be how many there are, or lists of names such as",
            "fragments must be how many there are, or lists of names such as",
            "fragments need places in a fixed period, which a Adaptive does not have",
            "fragments need places in a fixed period, which a Growing does not have",
            "fragments=2 of a level cannot work with a codec, rule or mixer of a level within",
            "fragments is ['2'] on rank 0, ['3'] on rank 1",
            "fragments must name each tensor in one list, and c is in none",
            "fragments must name parameters or modules that are averaged, got 'b'",
            "fragments must name parameters or modules that are averaged, got 'a'",
        ],
        strict=True,
    ):
        assert part in message
