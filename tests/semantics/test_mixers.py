"""Mixers: what the mean does to the weights, by the worked numbers, identities, and slow twins."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from frameworks import averagers, bits, lib
from ranks_runner import run_ranks

pytestmark = pytest.mark.usefixtures("framework")


def _sgd(**settings: Any) -> Any:
    return functools.partial(lib.optim.SGD, **settings)


_MIXERS: dict[str, Callable[[], Any]] = {
    "assign": lambda: averagers.Assign(),  # noqa: PLW0108 - looked up when called
    "nesterov": lambda: averagers.Nesterov(lr=0.7, momentum=0.9),
    "outer": lambda: averagers.Outer(_sgd(lr=0.7, momentum=0.9, nesterov=True)),
    "slowmo": lambda: averagers.SlowMo(momentum=0.7),
    "elastic": lambda: averagers.Elastic(alpha=0.225),
}


def _group(tensors: list[Any], lr: float = 1.0) -> list[dict[str, Any]]:
    """Return parameter groups, from which SlowMo reads the learning rate."""
    return [{"params": tensors, "lr": lr}]


def _anchors(rank: int, name: str, lrs: list[float], dtype: str = "float32") -> list[float]:
    """Return where all replicas are after each round of moving by the learning rate, from an anchor of 0."""
    averager = averagers.PeriodicModelAverager(1000, mixer=_MIXERS[name]())
    weight = lib.zeros(3).to(getattr(lib, dtype))
    averager.average_parameters(_group([weight]))
    found = []
    for lr in lrs:
        weight.add_(lr)
        averager.step = 0
        averager.average_parameters(_group([weight], lr))
        found.append(float(weight[1].item()))
    return found


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["nesterov", "outer"])
def test_outer_nesterov_is_at_the_worked_numbers(name: str, dtype: str) -> None:
    for found in run_ranks(_anchors, 2, name, [1.0] * 4, dtype):
        assert found == pytest.approx([1.33, 3.227, 5.6343, 8.50087], rel=1e-6)


def test_slow_momentum_is_at_the_worked_numbers_and_follows_the_learning_rate() -> None:
    for found in run_ranks(_anchors, 2, "slowmo", [1.0, 1.0, 0.1, 0.1, 0.1]):
        assert found == pytest.approx([1.0, 2.7, 2.919, 3.1723, 3.4496], rel=1e-4)


def _elastic(rank: int) -> list[float]:
    averager = averagers.PeriodicModelAverager(1000, mixer=averagers.Elastic(alpha=0.225))
    weight = lib.zeros(5)
    averager.average_parameters([weight])
    weight.fill_([1.0, 2.0, 3.0, 10.0][rank])
    averager.step = 0
    averager.average_parameters([weight])
    pulled = float(weight[2].item())
    center = float(averager.state_dict()["anchor_0"]["values"]["0"][2].item())
    averager.finish([weight])
    return [pulled, center, float(weight[2].item())]


def test_elastic_averaging_is_at_the_worked_numbers_and_ends_at_the_center() -> None:
    results = run_ranks(_elastic, 4)
    assert [pulled for pulled, _, _ in results] == pytest.approx([0.775, 1.55, 2.325, 7.75])
    assert [center for _, center, _ in results] == pytest.approx([3.6] * 4)
    # Once more: the center moves by 0.225 of the sum of 0.775 - 3.6, 1.55 - 3.6, 2.325 - 3.6 and 7.75 - 3.6.
    assert [end for _, _, end in results] == pytest.approx([3.6 + 0.225 * (12.4 - 4 * 3.6)] * 4)


def _with_a_rate_of_zero(rank: int) -> list[float]:
    averager = averagers.PeriodicModelAverager(1000, mixer=averagers.SlowMo(momentum=0.5))
    weight = lib.zeros(3)
    averager.average_parameters(_group([weight]))
    found = []
    for lr, move in ((1.0, 1.0), (0.0, 1.0), (0.0, 0.0), (1.0, 1.0)):
        weight.add_(move + (rank - 0.5))
        averager.step = 0
        averager.average_parameters(_group([weight], lr))
        found.append(float(weight[0].item()))
    return found


def test_at_a_learning_rate_of_zero_the_mean_is_taken_and_momentum_stays() -> None:
    for found in run_ranks(_with_a_rate_of_zero, 2):
        assert found == pytest.approx([1.0, 2.0, 2.0, 2.0 + 1.0 + 0.5])


def _run(rank: int, name: str, options: dict[str, Any], dtype: str = "float32") -> list[bytes]:
    averager = averagers.PeriodicModelAverager(2, mixer=_MIXERS[name](), **options)
    tensors = [lib.linspace(0, 1, 50).view(5, 10).t().clone().to(getattr(lib, dtype)), lib.zeros(3)]
    for step in range(7):
        for tensor in tensors:
            tensor.add_(lib.linspace(-1, 1, tensor.numel()).view(tensor.shape).to(tensor.dtype), alpha=rank - step / 8)
        averager.average_parameters(_group(tensors, 0.25))
    averager.finish(_group(tensors, 0.25))
    return [bits(tensor) for tensor in tensors]


def _identity(rank: int, other: str) -> list[bool]:
    mixers: dict[str, Callable[[], Any]] = {
        "plain SGD with lr 1": lambda: averagers.Outer(_sgd(lr=1.0)),
        "Nesterov with lr 1 and no momentum": lambda: averagers.Nesterov(lr=1.0, momentum=0.0),
        "SlowMo with lr 1 and no momentum": lambda: averagers.SlowMo(momentum=0.0, lr=1.0),
        "assign": averagers.Assign,
    }
    plain = averagers.PeriodicModelAverager(2)
    mixed = averagers.PeriodicModelAverager(2, mixer=mixers[other]())
    one, two = lib.zeros(6), lib.zeros(6)
    close = []
    for step in range(9):
        for averager, tensor in ((plain, one), (mixed, two)):
            tensor.add_(lib.linspace(-1, 1, 6), alpha=rank + step / 8)
            averager.average_parameters(_group([tensor], 0.25))
        close.append((one - two).abs().max().item() <= 1e-5)
    return close


@pytest.mark.parametrize(
    "other",
    ["plain SGD with lr 1", "Nesterov with lr 1 and no momentum", "SlowMo with lr 1 and no momentum", "assign"],
)
def test_without_momentum_and_with_a_rate_of_one_the_mean_is_assigned(other: str) -> None:
    assert run_ranks(_identity, 3, other) == [[True] * 9] * 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "complex64"])
@pytest.mark.parametrize("name", list(_MIXERS))
def test_all_ranks_end_alike_whatever_travels_how(name: str, dtype: str) -> None:
    for options in ({}, {"nodes": [0, 0, 1, 1]}, {"codec": averagers.Int8()}, {"rule": averagers.Median()}):
        results = run_ranks(_run, 4, name, options, dtype)
        assert all(result == results[0] for result in results)


def _offloaded(rank: int) -> list[bool]:
    offload = {"offload": "cpu"}
    return [_run(rank, name, {}) == _run(rank, name, offload) for name in ("nesterov", "outer", "elastic")]


def test_on_the_cpu_offload_changes_nothing() -> None:
    assert run_ranks(_offloaded, 2) == [[True] * 3] * 2


def _sixteen_bit(rank: int) -> list[float]:
    """Steps too small for the weights' own dtype add up in the anchor."""
    averager = averagers.PeriodicModelAverager(1000, mixer=averagers.Nesterov(lr=0.1, momentum=0.0))
    weight = lib.full((3,), 1.0).to(lib.bfloat16)
    averager.average_parameters([weight])
    for _ in range(20):
        weight.fill_(1.0 + 2.0**-7)  # the next number: a tenth of the way there is none
        averager.step = 0
        averager.average_parameters([weight])
    return [float(weight[0].item()), float(averager.state_dict()["anchor_0"]["values"]["0"][0].item())]


def test_the_anchor_of_16_bit_weights_keeps_what_they_cannot_hold() -> None:
    anchor = 1.0 + 2.0**-7 * (1 - 0.9**20)
    for weight, kept in run_ranks(_sixteen_bit, 2):
        assert kept == pytest.approx(anchor, rel=1e-4)
        assert weight == 1.0 + 2.0**-7


def _top_level(rank: int) -> tuple[list[float], list[float]]:
    averager = averagers.HierarchicalModelAverager({1: 2, 2: 4}, mixer={2: averagers.Nesterov(lr=0.5, momentum=0.0)})
    weight = lib.zeros(3)
    found = []
    for _ in range(4):
        averager.average_parameters([weight])
        found.append(float(weight[0].item()))
        weight.add_(float(rank + 1))
    return found, weight.tolist()


def test_a_mixer_of_the_top_level_leaves_the_others_plain() -> None:
    for rank, (found, _) in enumerate(run_ranks(_top_level, 4)):
        neighbors = 1.5 if rank < 2 else 3.5
        # Round of all at 0; of neighbors at 1; of all at 2: half of the mean of 2 * 1.5 and 2 * 3.5; of neighbors at 3.
        assert found == pytest.approx([0.0, neighbors, 2.5, 2.5 + neighbors])


def _resumed(rank: int, name: str) -> bool:
    def build() -> Any:
        return averagers.HierarchicalModelAverager(
            {2: 2, 4: 4}, nodes=[0, 0, 1, 1], mixer=_MIXERS[name](), codec={4: averagers.Int4(error_feedback=0.9)}
        )

    def train(averager: Any, weight: Any, steps: range) -> None:
        for step in steps:
            weight.add_(lib.linspace(-1, 1, 300), alpha=math.sin(step + rank))
            averager.average_parameters(_group([weight], 0.5))

    straight, first = lib.zeros(300), build()
    train(first, straight, range(7))
    saved, weight = first.state_dict(), straight.clone()
    twin, copied = first.__deepcopy__({}), straight.clone()
    train(first, straight, range(7, 14))
    second = build()
    second.load_state_dict(saved)
    train(second, weight, range(7, 14))
    train(twin, copied, range(7, 14))
    return bits(weight) == bits(copied) == bits(straight)


@pytest.mark.parametrize("name", list(_MIXERS))
def test_a_resumed_or_copied_run_equals_the_one_that_was_not_stopped(name: str) -> None:
    assert run_ranks(_resumed, 4, name) == [True] * 4


def _shown(rank: int) -> tuple[float, float, float]:
    averager = averagers.PeriodicModelAverager(1000, mixer=averagers.Nesterov(lr=0.5, momentum=0.0))
    weight = lib.zeros(3)
    averager.average_parameters([weight])
    weight.fill_(float(rank))
    averager.average_parameters([weight])
    with averager.averaged([weight]):
        shown = float(weight[0].item())
    back = float(weight[0].item())
    averager.finish([weight])
    return shown, back, float(weight[0].item())


def test_averaged_shows_the_mean_and_finish_steps_once_more() -> None:
    assert run_ranks(_shown, 2) == [(0.5, 0.0, 0.25), (0.5, 1.0, 0.25)]


def _refused(rank: int) -> list[str]:
    class NeedsClosure(lib.optim.SGD):  # type: ignore[misc, name-defined]
        def step(self, closure: Callable[[], Any]) -> None:
            closure()

    def needs_a_closure(params: list[Any]) -> Any:
        return NeedsClosure(params, lr=0.1)

    def first_step(factory: Callable[..., Any]) -> None:
        averagers.PeriodicModelAverager(4, warmup_steps=100, mixer=averagers.Outer(factory)).average_parameters(
            [weight]
        )

    messages = []
    weight = lib.zeros(3)
    slow = averagers.PeriodicModelAverager(4, warmup_steps=3, mixer=averagers.SlowMo(0.5))
    apart = averagers.PeriodicModelAverager(4, mixer=averagers.SlowMo(0.5))
    apart.average_parameters(_group([weight]))
    apart.step = 4
    for build in (
        lambda: averagers.PeriodicModelAverager(2, mixer="nesterov"),
        lambda: averagers.PeriodicModelAverager(2, mixer=averagers.Elastic(0.6)),
        lambda: averagers.PeriodicModelAverager(2, mixer=averagers.Nesterov(lr=0.7 if rank else 0.6)),
        lambda: averagers.HierarchicalModelAverager({2: 2}, mixer={4: averagers.Nesterov()}),
        lambda: averagers.Nesterov(momentum=1.0),
        lambda: averagers.Nesterov(lr=0.0),
        lambda: averagers.SlowMo(-0.1),
        lambda: averagers.SlowMo(0.5, lr=math.inf),
        lambda: averagers.Elastic(-0.1),
        lambda: averagers.Outer(lr=0.7) if rank > 9 else averagers.Outer(0.7),
        lambda: slow.average_parameters([weight]),
        lambda: slow.average_parameters(_group([weight], math.nan)),
        lambda: slow.average_parameters(_group([weight], "x")),
        lambda: first_step(lambda params: None),
        lambda: first_step(lambda params: params[7]),
        lambda: first_step(needs_a_closure),
        lambda: apart.average_parameters(_group([weight], 0.5 + rank)),
    ):
        with pytest.raises(averagers.AveragersError) as caught:
            build()
        messages.append(str(caught.value))
    return messages


def test_mixers_that_cannot_work_are_refused_by_name() -> None:
    first, second = run_ranks(_refused, 2)
    assert first == second
    for message, part in zip(
        first,
        [
            "mixer must be a Mixer such as averagers.Nesterov(), or None, got 'nesterov' of type str",
            "alpha of Elastic must be at most 1 / group size, got 0.6 with groups of 2",
            "mixer is ['Nesterov(lr=0.6, momentum=0.9)'] on rank 0, ['Nesterov(lr=0.7, momentum=0.9)'] on rank 1",
            "mixer must be given for periods of the averager, which are 2, got 4",
            "momentum must be from 0 to below 1, got 1.0",
            "lr must be over 0 and finite, got 0.0",
            "momentum must be from 0 to below 1, got -0.1",
            "lr must be over 0 and finite, got inf",
            "alpha must be from 0 to 1 / group size, got -0.1",
            "factory must make an optimizer from a list of tensors",
            "params must be optimizer.param_groups with mixer=SlowMo(momentum=0.5, lr=1.0), which reads the learning",
            "lr of the parameter groups in params must be at least 0 and finite with mixer=SlowMo(momentum=0.5",
            "lr of a parameter group in params must be a number, got 'x' of type str",
            "must return an optimizer, such as torch.optim.SGD(tensors, lr=0.7), got None of type NoneType",
            "must make an optimizer from a list of tensors, and raised IndexError: list index out of range",
            "must return an optimizer whose step() can do without a closure",
            "the learning rate is 0.5 on rank 0, 1.5 on rank 1; every rank must have the same learning rates",
        ],
        strict=True,
    ):
        assert part in message


def test_a_momentum_that_the_run_is_too_short_for_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="a momentum of 0.9 takes about 30 rounds to pay, and there are 29"):
        averagers.Nesterov(num_rounds=29)
    with pytest.warns(UserWarning, match="a momentum of 0.5 takes about 6 rounds to pay, and there are 5"):
        averagers.SlowMo(0.5, num_rounds=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        averagers.Nesterov(num_rounds=31)
        averagers.SlowMo(0.5, num_rounds=6)
        averagers.Nesterov()
