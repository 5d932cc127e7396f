"""Averaging inside a training loop: the wrapper and `attach` against loops written by hand."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import averagers
from ranks_runner import run_ranks

_HOW = ["wrapper", "attach"]
_PERIOD, _WARMUP = 3, 1


def _model(rank: int) -> nn.Sequential:
    """Return a small model; those of two ranks differ."""
    with torch.random.fork_rng():
        torch.manual_seed(rank)
        return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


def _loss(model: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    inputs = torch.randn(8, 4, generator=generator)
    return (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()


def _averager(**options: Any) -> averagers.PeriodicModelAverager:
    return averagers.PeriodicModelAverager(_PERIOD, _WARMUP, **options)


def _is_due(step: int) -> bool:
    return step >= _WARMUP and (step - _WARMUP) % _PERIOD == 0


def _joined(how: str, optimizer: torch.optim.Optimizer, averager: Any) -> torch.optim.Optimizer:
    """Return the optimizer that a loop steps, with averaging behind it."""
    if how == "wrapper":
        return averagers.ModelAveragingOptimizer(optimizer, averager)
    averagers.attach(optimizer, averager)
    return optimizer


def _average_by_hand(replicas: Iterable[nn.Module]) -> None:
    with torch.no_grad():
        for same in zip(*(replica.parameters() for replica in replicas), strict=True):
            mean = sum(one / len(same) for one in same)
            for one in same:
                one.copy_(mean)


def _bits(tensors: Iterable[Tensor]) -> list[bytes]:
    return [tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]


def _failed(claims: dict[str, bool]) -> list[str]:
    return [claim for claim, holds in claims.items() if not holds]


def _raises(kind: type[Exception], function: Callable[[], Any]) -> str:
    """Return the message of the exception that ``function`` must raise."""
    with pytest.raises(kind) as caught:
        function()
    return str(caught.value)


# Whole trainings, bit for bit

_MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
_TRAININGS: dict[str, tuple[_MakeOptimizer, Callable[[torch.optim.Optimizer], Any]]] = {
    "SGD, no scheduler": (lambda model: torch.optim.SGD(model.parameters(), lr=0.05), lambda optimizer: None),
    "SGD, LambdaLR": (
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    ),
    "SGD, OneCycleLR with its momentum": (
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20),
    ),
    "AdamW, OneCycleLR with its betas": (
        lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20),
    ),
    "AdamW, CosineAnnealingLR": (
        lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10),
    ),
    "fused AdamW, warm-up from a rate of 0": (
        lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, fused=True),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 4)),
    ),
    "Adam over named parameters": (
        lambda model: torch.optim.Adam(model.named_parameters(), lr=0.1),
        lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    ),
    "two groups": (
        lambda model: torch.optim.SGD(
            [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters()}], lr=0.01
        ),
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 4),
    ),
}


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, rank: int, step: int) -> None:
    optimizer.zero_grad()
    _loss(model, rank, step).backward()
    optimizer.step()
    if scheduler is not None:
        scheduler.step()


def _train_like_by_hand(rank: int, how: str) -> dict[str, bool]:
    claims = {}
    for name, (make_optimizer, make_scheduler) in _TRAININGS.items():
        replicas = [_model(peer) for peer in range(2)]
        optimizers = [make_optimizer(replica) for replica in replicas]
        schedulers = [make_scheduler(optimizer) for optimizer in optimizers]
        model, averager = _model(rank), _averager()
        optimizer = _joined(how, make_optimizer(model), averager)
        scheduler = make_scheduler(optimizer)
        for step in range(9):
            _step(model, optimizer, scheduler, rank, step)
            for peer in range(2):
                _step(replicas[peer], optimizers[peer], schedulers[peer], peer, step)
            if _is_due(step):
                _average_by_hand(replicas)
        claims[f"{name}: same weights"] = _bits(model.parameters()) == _bits(replicas[rank].parameters())
        claims[f"{name}: nine steps"] = averager.step == 9
        rates = [group["lr"] for group in optimizer.param_groups]
        claims[f"{name}: same rates"] = rates == [group["lr"] for group in optimizers[rank].param_groups]
    return claims


@pytest.mark.parametrize("how", _HOW)
def test_training_with_a_scheduler_equals_the_loop_written_by_hand_bit_for_bit(how: str) -> None:
    for claims in run_ranks(_train_like_by_hand, 2, how):
        assert _failed(claims) == []


def _accumulate(rank: int, how: str) -> tuple[bool, int]:
    model, averager = _model(rank), _averager()
    optimizer = _joined(how, torch.optim.SGD(model.parameters(), lr=0.1), averager)
    replicas = [_model(peer) for peer in range(2)]
    by_hand = [torch.optim.SGD(replica.parameters(), lr=0.1) for replica in replicas]
    for step in range(5):
        for net, steps, peer in [(model, optimizer, rank), *zip(replicas, by_hand, range(2), strict=True)]:
            steps.zero_grad()
            for micro_step in range(3):
                (_loss(net, peer, 3 * step + micro_step) / 3).backward()
            steps.step()
        if _is_due(step):
            _average_by_hand(replicas)
    return _bits(model.parameters()) == _bits(replicas[rank].parameters()), averager.step


@pytest.mark.parametrize("how", _HOW)
def test_with_gradient_accumulation_steps_are_counted_not_backward_passes(how: str) -> None:
    assert run_ranks(_accumulate, 2, how) == [(True, 5)] * 2


# Gradient scaling

_SCALED: dict[str, _MakeOptimizer] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
    "fused AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, fused=True),
}
_OVERFLOWS = {(1, 2), (0, 4), (1, 4), (1, 5)}  # (rank, step)


def _scaled_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, rank: int, step: int, clip: bool
) -> None:
    optimizer.zero_grad()
    loss = _loss(model, rank, step)
    if (rank, step) in _OVERFLOWS:
        loss = loss * torch.inf
    scaler.scale(loss).backward()
    if clip:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()


def _train_scaled(rank: int, how: str) -> dict[str, bool]:
    claims = {}
    for name, make_optimizer in _SCALED.items():
        for clip in (False, True):
            model, averager = _model(rank), _averager()
            optimizer = _joined(how, make_optimizer(model), averager)
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
            replicas = [_model(peer) for peer in range(2)]
            optimizers = [make_optimizer(replica) for replica in replicas]
            scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2)]
            for step in range(9):
                _scaled_step(model, optimizer, scaler, rank, step, clip)
                for peer in range(2):
                    _scaled_step(replicas[peer], optimizers[peer], scalers[peer], peer, step, clip)
                if _is_due(step):
                    _average_by_hand(replicas)
            case = f"{name}{' with clipping' if clip else ''}"
            claims[f"{case}: same weights"] = _bits(model.parameters()) == _bits(replicas[rank].parameters())
            claims[f"{case}: ranks in step"] = averager.step == 9
            claims[f"{case}: same scale"] = scaler.get_scale() == scalers[rank].get_scale()
            mine, theirs = optimizer.state_dict()["state"], optimizers[rank].state_dict()["state"]
            claims[f"{case}: same state"] = all(
                _bits(value for value in mine[key].values() if isinstance(value, Tensor))
                == _bits(value for value in theirs[key].values() if isinstance(value, Tensor))
                for key in theirs
            )
    return claims


@pytest.mark.parametrize("how", _HOW)
def test_a_scaler_that_skips_steps_of_one_rank_keeps_ranks_in_step_and_equals_the_hand_loop(how: str) -> None:
    for claims in run_ranks(_train_scaled, 2, how):
        assert _failed(claims) == []


def _scaled_gradients(rank: int, how: str) -> tuple[list[float], list[str]]:
    """Return the gradient left after a step with and one without inf, and what the scaler left behind."""
    weight = nn.Parameter(torch.ones(1))
    inner = torch.optim.SGD([weight], lr=1.0)
    optimizer = _joined(how, inner, _averager())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    left = []
    for factor in (torch.inf, 3.0):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        left.append(weight.grad.item() if weight.grad is not None else -1.0)
    return left, [name for name in ("grad_scale", "found_inf") if hasattr(optimizer, name)]


@pytest.mark.parametrize("how", _HOW)
def test_after_a_scaled_step_the_gradients_are_there_unscaled_as_torch_leaves_them(how: str) -> None:
    assert run_ranks(_scaled_gradients, 1, how) == [([torch.inf, 3.0], [])]


def _scaled_without_gradients(rank: int, how: str) -> tuple[int, float]:
    """Step a fused AdamW through a scaler on a rank whose parameters got no gradient."""
    weight = nn.Parameter(torch.tensor(float(rank)))
    averager = _averager()
    optimizer = _joined(how, torch.optim.AdamW([weight], lr=0.0, weight_decay=0.0, fused=True), averager)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for _ in range(2):
        optimizer.zero_grad()
        loss = scaler.scale(weight * 2)
        if rank == 0:
            loss.backward()
        scaler.step(optimizer)
        if rank == 0:
            scaler.update()
        else:  # torch's own update asserts that a gradient was looked at
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            scaler.scale(weight)
    return averager.step, weight.item()


@pytest.mark.parametrize("how", _HOW)
def test_a_scaled_step_without_any_gradient_counts_like_the_others(how: str) -> None:
    assert run_ranks(_scaled_without_gradients, 2, how) == [(2, 0.5)] * 2


def _scaler_after_remove(rank: int) -> tuple[bool, bool, int]:
    weight = nn.Parameter(torch.ones(1))
    plain = torch.optim.SGD([weight], lr=1.0)
    fused = torch.optim.AdamW([weight], lr=1.0, fused=True)
    averager, other = _averager(), _averager()
    for optimizer, its_averager in ((plain, averager), (fused, other)):
        averagers.attach(optimizer, its_averager).remove()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(weight * torch.inf).sum().backward()
    scaler.step(plain)
    return hasattr(plain, "_step_supports_amp_scaling"), fused._step_supports_amp_scaling, averager.step


def test_remove_leaves_the_optimizer_as_a_scaler_knew_it() -> None:
    assert run_ranks(_scaler_after_remove, 1) == [(False, True, 0)]


# Closures


def _train_lbfgs(rank: int, how: str) -> dict[str, bool]:
    def make(peer: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = _model(peer)
        return model, torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3, history_size=4)

    def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, peer: int, step: int) -> float:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = _loss(model, peer, step)
            loss.backward()
            return loss

        loss = optimizer.step(closure) if step % 2 else optimizer.step(closure=closure)
        return float(loss.detach())

    model, inner = make(rank)
    averager = _averager()
    optimizer = _joined(how, inner, averager)
    replicas = [make(peer) for peer in range(2)]
    losses, by_hand = [], []
    for step in range(6):
        losses.append(step_of(model, optimizer, rank, step))
        found = [step_of(*replica, peer, step) for peer, replica in enumerate(replicas)]
        by_hand.append(found[rank])
        if _is_due(step):
            _average_by_hand(net for net, _ in replicas)
    return {
        "same losses": losses == by_hand,
        "same weights": _bits(model.parameters()) == _bits(replicas[rank][0].parameters()),
        "one step a call": averager.step == 6,
    }


@pytest.mark.parametrize("how", _HOW)
def test_lbfgs_trains_with_its_closure_and_returns_the_loss(how: str) -> None:
    for claims in run_ranks(_train_lbfgs, 2, how):
        assert _failed(claims) == []


def _losses_returned(rank: int) -> list[Any]:
    weight = nn.Parameter(torch.ones(1))
    optimizer = averagers.ModelAveragingOptimizer(torch.optim.SGD([weight], lr=0.0), _averager())
    return [optimizer.step(), optimizer.step(lambda: 3.5), optimizer.step(closure=lambda: "the loss")]


def test_the_wrapper_returns_what_the_closure_returned() -> None:
    assert run_ranks(_losses_returned, 1) == [[None, 3.5, "the loss"]]


# The wrapper is a whole optimizer


def _wrapper_parts(rank: int) -> dict[str, bool]:
    model, calls = _model(0), []
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    averager = _averager()
    optimizer = averagers.PostLocalSGDOptimizer(inner, averager)
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    inner.register_step_pre_hook(lambda *_: calls.append("inner"))
    _loss(model, 0, 0).backward()
    optimizer.step()
    claims = {
        "it is an optimizer": isinstance(optimizer, torch.optim.Optimizer),
        "the alias is the class": averagers.PostLocalSGDOptimizer is averagers.ModelAveragingOptimizer,
        "what it wraps is reachable": optimizer.optim is inner and optimizer.averager is averager,
        "defaults": optimizer.defaults == inner.defaults,
        "param_groups are the inner ones": optimizer.param_groups is inner.param_groups,
        "state is the inner one": optimizer.state is inner.state,
        "hooks run once, around the step": calls == ["pre", "inner", "post"],
        "repr": "AdamW" in repr(optimizer) and "PeriodicModelAverager(period=3" in repr(optimizer),
    }
    optimizer.zero_grad(set_to_none=False)
    claims["zero_grad to zeros"] = all(bool((one.grad == 0).all()) for one in model.parameters())
    optimizer.zero_grad()
    claims["zero_grad to None"] = all(one.grad is None for one in model.parameters())
    optimizer.param_groups[0]["lr"] = 0.25
    claims["a rate set reaches the inner optimizer"] = inner.param_groups[0]["lr"] == 0.25
    return claims


def test_the_wrapper_has_the_parts_of_an_optimizer() -> None:
    (claims,) = run_ranks(_wrapper_parts, 1)
    assert _failed(claims) == []


def _state_dict_hooks(rank: int) -> list[str]:
    calls: list[str] = []
    weight = nn.Parameter(torch.ones(1))
    optimizer = averagers.ModelAveragingOptimizer(torch.optim.SGD([weight], lr=0.1), _averager())
    optimizer.register_state_dict_pre_hook(lambda *_: calls.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda *_: calls.append("after saving"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: calls.append("before loading"))
    optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("after loading"))
    optimizer.load_state_dict(optimizer.state_dict())
    return calls


def test_state_dict_hooks_registered_on_the_wrapper_run() -> None:
    assert run_ranks(_state_dict_hooks, 1) == [["before saving", "after saving", "before loading", "after loading"]]


def _added_groups(rank: int, how: str) -> dict[str, bool]:
    def tensor(salt: int) -> nn.Parameter:
        return nn.Parameter(torch.tensor([4.0 * rank + salt, 2.0 * rank]))

    first, second, third = (tensor(salt) for salt in range(3))
    averager = _averager()
    optimizer = _joined(how, torch.optim.SGD([first], lr=0.0), averager)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    optimizer.add_param_group({"params": [second]})
    for _ in range(2):
        optimizer.step()
    means = [[2.0 + salt, 1.0] for salt in range(3)]
    claims = {"a group added before the first round is averaged": [first.tolist(), second.tolist()] == means[:2]}
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({"params": [third]})
    for group in optimizer.param_groups:
        group["lr"] = 1.0
    for parameter in (first, second, third):
        parameter.grad = torch.ones(2) * (2 * rank)
    for _ in range(3):
        optimizer.step()
    # Three steps of -1 times 0 or 2 each, then their mean.
    expected = [[mean[0] - 3.0, mean[1] - 3.0] for mean in means]
    claims["a group added after loading trains and is averaged"] = [
        first.tolist(),
        second.tolist(),
        third.tolist(),
    ] == expected
    claims["the scheduler has the optimizer's groups"] = scheduler.optimizer.param_groups is optimizer.param_groups
    return claims


@pytest.mark.parametrize("how", _HOW)
def test_added_parameter_groups_train_and_are_averaged_also_after_loading(how: str) -> None:
    for claims in run_ranks(_added_groups, 2, how):
        assert _failed(claims) == []


def _rates_after_loading(rank: int) -> list[float]:
    weight = nn.Parameter(torch.ones(1))
    inner = torch.optim.SGD([weight], lr=1.0)
    optimizer = averagers.ModelAveragingOptimizer(inner, _averager())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.load_state_dict(optimizer.state_dict())
    weight.grad = torch.ones(1)
    rates = []
    for _ in range(3):
        optimizer.step()
        scheduler.step()
        rates += [inner.param_groups[0]["lr"], optimizer.param_groups[0]["lr"]]
    return rates


def test_a_scheduler_goes_on_working_after_loading() -> None:
    assert run_ranks(_rates_after_loading, 1) == [[0.5, 0.5, 0.25, 0.25, 0.125, 0.125]]


def _copies(rank: int) -> dict[str, bool]:
    model = _model(rank)
    optimizer = averagers.ModelAveragingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), _averager())
    optimizer.step()
    twin = copy.deepcopy(optimizer)
    before = _bits(model.parameters())
    twin.step()  # a round, over the copies alone
    first_weight = twin.param_groups[0]["params"][0].detach().clone()
    peers = [torch.empty_like(first_weight) for _ in range(2)]
    dist.all_gather(peers, first_weight)
    claims = {
        "the copy counts for itself": (optimizer.averager.step, twin.averager.step) == (1, 2),
        "the copy averages its own parameters": torch.equal(peers[0], peers[1]),
        "the original's are untouched": _bits(model.parameters()) == before,
        "the copy's parameters are its inner optimizer's": twin.param_groups is twin.optim.param_groups,
    }
    twin.averager.close()
    optimizer.step()
    claims["closing the copy's averager leaves the original's groups"] = optimizer.averager.step == 2
    return claims


def test_a_deep_copy_of_the_wrapper_trains_on_its_own() -> None:
    for claims in run_ranks(_copies, 2):
        assert _failed(claims) == []


def _pickle_messages(rank: int) -> list[str]:
    weight = nn.Parameter(torch.ones(1))
    optimizer = averagers.ModelAveragingOptimizer(torch.optim.SGD([weight], lr=0.1), _averager())
    return [
        _raises(TypeError, lambda: pickle.dumps(optimizer)),
        _raises(TypeError, lambda: pickle.dumps(optimizer.averager)),
        _raises(TypeError, lambda: torch.save(optimizer, io.BytesIO())),
    ]


def test_pickling_the_wrapper_or_its_averager_says_to_save_the_state_dict() -> None:
    (messages,) = run_ranks(_pickle_messages, 1)
    assert all("state_dict()" in message and "PeriodicModelAverager" in message for message in messages)


# Resuming


def _resume(rank: int, how: str) -> dict[str, bool]:
    def build() -> tuple[nn.Module, torch.optim.Optimizer, averagers.PeriodicModelAverager, Any]:
        model, averager = _model(rank), _averager()
        optimizer = _joined(how, torch.optim.AdamW(model.parameters(), lr=0.1), averager)
        return model, optimizer, averager, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=30)

    def saved(values: dict[str, Any]) -> dict[str, Any]:
        file = io.BytesIO()
        torch.save(values, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    model, optimizer, averager, scheduler = build()
    for step in range(5):
        _step(model, optimizer, scheduler, rank, step)
    checkpoint = saved(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "averager": averager.state_dict(),
            "scheduler": scheduler.state_dict(),
        }
    )
    resumed, its_optimizer, its_averager, its_scheduler = build()
    resumed.load_state_dict(checkpoint["model"])
    its_optimizer.load_state_dict(checkpoint["optimizer"])
    if how == "attach":
        its_averager.load_state_dict(checkpoint["averager"])
    its_scheduler.load_state_dict(checkpoint["scheduler"])
    for step in range(5, 12):
        _step(model, optimizer, scheduler, rank, step)
        _step(resumed, its_optimizer, its_scheduler, rank, step)
    return {
        "same weights": _bits(model.parameters()) == _bits(resumed.parameters()),
        "same step": its_averager.step == 12,
        "same averager state": averager.state_dict() == its_averager.state_dict(),
    }


@pytest.mark.parametrize("how", _HOW)
def test_a_resumed_run_equals_the_one_that_was_not_stopped_bit_for_bit(how: str) -> None:
    for claims in run_ranks(_resume, 2, how):
        assert _failed(claims) == []


def _bad_states(rank: int) -> dict[str, bool]:
    weight = nn.Parameter(torch.ones(1))
    averager = _averager()
    optimizer = averagers.ModelAveragingOptimizer(torch.optim.SGD([weight], lr=0.5, momentum=0.9), averager)
    weight.grad = torch.ones(1)
    optimizer.step()
    good = optimizer.state_dict()
    claims = {}
    for name, changes in {
        "a negative step": {"step": -1},
        "a step of text": {"step": "5"},
        "a fraction": {"step": 2.0},
        "a truth value": {"step": True},
        "an averager's negative step": {"averager": {**good["averager"], "step": -1}},
        "an averager with another period": {
            "averager": {
                **good["averager"],
                "configuration": {**good["averager"]["configuration"], "period": 99},
            }
        },
        "half an averager": {"averager": {"step": 4}},
    }.items():
        bad = {**good, **changes, "param_groups": [{**good["param_groups"][0], "lr": 7.0}]}
        message = _raises(averagers.StateDictError, lambda bad=bad: optimizer.load_state_dict(bad))
        claims[f"{name} is named: {message}"] = "step" in message or "period" in message or "lacks" in message
        claims[f"{name} loads nothing"] = optimizer.param_groups[0]["lr"] == 0.5 and averager.step == 1
    return claims


def test_a_damaged_or_foreign_state_is_refused_before_anything_is_loaded() -> None:
    (claims,) = run_ranks(_bad_states, 1)
    assert _failed(claims) == []


def _state_of_another_model(rank: int) -> tuple[str, int]:
    small = averagers.ModelAveragingOptimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5), _averager())
    two = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    large = averagers.ModelAveragingOptimizer(torch.optim.SGD(two, lr=0.5), _averager())
    for _ in range(4):
        large.step()
    return _raises(ValueError, lambda: small.load_state_dict(large.state_dict())), small.averager.step


def test_a_state_that_the_inner_optimizer_refuses_leaves_the_step_as_it_was() -> None:
    ((message, step),) = run_ranks(_state_of_another_model, 1)
    assert "parameter group" in message
    assert step == 0


# Distributed checkpoints


def _states_of_a_fresh_optimizer(rank: int, how: str) -> tuple[int, int, int, bool]:
    events: list[Any] = []
    model, averager = _model(rank), averagers.PeriodicModelAverager(2, observers=[events.append])
    optimizer = _joined(how, torch.optim.AdamW(model.parameters(), lr=0.1), averager)
    before = _bits(model.parameters())
    if rank == 0:  # one alone: a collective would find nobody
        get_optimizer_state_dict(model, optimizer)
    unchanged = _bits(model.parameters()) == before and optimizer.param_groups[0]["lr"] == 0.1
    counted, heard = averager.step, len(events)
    _step(model, optimizer, None, rank, 0)
    return counted, heard, averager.step, unchanged


@pytest.mark.parametrize("how", _HOW)
def test_get_optimizer_state_dict_of_a_fresh_optimizer_neither_counts_nor_communicates(how: str) -> None:
    assert run_ranks(_states_of_a_fresh_optimizer, 2, how) == [(0, 0, 1, True)] * 2


def _steps_at_rate_zero(rank: int, how: str) -> list[int]:
    """Count steps that are training though a rate is 0: a warm-up's first, with and without a closure."""
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    averager = _averager()
    optimizer = _joined(how, torch.optim.SGD([weight], lr=0.0), averager)
    counts = []
    for arguments in ((), (None,), (lambda: 1.0,)):
        optimizer.step(*arguments)
        counts.append(averager.step)
    optimizer.step(closure=lambda: 2.0)
    counts.append(averager.step)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.1})
    optimizer.step(closure=None)
    counts.append(averager.step)
    return counts


@pytest.mark.parametrize("how", _HOW)
def test_a_training_step_at_a_rate_of_zero_is_counted(how: str) -> None:
    assert run_ranks(_steps_at_rate_zero, 1, how) == [[1, 2, 3, 4, 5]]


def _resume_from_dcp(rank: int, how: str, folder: str) -> dict[str, bool]:
    def build() -> tuple[nn.Module, torch.optim.Optimizer, averagers.PeriodicModelAverager]:
        model, averager = _model(0), _averager()
        return model, _joined(how, torch.optim.AdamW(model.parameters(), lr=0.1), averager), averager

    model, optimizer, averager = build()
    for step in range(5):  # the last step averages, so that one rank's checkpoint is everybody's model
        _step(model, optimizer, None, 0, step)
    state = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
        "averager": averager,
    }
    dcp.save(state, checkpoint_id=folder)

    resumed, its_optimizer, its_averager = build()
    state = {
        "model": get_model_state_dict(resumed),
        "optim": get_optimizer_state_dict(resumed, its_optimizer),
        "averager": its_averager,
    }
    dcp.load(state, checkpoint_id=folder)
    claims = {"the averager is loaded": its_averager.state_dict() == averager.state_dict()}
    set_model_state_dict(resumed, state["model"])
    set_optimizer_state_dict(resumed, its_optimizer, state["optim"])
    claims["its step survives the loading of the optimizer"] = its_averager.step == 5
    for step in range(5, 9):
        _step(model, optimizer, None, rank, step)
        _step(resumed, its_optimizer, None, rank, step)
    claims["the resumed run equals the other"] = _bits(model.parameters()) == _bits(resumed.parameters())
    return claims


@pytest.mark.parametrize("how", _HOW)
def test_a_run_resumes_from_a_distributed_checkpoint_with_its_averager(how: str, tmp_path: Any) -> None:
    for claims in run_ranks(_resume_from_dcp, 2, how, str(tmp_path)):
        assert _failed(claims) == []


def _averager_alone_in_dcp(rank: int, folder: str) -> dict[str, bool]:
    sizes, frozen = {2: 1, 4: 2}, nn.Parameter(torch.ones(1), requires_grad=False)
    averager = averagers.HierarchicalModelAverager(sizes, warmup_steps=1)
    for _ in range(6):
        averager.average_parameters([frozen, nn.Parameter(torch.ones(1))])
    dcp.save({"averager": averager}, checkpoint_id=folder)
    fresh = averagers.HierarchicalModelAverager(sizes, warmup_steps=1)
    dcp.load({"averager": fresh}, checkpoint_id=folder)
    other = averagers.HierarchicalModelAverager({2: 1, 8: 2}, warmup_steps=1)
    return {
        "a fresh averager takes over all": fresh.state_dict() == averager.state_dict() and fresh.step == 6,
        "the trainable positions are kept": fresh.state_dict()["once_trainable"] == [1],
        "another configuration is refused": "{2: 1, 8: 2}"
        in _raises(Exception, lambda: dcp.load({"averager": other}, checkpoint_id=folder)),
    }


def test_an_averager_is_saved_and_loaded_by_a_distributed_checkpoint(tmp_path: Any) -> None:
    for claims in run_ranks(_averager_alone_in_dcp, 2, str(tmp_path)):
        assert _failed(claims) == []


# What is refused


def _refused_pairs(rank: int) -> dict[str, str]:
    model = _model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about its use of torch.jit
        from torch.distributed.optim import ZeroRedundancyOptimizer

        sharded = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    found = {}
    for name, join in (("wrapper", averagers.ModelAveragingOptimizer), ("attach", averagers.attach)):
        for what, kind, one, other in (
            ("sharded", ValueError, sharded, _averager()),
            ("model", TypeError, model, _averager()),
            ("swapped", TypeError, _averager(), optimizer),
            ("no averager", TypeError, optimizer, "averager"),
            ("class", TypeError, optimizer, averagers.PeriodicModelAverager),
        ):
            found[f"{name} {what}"] = _raises(kind, lambda join=join, one=one, other=other: join(one, other))
    found["attach module"] = _raises(
        TypeError, lambda: averagers.attach(optimizer, _averager(), module=model.parameters())
    )
    return found


def test_what_does_not_fit_together_is_refused_when_it_is_joined() -> None:
    (found,) = run_ranks(_refused_pairs, 1)
    for how in _HOW:
        assert "ZeroRedundancyOptimizer" in found[f"{how} sharded"]
        assert "overwrites every rank's weights" in found[f"{how} sharded"]
        assert "optimizer must be a torch.optim.Optimizer, got Sequential" in found[f"{how} model"]
        assert "optimizer must be a torch.optim.Optimizer, got PeriodicModelAverager" in found[f"{how} swapped"]
        assert "averager must be a ModelAverager" in found[f"{how} no averager"]
        assert "averager must be a ModelAverager" in found[f"{how} class"]
    assert "module must be a torch.nn.Module" in found["attach module"]


def _two_optimizers(rank: int) -> dict[str, bool]:
    claims = {}
    joins = {"wrapper": averagers.ModelAveragingOptimizer, "attach": averagers.attach}

    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)

    for first_name, first in joins.items():
        for second_name, second in joins.items():
            averager = _averager()
            kept = first(optimizer(), averager)
            message = _raises(averagers.InvalidValueError, lambda s=second, a=averager: s(optimizer(), a))
            claims[f"{first_name}, then {second_name}: refused"] = "build an averager for each" in message
            claims[f"{first_name}, then {second_name}: one of two averagers"] = (
                second(optimizer(), _averager()) is not kept
            )
    averager = _averager()
    averagers.attach(optimizer(), averager).remove()
    handle = averagers.attach(optimizer(), averager)
    claims["accepted after remove"] = handle.averager is averager
    handle.remove()
    handle.remove()
    with averagers.attach(optimizer(), averager):
        pass
    wrapper = averagers.ModelAveragingOptimizer(optimizer(), averager)
    claims["accepted after the end of a with block"] = wrapper.averager is averager
    del wrapper
    gc.collect()
    claims["accepted when the first is gone"] = averagers.attach(optimizer(), averager).averager is averager
    return claims


def test_a_second_optimizer_on_one_averager_is_refused_until_the_first_is_removed() -> None:
    (claims,) = run_ranks(_two_optimizers, 1)
    assert _failed(claims) == []


# attach with a module


class _Net(nn.Module):
    """Weights, frozen weights, and buffers of every kind, all different on every rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 4.0 * rank))
        self.frozen = nn.Parameter(torch.full((2, 2), 4.0 * rank), requires_grad=False)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("scale", torch.full((2,), 4.0 * rank))
        self.register_buffer("temporary", torch.full((2,), 4.0 * rank), persistent=False)
        self.register_buffer("half_scale", torch.full((2,), 4.0 * rank, dtype=torch.bfloat16))
        self.register_buffer("count", torch.tensor(rank))
        self.register_buffer("mask", torch.tensor([rank == 0, rank == 1]))
        self.register_buffer("complex_scale", torch.full((2,), 4j * rank))
        self.register_buffer("nothing", None)

    def numbers(self) -> dict[str, Any]:
        """Return all weights and buffers."""
        values = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        return {name: value.tolist() for name, value in values.items()}


def _attach_net(rank: int) -> tuple[dict[str, Any], dict[str, Any], bool]:
    net = _Net(rank)
    with torch.no_grad():
        net.norm.running_mean.fill_(rank)
        net.norm.num_batches_tracked.fill_(rank + 5)
    addresses = {name: value.data_ptr() for name, value in net.state_dict().items()}
    optimizer = torch.optim.SGD([{"params": [net.weight]}, {"params": net.norm.parameters()}], lr=0.0)
    averager = averagers.PeriodicModelAverager(2)
    averagers.attach(optimizer, averager, module=net)
    attached = net.numbers()
    with torch.no_grad():
        for name, value in [*net.named_parameters(), *net.named_buffers()]:
            if "running" not in name:
                value.copy_(torch.full_like(value, 2 * rank))
    optimizer.step()
    in_place = addresses == {name: value.data_ptr() for name, value in net.state_dict().items()}
    return attached, net.numbers(), in_place


def test_attach_with_a_module_makes_all_of_it_equal_and_takes_floating_buffers_along() -> None:
    (first, after, in_place), *others = run_ranks(_attach_net, 3)
    assert first["weight"] == [0.0] * 3
    assert first["frozen"] == [[0.0] * 2] * 2
    assert (first["count"], first["mask"], first["complex_scale"]) == (0, [True, False], [0j, 0j])
    assert (first["norm.running_mean"], first["norm.num_batches_tracked"]) == ([0.0] * 3, 5)
    for rank, (attached, averaged, kept_in_place) in enumerate([(first, after, in_place), *others]):
        assert attached == first
        assert kept_in_place
        for name in (
            "weight",
            "norm.weight",
            "norm.bias",
            "scale",
            "temporary",
            "half_scale",
            "complex_scale",
        ):
            assert set(averaged[name]) == {2.0}, name
        # Neither frozen weights, which no optimizer changes, nor counts and masks.
        assert averaged["frozen"] == [[2.0 * rank] * 2] * 2
        assert averaged["count"] == 2 * rank
        assert averaged["norm.num_batches_tracked"] == 2 * rank
        assert averaged["mask"] == [rank > 0, rank > 0]


_NORMALIZED: dict[str, tuple[torch.dtype, float, float, float]] = {
    # dtype, mean, distance between the ranks' means, standard deviation
    "ordinary": (torch.float32, 0.0, 1.0, 1.0),
    "a large mean and a small variance": (torch.float32, 1e4, 0.05, 0.1),
    "a very large mean and a small variance": (torch.float32, 3e5, 0.0, 0.25),
    "float64": (torch.float64, 3.0, 1.0, 2.0),
    "float64, a large mean and a small variance": (torch.float64, 1e4, 0.5, 1.0),
    "float16": (torch.float16, 3.0, 1.0, 2.0),
    "bfloat16": (torch.bfloat16, 3.0, 1.0, 2.0),
}


def _features(name: str, rank: int) -> Tensor:
    _, mean, distance, deviation = _NORMALIZED[name]
    generator = torch.Generator().manual_seed(rank)
    noise = torch.randn(64, 5, generator=generator, dtype=torch.float64)
    return mean + distance * rank + (rank + 1) * deviation * noise


def _set_statistics(layer: nn.Module, features: Tensor) -> None:
    with torch.no_grad():
        layer.running_mean.copy_(features.mean(0))
        layer.running_var.copy_(features.var(0, correction=0))


def _merge_statistics(rank: int) -> dict[str, tuple[list[float], list[float]]]:
    found = {}
    for name, (dtype, *_) in _NORMALIZED.items():
        layer = nn.BatchNorm1d(5, dtype=dtype)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
        averagers.attach(optimizer, averagers.PeriodicModelAverager(2), module=layer)
        _set_statistics(layer, _features(name, rank))
        optimizer.step()
        found[name] = (layer.running_mean.tolist(), layer.running_var.tolist())
    return found


@pytest.fixture(scope="module")
def merged() -> list[dict[str, tuple[list[float], list[float]]]]:
    return run_ranks(_merge_statistics, 3)


@pytest.mark.parametrize("name", list(_NORMALIZED))
def test_running_statistics_become_those_of_the_joined_data(
    merged: list[dict[str, tuple[list[float], list[float]]]], name: str
) -> None:
    dtype = _NORMALIZED[name][0]
    # What each rank's buffers hold of its data is rounded to their dtype before anything is merged.
    means = torch.stack([_features(name, rank).mean(0).to(dtype) for rank in range(3)]).double()
    variances = torch.stack([_features(name, rank).var(0, correction=0).to(dtype) for rank in range(3)]).double()
    data = torch.cat(
        [
            means[rank] + variances[rank].sqrt() * _standardized(_features(name, rank) - _NORMALIZED[name][1])
            for rank in range(3)
        ]
    )
    eps = torch.finfo(dtype).eps
    # A mean of the buffers' dtype is off by up to half a last bit, and a variance around it by the square.
    around_rounded_mean = (eps * means.abs().max().item()) ** 2
    for found in merged:
        mean, variance = found[name]
        assert mean == pytest.approx(data.mean(0).tolist(), rel=2 * eps)
        expected = data.var(0, correction=0).tolist()
        assert variance == pytest.approx(expected, rel=max(2 * eps, 1e-6), abs=around_rounded_mean)
    assert merged[0][name] == merged[1][name] == merged[2][name]


def _standardized(features: Tensor) -> Tensor:
    return (features - features.mean(0)) / features.std(0, correction=0)


def _merge_shared_statistics(rank: int) -> dict[str, list[float]]:
    shared = nn.BatchNorm1d(5)
    one, other = nn.BatchNorm1d(5), nn.BatchNorm1d(5)
    other.running_mean, other.running_var = one.running_mean, one.running_var
    untracked = nn.BatchNorm1d(5, track_running_stats=False)
    module = nn.ModuleDict({"a": shared, "b": shared, "one": one, "other": other, "untracked": untracked})
    module["instance"] = nn.InstanceNorm1d(5, track_running_stats=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    averagers.attach(optimizer, averagers.PeriodicModelAverager(2), module=module)
    for layer in (shared, one, module["instance"]):
        _set_statistics(layer, _features("ordinary", rank))
    optimizer.step()
    return {
        "shared": shared.running_var.tolist(),
        "one": one.running_var.tolist(),
        "other": other.running_var.tolist(),
        "instance": module["instance"].running_var.tolist(),
    }


def test_layers_and_statistics_that_are_shared_are_merged_once() -> None:
    data = torch.cat([_features("ordinary", rank) for rank in range(2)])
    expected = pytest.approx(data.var(0, correction=0).tolist(), rel=1e-5)
    for found in run_ranks(_merge_shared_statistics, 2):
        assert [found[name] == expected for name in ("shared", "one", "other", "instance")] == [True] * 4


def _train_with_batch_norm(rank: int) -> tuple[int, list[bytes], list[bytes]]:
    with torch.random.fork_rng():
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with averagers.attach(optimizer, _averager(), module=model):
        for step in range(6):
            _step(model, optimizer, None, rank, step)
            if rank == 0 and step == 0:  # one more batch here: the count is local
                model(torch.ones(2, 4))
    floating = [value for value in model.state_dict().values() if value.is_floating_point()]
    return int(model[1].num_batches_tracked), _bits(floating), []


def test_a_model_with_batch_norm_ends_as_one_model_with_local_counts() -> None:
    first, second = run_ranks(_train_with_batch_norm, 2)
    assert (first[0], second[0]) == (7, 6)
    assert first[1] == second[1]


def _module_in_inference_mode(rank: int) -> list[float]:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    handle = averagers.attach(optimizer, _averager(), module=model)
    with torch.no_grad():
        model[1].running_mean.fill_(2.0 * rank)
    optimizer.step()
    with torch.inference_mode():
        handle.finish()
    handle.remove()
    return model[1].running_mean.tolist()


def test_finish_works_in_inference_mode_with_buffers_too() -> None:
    assert run_ranks(_module_in_inference_mode, 2) == [[1.0] * 3] * 2


def _attach_alone(rank: int) -> tuple[dict[str, Any], dict[str, Any], int]:
    net = _Net(3)
    optimizer = torch.optim.SGD([net.weight], lr=0.0)
    averager = averagers.PeriodicModelAverager(2)
    before = net.numbers()
    with averagers.attach(optimizer, averager, module=net):
        optimizer.step()
    return before, net.numbers(), averager.step


def test_attach_with_a_module_in_a_world_of_one_changes_nothing() -> None:
    ((before, after, step),) = run_ranks(_attach_alone, 1)
    assert before == after
    assert step == 1


# The handle


def _handle(rank: int) -> dict[str, bool]:
    events: list[Any] = []
    weight = nn.Parameter(torch.tensor(float(rank)))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    averager = averagers.PeriodicModelAverager(3, observers=[events.append])

    def rounds() -> list[tuple[str, int]]:
        return [(event.call, event.step) for event in events if isinstance(event, averagers.RoundFinished)]

    with averagers.attach(optimizer, averager) as handle:
        for _ in range(2):
            weight.grad = torch.tensor(2.0 * rank)
            optimizer.step()
    claims = {
        "a clean exit averages once more": rounds() == [("average_parameters", 0), ("finish", 2)],
        "and the replicas are one model": weight.item() == -1.5,
        "and it counts no step": averager.step == 2,
        "repr tells that it was removed": "removed" in repr(handle),
    }
    optimizer.step()
    claims["after it the optimizer steps alone"] = averager.step == 2 and weight.item() == -1.5 - 2.0 * rank

    averager.step = 0
    events.clear()
    with averagers.attach(optimizer, averager):
        optimizer.step()
    claims["no further round where the last step had one"] = rounds() == [("average_parameters", 0)]

    events.clear()
    averager.step = 1

    def fail_in_the_block() -> None:
        with averagers.attach(optimizer, averager):
            optimizer.step()
            raise ZeroDivisionError

    _raises(ZeroDivisionError, fail_in_the_block)
    claims["after an exception nothing is averaged"] = rounds() == []
    optimizer.step()
    claims["and the hooks are gone"] = averager.step == 2

    handle = averagers.attach(optimizer, averager)
    optimizer.step()
    events.clear()
    handle.finish()
    claims["finish can be called by itself"] = rounds() == [("finish", 3)]
    handle.remove()
    handle.remove()
    return claims


def test_the_handle_finishes_on_a_clean_exit_and_only_lets_go_on_an_exception() -> None:
    for claims in run_ranks(_handle, 2):
        assert _failed(claims) == []


def _failing_finish(rank: int) -> tuple[str, int]:
    weight = nn.Parameter(torch.tensor(float(rank)))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    averager = _averager()

    def run() -> None:
        with averagers.attach(optimizer, averager):
            optimizer.step()
            averager.close()

    message = _raises(averagers.ClosedError, run)
    optimizer.step()
    return message, averager.step


def test_a_finish_that_fails_still_lets_go_of_the_optimizer() -> None:
    ((message, step),) = run_ranks(_failing_finish, 1)
    assert "was closed" in message
    assert step == 1


def _finish_wrapper(rank: int) -> tuple[list[tuple[str, int]], float, int]:
    events: list[Any] = []
    weight = nn.Parameter(torch.tensor(2.0 * rank))
    averager = averagers.HierarchicalModelAverager({1: 1, 4: 2}, observers=[events.append])
    optimizer = averagers.ModelAveragingOptimizer(torch.optim.SGD([weight], lr=1.0), averager)
    for _ in range(3):
        weight.grad = torch.tensor(2.0 * rank)
        optimizer.step()
    optimizer.finish()
    optimizer.finish()
    rounds = [(event.call, event.step) for event in events if isinstance(event, averagers.RoundFinished)]
    return rounds, weight.item(), averager.step


def test_finish_of_the_wrapper_averages_at_the_top_level() -> None:
    expected = [("average_parameters", 0), ("finish", 3)]  # the second has nothing to do
    assert run_ranks(_finish_wrapper, 2) == [(expected, -2.0, 3)] * 2


# averaged


def _evaluate_averaged(rank: int) -> dict[str, bool]:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(2.0 * rank)
    averager = averagers.PeriodicModelAverager(3, 100)
    optimizer = averagers.ModelAveragingOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), averager)
    _step(model, optimizer, None, rank, 0)
    frozen_later = model[0].weight.requires_grad_(False)

    def everything() -> list[Any]:
        state = optimizer.state_dict()
        tensors = [value for one in state["state"].values() for value in one.values() if isinstance(value, Tensor)]
        grads = [one.grad for one in model.parameters() if one.grad is not None]
        addresses = [one.data_ptr() for one in model.parameters()]
        modes = (model.training, torch.is_grad_enabled(), torch.get_rng_state().tolist())
        return [_bits([*model.state_dict().values(), *tensors, *grads]), state["averager"], addresses, modes]

    before = everything()
    own = [one.detach().clone() for one in model.parameters()]
    gathered = []
    for one in own:
        peers = [torch.empty_like(one) for _ in range(2)]
        dist.all_gather(peers, one)
        gathered.append(peers[0] / 2 + peers[1] / 2)
    claims = {}
    with averager.averaged(model.parameters()):
        inside = list(model.parameters())
        claims["the mean is in place"] = all(torch.equal(one, mean) for one, mean in zip(inside, gathered, strict=True))
        claims["what was frozen later belongs to it"] = torch.equal(frozen_later, gathered[0])
    claims["nothing has changed after it"] = everything() == before

    def fail_in_the_block() -> None:
        with averager.averaged(model.named_parameters()):
            raise KeyError

    _raises(KeyError, fail_in_the_block)
    claims["nothing has changed after an exception"] = everything() == before
    with torch.inference_mode(), averager.averaged(model.parameters()):
        claims["it works in inference mode"] = all(
            torch.equal(one, mean) for one, mean in zip(model.parameters(), gathered, strict=True)
        )
    claims["nothing has changed after inference mode"] = everything() == before
    with averager.averaged([*model.parameters(), *model.buffers()]):
        for one in model.parameters():
            one.data.zero_()
    claims["what is written inside is undone"] = everything() == before
    _step(model, optimizer, None, rank, 1)
    claims["training goes on"] = averager.step == 2
    return claims


def test_averaged_shows_the_mean_and_gives_everything_back() -> None:
    for claims in run_ranks(_evaluate_averaged, 2):
        assert _failed(claims) == []


def _averaged_by_level(rank: int) -> tuple[list[float], float, list[tuple[str, int, int]]]:
    events: list[Any] = []
    averager = averagers.HierarchicalModelAverager({2: 2, 8: 4}, observers=[events.append])
    weight = nn.Parameter(torch.tensor(4.0 * rank))
    averager.step = 1
    with averager.averaged([weight]):
        inside = weight.item()
    finished = [event for event in events if isinstance(event, averagers.RoundFinished)]
    return [inside, weight.item()], averager.step, [(one.call, one.level, one.group_size) for one in finished]


def test_averaged_is_a_round_among_all_ranks_outside_the_schedule() -> None:
    for rank, found in enumerate(run_ranks(_averaged_by_level, 4)):
        assert found == ([6.0, 4.0 * rank], 1, [("averaged", 1, 4)])


def _refused_averaged(rank: int) -> list[float]:
    averager, weight = _averager(), nn.Parameter(torch.tensor(float(rank)))
    entered = []
    for params in ([weight, 3], [weight, torch.eye(2).to_sparse()]):
        try:
            with averager.averaged(params):
                entered.append(-1.0)
        except TypeError:
            entered.append(weight.item())
    return entered


def test_averaged_refuses_what_a_round_refuses_and_changes_nothing() -> None:
    assert run_ranks(_refused_averaged, 2) == [[0.0, 0.0], [1.0, 1.0]]


def _averaged_other_list(rank: int) -> tuple[list[float], list[int]]:
    """Show the mean of one list, then average another whose second parameter is frozen."""
    averager = _averager()
    first, second, frozen = (nn.Parameter(torch.tensor(2.0 * rank)) for _ in range(3))
    frozen.requires_grad_(False)
    with averager.averaged([first, second]):
        inside = second.item()
    averager.step = _WARMUP
    averager.average_parameters([first, frozen])
    return [inside, first.item(), frozen.item()], averager.state_dict()["once_trainable"]


def test_averaged_does_not_change_which_parameters_a_round_takes() -> None:
    for rank, found in enumerate(run_ranks(_averaged_other_list, 2)):
        assert found == ([1.0, 1.0, 2.0 * rank], [0])


# Averagers of other makes


class _EveryStep(averagers.ModelAverager):
    """A user's own averager."""

    def average_parameters(self, params: Iterable[Any]) -> None:
        averagers.average_parameters(params, self.process_group)
        self.step += 1


def _own_averager(rank: int, how: str) -> tuple[float, int, int]:
    weight = nn.Parameter(torch.tensor(2.0 * rank))
    averager = _EveryStep()
    optimizer = _joined(how, torch.optim.SGD([weight], lr=0.0), averager)
    for _ in range(2):
        optimizer.step()
    return weight.item(), averager.step, copy.deepcopy(averager).step


@pytest.mark.parametrize("how", _HOW)
def test_a_users_own_averager_is_followed_by_wrapper_and_attach(how: str) -> None:
    assert run_ranks(_own_averager, 2, how) == [(1.0, 2, 2)] * 2


def _module_with_other_averager(rank: int) -> str:
    model = _model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return _raises(averagers.InvalidTypeError, lambda: averagers.attach(optimizer, _EveryStep(), module=model))


def test_buffers_need_an_averager_that_takes_them_along() -> None:
    (message,) = run_ranks(_module_with_other_averager, 1)
    assert "module= needs a PeriodicModelAverager or HierarchicalModelAverager" in message
    assert "_EveryStep" in message


def _two_attachments(rank: int) -> list[bool]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    first, second = (averagers.attach(optimizer, _averager()) for _ in range(2))
    handles = [hasattr(optimizer, "_step_supports_amp_scaling")]
    for attachment in (first, first, second):
        attachment.remove()
        handles.append(hasattr(optimizer, "_step_supports_amp_scaling"))
    return handles


def test_of_two_attachments_to_one_optimizer_the_last_to_leave_gives_the_scale_back() -> None:
    assert run_ranks(_two_attachments, 1) == [[True, True, True, False]]


def rebuilt(rank: int) -> int:
    """As in a notebook whose cell runs again: the handle and the optimizer of before are gone."""
    averager = averagers.PeriodicModelAverager(4)
    weight = nn.Parameter(torch.zeros(1))
    gc.disable()
    for _ in range(2):
        optimizer = torch.optim.SGD([weight], lr=0.1)
        averagers.attach(optimizer, averager)
        optimizer.step()
    return averager.step


def test_an_averager_may_follow_a_new_optimizer_once_the_old_one_is_gone() -> None:
    assert run_ranks(rebuilt, 1) == [2]


class Normalizer(nn.Module):
    """Has running statistics that are no moments of the same thing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.register_buffer("running_mean", torch.zeros(3))
        self.register_buffer("running_var", torch.tensor(1.0))


def odd_statistics(rank: int) -> list[float]:
    module = Normalizer()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    averagers.attach(optimizer, averagers.PeriodicModelAverager(4), module=module)
    module.running_mean.fill_(rank)
    module.running_var.fill_(rank)
    optimizer.step()
    return [module.running_mean[0].item(), module.running_var.item()]


def test_running_statistics_of_unequal_shapes_are_averaged_like_other_buffers() -> None:
    assert run_ranks(odd_statistics, 2) == [[0.5, 0.5]] * 2


def _weighted_steps(rank: int) -> tuple[float, float]:
    found = []
    for wrapped in (False, True):
        weight = nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        averager = averagers.PeriodicModelAverager(2, warmup_steps=1)
        stepped: Any = averagers.ModelAveragingOptimizer(optimizer, averager) if wrapped else optimizer
        handle = stepped if wrapped else averagers.attach(optimizer, averager)
        for samples in (1, 2):
            weight.grad = torch.full((3,), -float(rank))
            handle.weight = samples * (1 + 2 * rank)
            stepped.step()
        found.append(float(weight[0].item()))
    return found[0], found[1]


def test_a_handle_and_the_wrapper_tell_how_much_a_step_counts() -> None:
    # Replicas at 0 and 2, of weights 3 and 9.
    assert run_ranks(_weighted_steps, 2) == [(1.5, 1.5)] * 2


def _optimizer_states(rank: int, actions: dict[str, Any], mixer: Any, wrapped: bool) -> list[dict[str, float]]:
    """Return Adam's state of the one parameter after each step; ranks have other gradients."""
    weight = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.Adam([weight], lr=0.1)
    averager = averagers.PeriodicModelAverager(2, mixer=mixer)
    if wrapped:
        stepped: Any = averagers.ModelAveragingOptimizer(optimizer, averager, optimizer_state=actions)
    else:
        stepped = optimizer
        averagers.attach(optimizer, averager, optimizer_state=actions)
    found = []
    for _ in range(9):
        weight.grad = torch.full((3,), 1.0 + 2 * rank)
        stepped.step()
        state = optimizer.state[weight]
        found.append({name: float(value.flatten()[0].item()) for name, value in state.items()})
    return found


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("mixer", [None, averagers.Nesterov(), averagers.Outer(torch.optim.SGD)])
def test_optimizer_state_is_averaged_at_its_own_rounds_reset_or_kept(mixer: Any, wrapped: bool) -> None:
    actions = {"exp_avg": "average", "exp_avg_sq": 2, "step": "keep"}
    one, other = run_ranks(_optimizer_states, 2, actions, mixer, wrapped)
    for step in range(9):
        assert (one[step]["exp_avg"] == other[step]["exp_avg"]) == (step % 2 == 0)
        assert (one[step]["exp_avg_sq"] == other[step]["exp_avg_sq"]) == (step % 4 == 0)
        assert one[step]["step"] == step + 1
    # Gradients of 1 and 3: the mean of both moments after the first step.
    assert one[0]["exp_avg"] == pytest.approx(0.1 * 2)
    assert one[0]["exp_avg_sq"] == pytest.approx(0.001 * (1 + 9) / 2)
    one, other = run_ranks(_optimizer_states, 2, {"exp_avg": "reset"}, mixer, wrapped)
    assert [found["exp_avg"] == 0 for found in one] == [step % 2 == 0 for step in range(9)]
    assert all(found["exp_avg_sq"] != twin["exp_avg_sq"] for found, twin in zip(one, other, strict=True))


def _wrong_states(rank: int) -> list[str]:
    messages = []
    weight = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.Adam([weight], lr=0.1)
    for actions in (["exp_avg"], {"exp_avg": "mean"}, {"exp_avg": 0}, {"exp_avg": True}):
        with pytest.raises(averagers.AveragersError) as caught:
            averagers.attach(optimizer, averagers.PeriodicModelAverager(2), optimizer_state=actions)
        messages.append(str(caught.value))
    norm = nn.BatchNorm1d(2)
    norm.running_mean.fill_(float(rank))
    late, parts = averagers.PeriodicModelAverager(2, overlap=averagers.Delayed(1)), {"fragments": 2}
    for build in (
        lambda: averagers.attach(optimizer, late, optimizer_state={"exp_avg": "average"}),
        lambda: averagers.attach(optimizer, late, module=norm),
        lambda: averagers.attach(
            optimizer, averagers.PeriodicModelAverager(2, **parts), optimizer_state={"exp_avg": 3}
        ),
    ):
        with pytest.raises(averagers.AveragersError) as caught:
            build()
        messages.append(str(caught.value))
    assert norm.running_mean.tolist() == [rank] * 2  # nothing was sent
    averagers.attach(optimizer, late, module=nn.Linear(3, 3), optimizer_state={"exp_avg": "reset"}).remove()
    handle = averagers.attach(
        optimizer, averagers.PeriodicModelAverager(2), optimizer_state={"momentum_buffer": "average"}
    )
    weight.grad = torch.ones(3)
    with pytest.raises(averagers.AveragersError) as caught:
        optimizer.step()
    messages.append(str(caught.value))
    handle.remove()
    return messages


def test_optimizer_state_that_cannot_go_along_is_refused_by_name() -> None:
    for message, part in zip(
        run_ranks(_wrong_states, 2)[1],
        [
            "optimizer_state must be a dict such as",
            "optimizer_state['exp_avg'] must be 'average', 'keep', 'reset', or every how many rounds to average",
            "got 0",
            "got True",
            "carry=False) cannot take buffers or optimizer state along",
            "carry=False) cannot take buffers or optimizer state along",
            "fragments=2 cannot take buffers or optimizer state along",
            "which are step, exp_avg, exp_avg_sq, got 'momentum_buffer'",
        ],
        strict=True,
    ):
        assert part in message


def _post_local(rank: int) -> tuple[list[bool], bool, str]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    ddp_model = nn.parallel.DistributedDataParallel(model, forward_sync_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averager = averagers.PeriodicModelAverager(3, warmup_steps=2)
    alike = []
    with averagers.PostLocalSGD(ddp_model, optimizer, averager, subgroup=dist.new_subgroups(1)[0]):
        for step in range(7):
            optimizer.zero_grad()
            ddp_model(torch.full((4, 3), float(rank + step))).sum().backward()
            optimizer.step()
            alike.append(_is_alike(model.weight))
    with pytest.raises(averagers.InvalidTypeError) as caught:
        averagers.PostLocalSGD(model, optimizer, averagers.PeriodicModelAverager(3))
    return alike, _is_alike(model.weight), str(caught.value)


def _is_alike(weight: Tensor) -> bool:
    gathered = [torch.empty_like(weight) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, weight.detach())
    return all(torch.equal(gathered[0], other) for other in gathered)


def test_post_local_sgd_as_one_object() -> None:
    for alike, at_the_end, message in run_ranks(_post_local, 2):
        # Data parallel at steps 0 and 1, rounds at 2 and 5.
        assert alike == [True, True, True, False, False, True, False]
        assert at_the_end
        assert "ddp_model must be a DistributedDataParallel, got Linear" in message


def _averaged_in_time(rank: int) -> tuple[list[float], list[float]]:
    """An exponential mean over time of the averaged model, by torch, beside averaging among ranks."""
    weight = nn.Parameter(torch.zeros(3))
    model = nn.ParameterList([weight])
    ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    averager = averagers.PeriodicModelAverager(2, warmup_steps=1)
    averagers.attach(optimizer, averager)
    for _ in range(6):
        before = averager.num_rounds
        weight.grad = torch.full((3,), -float(rank))
        optimizer.step()
        if averager.num_rounds > before:
            ema.update_parameters(model)
    return next(ema.parameters()).tolist(), weight.tolist()


def test_torchs_means_over_time_are_alike_on_all_ranks_where_they_follow_the_rounds() -> None:
    # After the rounds at steps 1, 3 and 5 all are at 1, 2 and 3; halfway to each from the first.
    assert run_ranks(_averaged_in_time, 2) == [([2.25] * 3, [3.0] * 3)] * 2


def _shown_with_statistics(rank: int) -> list[bool]:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    averager = averagers.PeriodicModelAverager(100, 50)
    handle = averagers.attach(optimizer, averager, module=model, optimizer_state={"momentum_buffer": "reset"})
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    momentum = optimizer.state[model[0].weight]["momentum_buffer"].clone()
    with averager.averaged(handle.params()):
        shown = {name: value.clone() for name, value in model.state_dict().items()}
    after = model.state_dict()
    return [
        not torch.equal(shown["1.running_mean"], before["1.running_mean"]),
        all(torch.equal(before[name], after[name]) for name in before),
        torch.equal(momentum, optimizer.state[model[0].weight]["momentum_buffer"]),
    ]


def test_averaged_takes_buffers_back_and_resets_nothing() -> None:
    assert run_ranks(_shown_with_statistics, 2) == [[True] * 3] * 2


def _periodic_state_at_the_end(rank: int, end: str) -> list[bool]:
    weight = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    averager = averagers.HierarchicalModelAverager({2: 2, 8: 4})
    handle = averagers.attach(optimizer, averager, optimizer_state={"momentum_buffer": 3})
    alike = []
    for step in range(12 if end == "finish" or rank > 1 else 5):
        weight.grad = torch.full((3,), float(rank + 1))
        optimizer.step()
        if step == 3 and end == "finish":
            handle.finish()  # in the middle of a run
        if end == "finish":
            alike.append(_is_alike(optimizer.state[weight]["momentum_buffer"]))
    getattr(handle, end)()
    return [*alike[4:], _is_alike(optimizer.state[weight]["momentum_buffer"]), _is_alike(weight)]


def test_state_that_is_averaged_seldom_is_averaged_at_the_end_of_a_run_too() -> None:
    assert run_ranks(_periodic_state_at_the_end, 4, "join") == [[True, True]] * 4
    # Rounds at even steps, every third of them with momentum: at 6, of neighbors.
    assert run_ranks(_periodic_state_at_the_end, 4, "finish") == [[False] * 8 + [True, True]] * 4


def test_a_copy_of_the_wrapper_keeps_what_it_does_with_the_state() -> None:
    assert run_ranks(_copied_wrapper, 2) == [True] * 2


def _copied_wrapper(rank: int) -> bool:
    weight = nn.Parameter(torch.zeros(3))
    inner = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    wrapper = averagers.ModelAveragingOptimizer(
        inner, averagers.PeriodicModelAverager(2), optimizer_state={"momentum_buffer": "average"}
    )
    twin = copy.deepcopy(wrapper)
    (param,) = twin.param_groups[0]["params"]
    param.grad = torch.full((3,), float(rank))
    twin.step()
    return _is_alike(twin.state[param]["momentum_buffer"])
