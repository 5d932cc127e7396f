"""Parity with torch's own model averaging: schedules, weights, optimizer, hook, checkpoints."""

from __future__ import annotations

import inspect
import io
import random
import textwrap
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.algorithms.model_averaging.averagers as torch_averagers
import torch.distributed.algorithms.model_averaging.hierarchical_model_averager as torch_hierarchical
import torch.distributed.algorithms.model_averaging.utils as torch_utils
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel

import averagers
from ranks_runner import run_ranks


def _torch_wrapper() -> Any:
    """Return torch's ``PostLocalSGDOptimizer``, whose import warns of something else."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.optim import PostLocalSGDOptimizer
    return PostLocalSGDOptimizer


def _bits(tensors: Any) -> list[bytes]:
    return [tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]


def _failed(claims: dict[str, bool]) -> list[str]:
    return [claim for claim, holds in claims.items() if not holds]


# Signatures and attributes


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (averagers.ModelAverager, torch_averagers.ModelAverager),
        (averagers.PeriodicModelAverager, torch_averagers.PeriodicModelAverager),
        (averagers.HierarchicalModelAverager, torch_hierarchical.HierarchicalModelAverager),
    ],
)
def test_positional_arguments_are_torchs_in_their_order_with_their_defaults(ours: type, theirs: type) -> None:
    def positional(kind: type) -> list[inspect.Parameter]:
        parameters = inspect.signature(kind).parameters.values()
        return [one for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]

    assert [one.name for one in positional(ours)] == [one.name for one in positional(theirs)]
    for one, other in zip(positional(ours), positional(theirs), strict=True):
        # What must be given there may be left out here, where a keyword takes its place.
        assert one.default == (None if other.default is other.empty and one.name == "period" else other.default)


def test_average_parameters_takes_the_argument_of_torchs_name() -> None:
    for kind in (averagers.PeriodicModelAverager, averagers.HierarchicalModelAverager):
        parameters = inspect.signature(kind.average_parameters).parameters.values()
        assert [one.name for one in parameters if one.kind is not one.KEYWORD_ONLY] == ["self", "params"]
    assert "params" in inspect.signature(torch_averagers.PeriodicModelAverager.average_parameters).parameters


def _attributes(rank: int) -> list[dict[str, Any]]:
    sizes = OrderedDict([(2, 2), (4, 4)])
    found = []
    for periodic, hierarchical in (
        (averagers.PeriodicModelAverager, averagers.HierarchicalModelAverager),
        (torch_averagers.PeriodicModelAverager, torch_hierarchical.HierarchicalModelAverager),
    ):
        one = periodic(period=4, warmup_steps=100)
        many = hierarchical(period_group_size_dict=sizes, warmup_steps=7, process_group=None)
        groups = many.period_process_group_dict
        found.append(
            {
                "step": one.step,
                "period": one.period,
                "warmup_steps": (one.warmup_steps, many.warmup_steps),
                "process_group": (
                    one.process_group is dist.group.WORLD,
                    many.process_group is dist.group.WORLD,
                ),
                "groups": [(period, dist.get_process_group_ranks(group)) for period, group in groups.items()],
                "kind of dict": type(groups).__name__,
            }
        )
    return found


def test_attributes_that_users_read_are_torchs() -> None:
    for ours, theirs in run_ranks(_attributes, 4):
        assert ours == theirs


def _period_one_warnings(rank: int) -> list[str]:
    found = []
    for make in (
        lambda: averagers.PeriodicModelAverager(1),
        lambda: torch_averagers.PeriodicModelAverager(1),
        lambda: averagers.HierarchicalModelAverager({1: 1}),
        lambda: torch_hierarchical.HierarchicalModelAverager({1: 1}),
    ):
        with pytest.warns(UserWarning, match="DistributedDataParallel") as caught:
            make()
        found.append(caught[0].filename.rpartition("/")[2])
    return found


def test_a_period_of_one_warns_at_the_callers_line_as_torch_does() -> None:
    assert run_ranks(_period_one_warnings, 1) == [["test_torch_averagers.py"] * 4]


# Schedules

_PERIODIC = [(4, 0, 13), (4, 2, 13), (3, 5, 20), (16, 8, 60)]
_HIERARCHICAL = [
    ({2: 2, 4: 4, 8: 16}, 0, 0, 17),
    ({2: 2, 4: 4, 8: 16}, 7, 0, 17),
    ({2: 4, 3: 16}, 0, 0, 13),
    ({4: 16}, 2, 0, 13),
    ({4: 8, 16: 16}, 100, 100, 21),
]


def _random_schedules() -> tuple[list[tuple[int, int, int]], list[tuple[dict[int, int], int, int, int]]]:
    dice = random.Random(7)
    periodic = [(dice.randint(2, 9), dice.randint(0, 30), 80) for _ in range(20)]
    hierarchical = []
    for _ in range(20):
        sizes = [*sorted(dice.sample([1, 2, 4, 8], dice.randint(0, 3))), 16]
        periods = sorted(dice.sample(range(2, 20), len(sizes)))
        hierarchical.append((dict(zip(periods, sizes, strict=True)), dice.randint(0, 30), dice.randint(0, 9), 80))
    return periodic, hierarchical


def _rounds(averager: Any, rounds: list[tuple[int, int]], calls: int) -> list[tuple[int, int]]:
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    rounds.clear()
    for _ in range(calls):
        averager.average_parameters([parameter])
    return list(rounds)


def _compare_schedules(rank: int) -> list[str]:
    """Run averagers of both kinds over 16 ranks that are made up, and return where they differ."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=16)
    rounds: list[tuple[int, int]] = []

    def observe(event: Any) -> None:
        if isinstance(event, averagers.RoundFinished):
            rounds.append((event.step, event.group_size))

    different, seen = [], 0
    periodic, hierarchical = _random_schedules()
    for period, warmup_steps, calls in _PERIODIC + periodic:
        ours = averagers.PeriodicModelAverager(period, warmup_steps, observers=[observe])
        theirs = torch_averagers.PeriodicModelAverager(period, warmup_steps)
        _record_torchs_rounds(theirs, rounds)
        found, expected = _rounds(ours, rounds, calls), _rounds(theirs, rounds, calls)
        seen += len(expected)
        if found != expected:
            different.append(f"{period}, {warmup_steps}: {found}, torch has {expected}")
    for sizes, warmup_steps, first, calls in _HIERARCHICAL + hierarchical:
        ours = averagers.HierarchicalModelAverager(sizes, warmup_steps, observers=[observe])
        theirs = torch_hierarchical.HierarchicalModelAverager(sizes, warmup_steps)
        _record_torchs_rounds(theirs, rounds)
        ours.step = theirs.step = first
        found, expected = _rounds(ours, rounds, calls), _rounds(theirs, rounds, calls)
        found = [one for one in found if one[1] > 1]  # with nobody to average with we have no round
        expected = [one for one in expected if one[1] > 1]
        seen += len(expected)
        if found != expected:
            different.append(f"{sizes}, {warmup_steps} from {first}: {found}, torch has {expected}")
        ours.close()
    assert seen > 500
    return different


def _record_torchs_rounds(averager: Any, rounds: list[tuple[int, int]]) -> None:
    def record(params: Any, group: dist.ProcessGroup) -> None:
        rounds.append((averager.step, dist.get_world_size(group)))

    torch_utils.average_parameters_or_parameter_groups = record


def test_rounds_come_at_torchs_steps_and_among_as_many_ranks() -> None:
    assert run_ranks(_compare_schedules, 1, initialize=False) == [[]]


# Weights


def _numbers(rank: int, kind: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    shapes = [(3,), (64, 65), (), (16,), (17,), (1000,)]
    normal = [torch.randn(shape, generator=generator) for shape in shapes]
    if kind == "ordinary":
        return normal
    if kind == "of all sizes":
        return [one * torch.randint(-140, 126, one.shape, generator=generator).float().exp2() for one in normal]
    if kind == "huge":
        return [one.sign() * 3e38 for one in normal]
    if kind == "denormal":
        return [one * 1e-42 for one in normal]
    special = torch.tensor([0.0, -0.0, torch.inf, 3.4e38, 1e-45, 1.0, -1.0, -1e-45])
    return [special.roll(rank), special[:3] * (1 + rank)]


_KINDS = ["ordinary", "of all sizes", "huge", "denormal", "special"]


def _parameters(values: Sequence[Tensor]) -> list[nn.Parameter]:
    parameters = [nn.Parameter(value.clone()) for value in values]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)  # torch leaves others out
    return parameters


def _average_both_ways(rank: int) -> dict[str, bool]:
    """Average with torch's classes and functions and with ours, and tell where a bit differs."""
    claims = {}
    for kind in _KINDS:
        values = _numbers(rank, kind)
        theirs = _parameters(values)
        torch_averagers.PeriodicModelAverager(2).average_parameters(theirs)
        by_function = _parameters(values)
        torch_utils.average_parameters(iter(by_function), dist.group.WORLD)
        claims[f"{kind}: torch's two ways agree"] = _bits(theirs) == _bits(by_function)
        for bucket_bytes in (256, 5000, 4 * 2**20):
            ours = _parameters(values)
            averagers.PeriodicModelAverager(2, bucket_bytes=bucket_bytes).average_parameters(ours)
            claims[f"{kind} in buckets of {bucket_bytes}"] = _bits(ours) == _bits(theirs)
        ours = _parameters(values)
        averagers.HierarchicalModelAverager({2: 2}).average_parameters([{"params": ours}])
        claims[f"{kind}, hierarchical"] = _bits(ours) == _bits(theirs)
        ours = _parameters(values)
        averagers.average_parameters(ours)
        claims[f"{kind}, one round"] = _bits(ours) == _bits(theirs)
        if kind == "ordinary":
            both = zip(_numbers(0, kind), _numbers(1, kind), strict=True)
            claims["it is the mean"] = _bits(theirs) == _bits(torch.stack(pair).mean(0) for pair in both)
    return claims


def test_at_two_ranks_the_weights_are_torchs_bit_for_bit() -> None:
    for claims in run_ranks(_average_both_ways, 2):
        assert _failed(claims) == []


def _average_within_rounding(rank: int, world_size: int) -> list[str]:
    far = []
    for kind in ("ordinary", "of all sizes", "huge", "denormal"):
        values = _numbers(rank, kind)
        theirs = _parameters(values)
        torch_averagers.PeriodicModelAverager(2).average_parameters(theirs)
        sizes = torch.stack(
            [torch.cat([one.double().abs().reshape(-1) for one in _numbers(peer, kind)]) for peer in range(world_size)]
        ).mean(0)
        expected = torch.cat([one.detach().reshape(-1) for one in theirs]).double()
        # Below the smallest normal number a last bit is no longer relative.
        eps, smallest = torch.finfo(torch.float32).eps, torch.finfo(torch.float32).smallest_normal
        limit = world_size * eps * sizes.clamp(min=smallest)
        for bucket_bytes in (256, 5000, 4 * 2**20):
            ours = _parameters(values)
            averagers.PeriodicModelAverager(2, bucket_bytes=bucket_bytes).average_parameters(ours)
            found = torch.cat([one.detach().reshape(-1) for one in ours]).double()
            if not bool(((found - expected).abs() <= limit).all()):
                far.append(f"{kind} in buckets of {bucket_bytes}")
    return far


@pytest.mark.parametrize("world_size", [3, 4])
def test_at_more_ranks_the_weights_are_torchs_within_as_many_roundings_as_ranks(world_size: int) -> None:
    assert run_ranks(_average_within_rounding, world_size, world_size) == [[]] * world_size


def _average_in_subgroups(rank: int) -> dict[str, bool]:
    claims = {}
    for ranks in ([0, 1], [1, 3], [3, 0], [0, 1, 2, 3]):
        group = dist.new_group(ranks)
        values = [torch.full((5,), 8.0 * rank), torch.full((2, 3), 2.0**rank)]
        theirs, by_averager, by_function = (_parameters(values) for _ in range(3))
        torch_utils.average_parameters(iter(theirs), group)
        averagers.PeriodicModelAverager(2, 0, group).average_parameters(by_averager)
        averagers.average_parameters(by_function, group)
        claims[f"averager among {ranks}"] = _bits(by_averager) == _bits(theirs)
        claims[f"function among {ranks}"] = _bits(by_function) == _bits(theirs)
        claims[f"members of {ranks} moved"] = (_bits(theirs) != _bits(values)) == (rank in ranks)
    return claims


def test_sub_groups_average_as_torchs_do_and_ranks_outside_keep_their_weights() -> None:
    for claims in run_ranks(_average_in_subgroups, 4):
        assert _failed(claims) == []


def _walk(averager: Any, rank: int, world_size: int, calls: int) -> list[bytes]:
    """Change a parameter on every rank by whole numbers, average, and return its bits after each call."""
    weight = nn.Parameter(torch.arange(6.0).view(2, 3) * 4 * (rank + 1))
    weight.grad = torch.zeros_like(weight)
    seen = []
    for step in range(calls):
        with torch.no_grad():
            weight.add_((rank * 5 + step) % 7)
        averager.average_parameters(iter([weight]))
        seen += _bits([weight])
    return seen


def _walk_both(rank: int, world_size: int) -> dict[str, bool]:
    claims = {}
    for period, warmup_steps in ((2, 0), (4, 2), (3, 5)):
        ours = _walk(averagers.PeriodicModelAverager(period, warmup_steps), rank, world_size, 12)
        theirs = _walk(torch_averagers.PeriodicModelAverager(period, warmup_steps), rank, world_size, 12)
        claims[f"every {period} after {warmup_steps}"] = ours == theirs
    for sizes, warmup_steps in (
        ({2: 2, 4: world_size}, 0),
        ({1: 2, 3: 4, 6: world_size}, 2),
        ({4: world_size}, 1),
    ):
        ours = _walk(averagers.HierarchicalModelAverager(sizes, warmup_steps), rank, world_size, 9)
        theirs = _walk(torch_hierarchical.HierarchicalModelAverager(sizes, warmup_steps), rank, world_size, 9)
        claims[f"{sizes} after {warmup_steps}"] = ours == theirs
    return claims


@pytest.mark.parametrize("world_size", [4, 8])
def test_weights_walk_through_a_schedule_as_torchs_do(world_size: int) -> None:
    for claims in run_ranks(_walk_both, world_size, world_size):
        assert _failed(claims) == []


# Optimizers


def _train(make: Callable[[torch.optim.Optimizer], Any], rank: int) -> tuple[list[bytes], int]:
    """Train with an optimizer that ``make`` wraps, and return the weights' bits and the averager's step."""
    with torch.random.fork_rng():
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    optimizer = make(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for step in range(9):
        generator = torch.Generator().manual_seed(100 * rank + step)
        optimizer.zero_grad()
        model(torch.randn(8, 4, generator=generator)).square().mean().backward()
        optimizer.step()
    return _bits(model.parameters()), optimizer.averager.step


def _train_all_pairs(rank: int) -> list[tuple[str, bool]]:
    theirs = _torch_wrapper()
    pairs = {
        "torch's wrapper with our averager": (theirs, averagers.PeriodicModelAverager),
        "our wrapper with torch's averager": (
            averagers.PostLocalSGDOptimizer,
            torch_averagers.PeriodicModelAverager,
        ),
        "our wrapper with our averager": (averagers.PostLocalSGDOptimizer, averagers.PeriodicModelAverager),
    }
    expected = _train(lambda inner: theirs(inner, torch_averagers.PeriodicModelAverager(3, 2)), rank)
    found = {
        name: _train(lambda inner, wrap=wrap, kind=kind: wrap(optim=inner, averager=kind(3, 2)), rank)
        for name, (wrap, kind) in pairs.items()
    }
    found["torch's wrapper with our hierarchy"] = _train(
        lambda inner: theirs(inner, averagers.HierarchicalModelAverager({1: 1, 3: 2}, 2)), rank
    )
    expected_hierarchy = _train(
        lambda inner: averagers.PostLocalSGDOptimizer(
            inner, torch_hierarchical.HierarchicalModelAverager({1: 1, 3: 2}, 2)
        ),
        rank,
    )
    claims = [(name, result == expected) for name, result in found.items() if "hierarchy" not in name]
    claims.append(("hierarchies", found["torch's wrapper with our hierarchy"] == expected_hierarchy))
    claims.append(("the schedule matters", expected != expected_hierarchy))
    return claims


def test_wrappers_and_averagers_of_both_makes_go_together() -> None:
    for claims in run_ranks(_train_all_pairs, 2):
        assert [name for name, holds in claims if not holds] == []


def _finish_torchs(rank: int) -> list[float]:
    """End runs whose averager is torch's, which has no end of its own."""
    found = []
    for how in ("wrapper", "attach"):
        weight = nn.Parameter(torch.tensor(4.0 * rank))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        averager = torch_averagers.PeriodicModelAverager(3, 1)
        if how == "wrapper":
            wrapper = averagers.PostLocalSGDOptimizer(optimizer, averager)
            wrapper.step()
            wrapper.finish()
        else:
            with averagers.attach(optimizer, averager):
                optimizer.step()
        found.append(weight.item())
    return found


def test_finish_with_torchs_averager_leaves_one_model() -> None:
    assert run_ranks(_finish_torchs, 2) == [[2.0, 2.0]] * 2


# Checkpoints


def _checkpoints(rank: int) -> dict[str, bool]:
    theirs_kind = _torch_wrapper()

    def inner(weight: Tensor) -> torch.optim.Optimizer:
        return torch.optim.SGD([weight], lr=0.1, momentum=0.9)

    def parameter() -> nn.Parameter:
        weight = nn.Parameter(torch.ones(2))
        weight.grad = torch.full((2,), 1.0 + rank)
        return weight

    def reloaded(state: dict[str, Any]) -> dict[str, Any]:
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    theirs = theirs_kind(inner(parameter()), torch_averagers.PeriodicModelAverager(5, 3))
    for _ in range(4):
        theirs.step()
    momentum = theirs.optim.state_dict()["state"][0]["momentum_buffer"]

    ours = averagers.PostLocalSGDOptimizer(inner(parameter()), averagers.PeriodicModelAverager(5, 3))
    ours.load_state_dict(reloaded(theirs.state_dict()))
    claims = {
        "torch's step is loaded": ours.averager.step == 4,
        "torch's state is loaded": torch.equal(ours.state_dict()["state"][0]["momentum_buffer"], momentum),
    }

    ours.step()
    back = theirs_kind(inner(parameter()), torch_averagers.PeriodicModelAverager(5, 3))
    back.load_state_dict(reloaded(ours.state_dict()))
    claims["torch's wrapper loads ours"] = (
        back.averager.step == 5 and "momentum_buffer" in back.state_dict()["state"][0]
    )

    fresh = averagers.PostLocalSGDOptimizer(inner(parameter()), averagers.PeriodicModelAverager(5, 3))
    with pytest.warns(UserWarning, match="no step of an averager") as caught:
        fresh.load_state_dict(reloaded(theirs.optim.state_dict()))
    claims["a plain optimizer's warns at the caller's line"] = caught[0].filename.endswith("test_torch_averagers.py")
    claims["a plain optimizer's starts at 0"] = fresh.averager.step == 0
    claims["a plain optimizer's state is loaded"] = torch.equal(
        fresh.state_dict()["state"][0]["momentum_buffer"], momentum
    )

    with_theirs = averagers.PostLocalSGDOptimizer(inner(parameter()), torch_averagers.PeriodicModelAverager(5, 3))
    with_theirs.load_state_dict(reloaded(ours.state_dict()))
    claims["with torch's averager the step is loaded"] = with_theirs.averager.step == 5
    return claims


def test_checkpoints_of_torchs_wrapper_and_of_plain_optimizers_load_into_ours() -> None:
    for claims in run_ranks(_checkpoints, 2):
        assert _failed(claims) == []


# DDP's communication hook


def _train_ddp(averager: Any, state: Any, hook: Any, rank: int) -> list[float]:
    """Train under DDP with a hook, and return the weights."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    model.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(10):
        generator = torch.Generator().manual_seed(100 * rank + step)
        optimizer.zero_grad()
        model(torch.randn(8, 4, generator=generator)).square().mean().backward()
        optimizer.step()
        averager.average_parameters(model.parameters())
    return torch.cat([one.detach().reshape(-1) for one in model.parameters()]).tolist()


def _train_with_hooks(rank: int) -> dict[str, list[float]]:
    warmup_steps, found = 3, {}
    subgroup, _ = dist.new_subgroups(group_size=2)

    def ours() -> averagers.PeriodicModelAverager:
        return averagers.PeriodicModelAverager(4, warmup_steps)

    def torchs_state() -> PostLocalSGDState:
        return PostLocalSGDState(process_group=None, subgroup=subgroup, start_localSGD_iter=warmup_steps)

    theirs = torch_averagers.PeriodicModelAverager(4, warmup_steps)
    found["torch"] = _train_ddp(theirs, torchs_state(), post_localSGD_hook, rank)
    found["torch's hook, our averager"] = _train_ddp(ours(), torchs_state(), post_localSGD_hook, rank)
    averager = ours()
    state = averagers.PostLocalSGDState(averager, subgroup)
    found["ours"] = _train_ddp(averager, state, averagers.post_local_sgd_hook, rank)
    theirs = torch_averagers.PeriodicModelAverager(4, warmup_steps)
    state = averagers.PostLocalSGDState(theirs, subgroup)
    found["our hook, torch's averager"] = _train_ddp(theirs, state, averagers.post_local_sgd_hook, rank)
    return found


def test_hooks_and_averagers_of_both_makes_train_alike_under_ddp() -> None:
    results = run_ranks(_train_with_hooks, 4)
    for found in results:
        assert found["ours"] == found["torch's hook, our averager"]
        assert found["torch"] == found["our hook, torch's averager"]
        assert found["ours"] == pytest.approx(found["torch"], rel=1e-5, abs=1e-6)
    # Step 7 averaged, and two more steps within the subgroups have followed.
    assert results[0]["ours"] == results[1]["ours"]
    assert results[0]["ours"] != results[2]["ours"]


def _gradients_seen(rank: int) -> dict[str, Any]:
    """Return the gradients that DDP leaves, in the warm-up and after it, for each subgroup."""
    pairs, _ = dist.new_subgroups(group_size=2)
    alone, _ = dist.new_subgroups(group_size=1)
    found: dict[str, Any] = {}
    for name, subgroup in (("pairs", pairs), ("alone", alone), ("node", None)):
        averager = averagers.PeriodicModelAverager(2, 1)
        state = averagers.PostLocalSGDState(averager, subgroup)
        model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
        model.register_comm_hook(state, averagers.post_local_sgd_hook)
        seen = []
        for _ in range(2):
            for _ in range(2):  # two backward passes a step: the step decides, not their number
                model.zero_grad()
                model(torch.tensor([[8.0 * rank]])).sum().backward()
                seen.append(model.module.weight.grad.item())
            averager.average_parameters(model.parameters())
        found[name] = seen
        found[f"{name} repr"] = repr(state)
    return found


def test_our_hook_averages_gradients_among_all_in_the_warm_up_and_in_the_subgroup_afterwards() -> None:
    for rank, found in enumerate(run_ranks(_gradients_seen, 4)):
        pair_mean = 4.0 if rank < 2 else 20.0
        assert found["pairs"] == [12.0, 12.0, pair_mean, pair_mean]
        assert found["alone"] == [12.0, 12.0, 8.0 * rank, 8.0 * rank]
        assert found["node"] == [12.0] * 4  # all ranks are on this node
        assert "subgroup of 2" in found["pairs repr"]
        assert "subgroup of 4" in found["node repr"]


def _hook_refusals(rank: int) -> list[str]:
    members = dist.new_group([0])
    averager = averagers.PeriodicModelAverager(2, 1)
    partial = averagers.PeriodicModelAverager(2, 1, members)
    messages = []
    for make in (
        lambda: averagers.PostLocalSGDState(averager, members),
        lambda: averagers.PostLocalSGDState(partial, None),
        lambda: averagers.PostLocalSGDState("averager"),
        lambda: averagers.PostLocalSGDState(averager, "subgroup"),
    ):
        try:
            made = make()
        except (ValueError, TypeError) as error:
            messages.append(f"{type(error).__name__}: {error}")
        else:
            messages.append(f"made with {made.subgroup.size()}")
    return messages


def test_the_hooks_state_refuses_at_construction_what_cannot_work() -> None:
    inside, outside = run_ranks(_hook_refusals, 2)
    assert inside[:2] == ["made with 1", "made with 1"]
    assert "InvalidValueError: this rank is not in subgroup" in outside[0]
    assert "InvalidValueError: this rank is not in the averager's process group" in outside[1]
    for messages in (inside, outside):
        assert "InvalidTypeError: averager must be an averager with a warm-up, got str" in messages[2]
        assert "InvalidTypeError: " in messages[3]


def _ddp_channels_last(rank: int) -> tuple[bool, int]:
    """Train a channels_last model under DDP, which warns where a gradient has other strides than its weight."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last))
    averager = averagers.PeriodicModelAverager(2)
    state = averagers.PostLocalSGDState(averager)
    model.register_comm_hook(state, averagers.post_local_sgd_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pointers = [one.data_ptr() for one in model.parameters()]
    for _ in range(3):
        optimizer.zero_grad()
        images = torch.full((2, 3, 5, 5), float(rank)).to(memory_format=torch.channels_last)
        model(images).sum().backward()
        optimizer.step()
        averager.average_parameters(model.parameters())
    kept = model.module.weight.is_contiguous(memory_format=torch.channels_last)
    return kept and pointers == [one.data_ptr() for one in model.parameters()], averager.step


def test_channels_last_models_train_on_under_ddp_without_a_warning() -> None:
    assert run_ranks(_ddp_channels_last, 2) == [(True, 3)] * 2


# The API's own example

_EXAMPLE = textwrap.dedent(
    """
    averager = averagers.PeriodicModelAverager(period=4, warmup_steps=100)
    for step in range(0, 200):
       optimizer.zero_grad()
       loss = loss_fn(output, labels)
       loss.backward()
       optimizer.step()
       # Will average model parameters globally every 4 steps.
       averager.average_parameters(model.parameters())
    """
)


class _Outputs:
    """Stands for the example's ``output``: a fresh forward pass whenever the loss reads it."""

    def __init__(self, model: nn.Module, rank: int) -> None:
        self.model = model
        self.inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(rank))

    def read(self) -> Tensor:
        return self.model(self.inputs)


def _example_loss(output: _Outputs, labels: Tensor) -> Tensor:
    return (output.read() - labels).square().mean()


def _run_example(rank: int) -> tuple[bool, int]:
    results = []
    for module in (averagers, torch_averagers):
        with torch.random.fork_rng():
            torch.manual_seed(rank)
            model = nn.Linear(4, 1)
        names: dict[str, Any] = {
            "averagers": module,
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "output": _Outputs(model, rank),
            "loss_fn": _example_loss,
            "labels": torch.ones(8, 1),
        }
        exec(_EXAMPLE, names)
        results.append((_bits(model.parameters()), names["averager"].step))
    return results[0] == results[1], results[0][1]


def test_the_example_of_the_api_runs_as_it_stands_and_ends_with_torchs_weights() -> None:
    assert run_ranks(_run_example, 2) == [(True, 200)] * 2
