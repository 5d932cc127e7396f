"""Rules in place of the mean, and weights of ranks in it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from frameworks import averagers, bits, lib
from ranks_runner import run_ranks

pytestmark = pytest.mark.usefixtures("framework")

# The worked numbers: what 7 ranks hold.
_VALUES = [1.0, 1.1, 0.9, 1.05, -100.0, 100.0, 1.0]

_RULES: dict[str, Callable[[], Any]] = {
    "trimmed by 0": lambda: averagers.TrimmedMean(0),
    "trimmed by 1": lambda: averagers.TrimmedMean(1),
    "trimmed by 2": lambda: averagers.TrimmedMean(2),
    "median": lambda: averagers.Median(),  # noqa: PLW0108 - looked up when called
    "clipped": lambda: averagers.CenteredClipping(radius=0.5),
}
_EXPECTED = {
    "trimmed by 0": 5.05 / 7,
    "trimmed by 1": 5.05 / 5,
    "trimmed by 2": 3.05 / 3,
    "median": 1.0,
    "clipped": 1.0,  # no last round yet: the median
}


def _reduced(name: str, values: list[float]) -> float:
    rows = lib.tensor(values, dtype=lib.float32).view(-1, 1)
    return float(_RULES[name]().without_anchor.reduce_(rows).item())


@pytest.mark.parametrize("name", list(_RULES))
def test_the_worked_numbers(name: str) -> None:
    assert _reduced(name, _VALUES) == pytest.approx(_EXPECTED[name], rel=5e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_dropped_like_any_nonsense(bad: float) -> None:
    for name in ("trimmed by 1", "trimmed by 2", "median", "clipped"):
        assert 0.9 <= _reduced(name, [1.0, 1.1, bad, 0.9, 1.05]) <= 1.1
    clipped = averagers.CenteredClipping(radius=0.5).reduce_(lib.tensor([[0.3], [bad], [-0.1], [0.2]]))
    moved = 0.0 if math.isnan(bad) else math.copysign(0.5, bad)
    assert float(clipped.item()) == pytest.approx((0.3 + moved - 0.1 + 0.2) / 4)


def _round(rank: int, name: str, dtype: str, codec: bool) -> tuple[list[float], bytes]:
    averager = averagers.PeriodicModelAverager(2, rule=_RULES[name](), codec=averagers.Int8() if codec else None)
    weights = [lib.full((300,), _VALUES[rank]).to(getattr(lib, dtype)), lib.full((5, 3), _VALUES[rank])]
    averager.average_parameters(weights)
    first = [weights[0][7].item(), weights[1][2, 1].item()]
    for weight in weights:
        weight.add_(_VALUES[rank] / 8)
    averager.step = 2
    averager.average_parameters(weights)
    moved = weights[1][2, 1].item() - first[1]
    return [*first, moved], b"".join(map(bits, weights))


def test_numbers_of_equal_value_are_one_setting() -> None:
    assert (
        repr(averagers.CenteredClipping(1)) == repr(averagers.CenteredClipping(1.0)) == "CenteredClipping(radius=1.0)"
    )
    assert repr(averagers.Int8(error_feedback=1)) == "Int8(error_feedback=1.0)"


@pytest.mark.parametrize("codec", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("name", list(_RULES))
def test_a_round_takes_the_rule_on_every_rank_alike(name: str, dtype: str, codec: bool) -> None:
    results = run_ranks(_round, 7, name, dtype, codec)
    assert all(result == results[0] for result in results)
    first, second, moved = results[0][0]
    assert second == pytest.approx(_EXPECTED[name], rel=1e-5)
    assert first == pytest.approx(_EXPECTED[name], rel=1e-2 if dtype == "bfloat16" else 1e-5)
    # Every replica moved from the common value by an eighth of what it held, the nonsense ones too.
    expected = _EXPECTED[name] / 8
    if name == "clipped":  # by 0.125, 0.1375, 0.1125, 0.13125, -0.5, 0.5, 0.125
        expected = 0.63125 / 7
    assert moved == pytest.approx(expected, rel=0.02 if codec else 1e-4)


def _through_nodes(rank: int) -> float:
    averager = averagers.PeriodicModelAverager(2, rule=averagers.Median(), nodes=[0, 0, 1, 1])
    weight = lib.full((10,), [1.0, 2.0, 3.0, 1000.0][rank])
    averager.average_parameters([weight])
    return float(weight[3].item())


def test_a_rule_sees_every_rank_and_no_sums_of_nodes() -> None:
    assert run_ranks(_through_nodes, 4) == [2.5] * 4


def _one_nan_at_a_time(rank: int, decay: float | None) -> list[float]:
    averager = averagers.PeriodicModelAverager(
        1000, rule=averagers.Median(), codec=averagers.Int8(error_feedback=decay)
    )
    weight = lib.zeros(300)
    found = []
    for step in range(5):
        averager.step = 0
        averager.average_parameters([weight])
        found.append(float(weight[7].item()))
        weight.add_(0.5)
        if (rank, step) in ((1, 1), (2, 3)):
            weight.fill_(math.nan)
    return found


@pytest.mark.parametrize("decay", [None, 0.5, 1.0])
def test_one_bad_rank_at_a_time_leaves_no_trace_with_error_feedback_either(decay: float | None) -> None:
    for found in run_ranks(_one_nan_at_a_time, 4, decay):
        assert found == pytest.approx([0.0, 0.5, 1.0, 1.5, 2.0], rel=0.02)


def _by_period(rank: int) -> list[float]:
    averager = averagers.HierarchicalModelAverager({1: 2, 3: 4}, rule={3: averagers.Median()})
    weight = lib.full((3,), [1.0, 2.0, 3.0, 1000.0][rank])
    found = []
    for _ in range(2):
        averager.average_parameters([weight])
        found.append(weight[0].item())
        weight.fill_([1.0, 2.0, 3.0, 1000.0][rank])
    return found


def test_a_rule_may_differ_by_level() -> None:
    assert run_ranks(_by_period, 4) == [[2.5, 1.5], [2.5, 1.5], [2.5, 501.5], [2.5, 501.5]]


def _refused(rank: int) -> list[str]:
    messages = []
    for build in (
        lambda: averagers.PeriodicModelAverager(2, rule="median"),
        lambda: averagers.PeriodicModelAverager(2, rule=averagers.TrimmedMean(1)),
        lambda: averagers.PeriodicModelAverager(2, rule=averagers.Median(), codec=averagers.TopK()),
        lambda: averagers.HierarchicalModelAverager({2: 2}, rule={4: averagers.Median()}),
        lambda: averagers.PeriodicModelAverager(2, rule=averagers.Median() if rank else None),
        lambda: averagers.TrimmedMean(-1),
        lambda: averagers.TrimmedMean(1.0),
        lambda: averagers.CenteredClipping(0.0),
        lambda: averagers.CenteredClipping(math.inf),
        lambda: averagers.CenteredClipping("wide"),
        lambda: averagers.CenteredClipping(1e-39),
    ):
        with pytest.raises(averagers.AveragersError) as caught:
            build()
        messages.append(str(caught.value))
    averagers.PeriodicModelAverager(2, rule=averagers.Median())  # of two ranks: the mean
    return messages


def test_rules_that_cannot_work_are_refused_by_name() -> None:
    first, second = run_ranks(_refused, 2)
    assert first == second
    for message, part in zip(
        first,
        [
            "rule must be a Rule such as averagers.Median(), or None, got 'median' of type str",
            "rule=TrimmedMean(trim=1) takes 3 ranks at least, and this level's groups have 2",
            "rule=Median() cannot work with codec=TopK()",
            "rule must be given for periods of the averager, which are 2, got 4",
            "rule is ['None'] on rank 0, ['Median()'] on rank 1",
            "trim must be at least 0, got -1",
            "trim must be an int, got 1.0",
            "radius must be over 0 and finite, got 0.0",
            "radius must be over 0 and finite, got inf",
            "radius must be a number, got 'wide'",
            "which float32 can hold, got 1e-39",
        ],
        strict=True,
    ):
        assert part in message


# Weights


def _weighted(rank: int, weights: list[float | None], options: dict[str, Any], dtype: str) -> tuple[list[float], bytes]:
    averager = averagers.PeriodicModelAverager(2, **options)
    tensors = [lib.full((70,), float(rank + 1)).to(getattr(lib, dtype)), lib.full((600, 500), float(rank + 1))]
    if weights[rank] == 0:
        tensors[1].fill_(math.nan)  # only receives
    averager.average_parameters(tensors, weight=weights[rank])
    return [tensors[0][3].item(), tensors[1][5, 5].item()], b"".join(map(bits, tensors))


@pytest.mark.parametrize(
    ("weights", "options"),
    [
        ([1.0, 3.0], {}),
        ([5, 0, 5], {}),
        ([1.0, 2.0, 3.0, 2.0], {"nodes": [0, 0, 1, 1]}),
        ([0, 1e-3, 0, 3e-3], {"nodes": [0, 1, 0, 1]}),
        ([1e308, 1e308, 1e308, 0.0], {}),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_round_weighs_each_rank(weights: list[float], options: dict[str, Any], dtype: str) -> None:
    results = run_ranks(_weighted, len(weights), weights, options, dtype)
    shares = [weight / max(weights) for weight in weights]
    mean = sum(share * (rank + 1) for rank, share in enumerate(shares)) / sum(shares)
    for found, bits_ in results:
        assert found == pytest.approx([mean, mean], rel=2.0**-8 if dtype == "bfloat16" else 1e-6)
        assert bits_ == results[0][1]


def test_equal_weights_give_the_plain_means_bits() -> None:
    for options in ({}, {"nodes": [0, 0, 1, 1]}):
        plain = run_ranks(_weighted, 4, [None] * 4, options, "bfloat16")
        assert run_ranks(_weighted, 4, [7] * 4, options, "bfloat16") == plain


def _coded_weights(rank: int) -> list[float]:
    found = []
    for codec in (averagers.Int8(), averagers.TopK(4096)):
        averager = averagers.PeriodicModelAverager(2, codec=codec)
        weight = lib.zeros(200)
        averager.average_parameters([weight], weight=1)
        weight.fill_(math.nan if rank == 2 else float(rank + 1))
        averager.step = 2
        averager.average_parameters([weight], weight=[1, 3, 0][rank])
        found.append(weight[9].item())
    return found


def test_displacements_are_weighed_too() -> None:
    for found in run_ranks(_coded_weights, 3):
        assert found == pytest.approx([1.75, 1.75], rel=0.02)


def _over_steps(rank: int) -> list[float]:
    averager = averagers.HierarchicalModelAverager({2: 2, 4: 4})
    weight = lib.zeros(3)
    found = []
    for step in range(5):
        weight.fill_(float(rank))
        if step == 3:
            saved = averager.state_dict()
            averager = averagers.HierarchicalModelAverager({2: 2, 4: 4})
            averager.load_state_dict(saved)
        averager.average_parameters([weight], weight=(rank + 1) * (step + 1))
        found.append(weight[0].item())
    return found


def test_a_round_weighs_by_the_sum_since_the_last_one_of_its_level() -> None:
    results = run_ranks(_over_steps, 4)
    everyone = (0 * 1 + 1 * 2 + 2 * 3 + 3 * 4) / 10
    for rank, found in enumerate(results):
        neighbors = (0 * 1 + 1 * 2) / 3 if rank < 2 else (2 * 3 + 3 * 4) / 7
        assert found == pytest.approx([everyone, rank, neighbors, rank, everyone])


def _far_too_much(rank: int) -> str:
    averager = averagers.PeriodicModelAverager(3, warmup_steps=2)
    weight = lib.zeros(3)
    averager.average_parameters([weight], weight=1e308)
    with pytest.raises(averagers.InvalidValueError) as caught:
        averager.average_parameters([weight], weight=1e308)
    averager.load_state_dict(averager.state_dict())
    return str(caught.value)


def test_a_sum_of_weights_that_is_not_finite_is_refused() -> None:
    for message in run_ranks(_far_too_much, 2):
        assert "weight must be at least 0 and finite" in message


def _given_once(rank: int) -> float:
    averager = averagers.PeriodicModelAverager(2)
    weight = lib.full((3,), float(rank))
    for step in range(3):
        averager.average_parameters([weight], weight=[10.0, 30.0][rank] if step == 2 else None)
        if step == 1:
            weight.fill_(float(rank))
    return float(weight[0].item())


def test_a_weight_given_at_the_round_alone_is_the_rounds() -> None:
    assert run_ranks(_given_once, 2) == [0.75, 0.75]


def _refused_weights(rank: int) -> list[str]:
    averager = averagers.PeriodicModelAverager(1000)
    ruled = averagers.PeriodicModelAverager(1000, rule=averagers.TrimmedMean(1))
    weight = lib.full((3,), float(rank))
    messages = []
    for one, given in (
        (averager, -1),
        (averager, math.nan),
        (averager, math.inf),
        (averager, 10**400),
        (averager, "4"),
        (averager, True),
        (averager, 1.0 if rank else None),
        (averager, 0),
        (ruled, rank),
    ):
        one.step = 0
        with pytest.raises(averagers.AveragersError) as caught:
            one.average_parameters([weight], weight=given)
        messages.append(str(caught.value))
        assert (one.step, weight.tolist()) == (0, [float(rank)] * 3)
    ruled.average_parameters([weight], weight=1)
    assert weight[0].item() == 1.0
    return messages


def test_weights_that_have_no_mean_are_refused_on_every_rank() -> None:
    results = run_ranks(_refused_weights, 3)
    assert results[0] == results[1] == results[2]
    for message, part in zip(
        results[0],
        [
            "weight must be at least 0 and finite, such as a number of samples, got -1",
            "weight must be at least 0 and finite, such as a number of samples, got nan",
            "weight must be at least 0 and finite, such as a number of samples, got inf",
            "weight must be at least 0 and finite",
            "weight must be a number, got '4' of type str",
            "weight must be a number, got True of type bool",
            "weight is not given on rank 0, given on ranks 1-2; give a weight on every rank, or on none",
            "weight must be over 0 on one rank at least: it is 0 on all",
            "weight must be 0 or the same on all ranks with rule=TrimmedMean(trim=1), which cannot weigh, got 0, 1, 2",
        ],
        strict=True,
    ):
        assert part in message
