"""An averager in a distributed checkpoint: what comes back, on as many ranks and on others."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import averagers
from averagers.reduction.anchor import Anchor
from ranks_runner import run_ranks

_AVERAGERS: dict[str, Any] = {
    "residuals": lambda: averagers.PeriodicModelAverager(2, codec=averagers.Int4(error_feedback=0.95)),
    "sparse": lambda: averagers.PeriodicModelAverager(2, codec=averagers.TopK(4)),
    "anchor": lambda: averagers.PeriodicModelAverager(2, codec=averagers.Int8()),
    "momentum": lambda: averagers.PeriodicModelAverager(2, mixer=averagers.Nesterov()),
    "plain": lambda: averagers.PeriodicModelAverager(2),
    "levels": lambda: averagers.HierarchicalModelAverager(
        {1: 2, 4: 4}, nodes=[0, 0, 1, 1], codec={1: averagers.Int8(), 4: averagers.TopK(4)}
    ),
}


class _Odd(nn.Module):
    """Parameters of several dtypes and layouts."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator).to(dtype))

        self.matrix = nn.Parameter(parameter(60, 70).data.t())
        self.image = nn.Parameter(parameter(2, 3, 4, 5).data.to(memory_format=torch.channels_last))
        self.bfloat = parameter(33, dtype=torch.bfloat16)
        self.double_precision = parameter(7, dtype=torch.float64)
        self.complex_pair = parameter(5, dtype=torch.complex64)
        self.one = parameter()
        self.empty = parameter(0)


def _train(model: nn.Module, averager: Any, rank: int, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + rank)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(torch.randn(param.shape, generator=generator).to(param.dtype), alpha=0.01)
        averager.average_parameters(model.parameters())


def _bits(model: nn.Module) -> list[bytes]:
    return [
        bytes(param.detach().contiguous().reshape(-1).view(torch.uint8).tolist()) if param.numel() else b""
        for param in model.parameters()
    ]


def _state(model: nn.Module, averager: Any) -> dict[str, Any]:
    return {"averager": averagers.DistributedState(averager, model.named_parameters())}


def _resumed(rank: int, name: str, folder: str, saved_at: int) -> bool:
    straight, averager = _Odd(), _AVERAGERS[name]()
    _train(straight, averager, rank, range(saved_at))
    dcp.save(_state(straight, averager), checkpoint_id=folder)
    # Each rank's own replica, which differs between rounds.
    weights = {key: param.clone() for key, param in straight.state_dict().items()}
    assert (averager.state_dict().get("anchor_0") is not None) == (name != "plain" and saved_at > 0)
    _train(straight, averager, rank, range(saved_at, 11))

    resumed, another = _Odd(), _AVERAGERS[name]()
    resumed.load_state_dict(weights)
    dcp.load(_state(resumed, another), checkpoint_id=folder)
    assert another.step == saved_at
    _train(resumed, another, rank, range(saved_at, 11))
    return _bits(resumed) == _bits(straight)


@pytest.mark.parametrize("saved_at", [0, 1, 6])
@pytest.mark.parametrize("name", list(_AVERAGERS))
def test_a_run_resumed_from_a_distributed_checkpoint_equals_the_one_that_was_not_stopped(
    name: str, saved_at: int, tmp_path: Path
) -> None:
    world_size = 4 if name == "levels" else 2
    assert run_ranks(_resumed, world_size, name, str(tmp_path), saved_at) == [True] * world_size


def _saved(rank: int, name: str, folder: str) -> list[float]:
    model, averager = _Odd(), _AVERAGERS[name]()
    _train(model, averager, rank, range(5))
    dcp.save({**_state(model, averager), "model": model.state_dict()}, checkpoint_id=folder)
    values: dict[str, Tensor] = averager.state_dict()["anchor_0"]["values"]
    return values["0"].tolist()


def _loaded_elsewhere(rank: int, name: str, folder: str) -> tuple[list[float], list[int]]:
    events: list[Any] = []
    model = _Odd()
    averager = averagers.PeriodicModelAverager(2, codec=averagers.Int8(), observers=[events.append])
    state = {**_state(model, averager), "model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    values = averager.state_dict()["anchor_0"]["values"]["0"].tolist()
    averager.average_parameters(model.parameters())
    averager.average_parameters(model.parameters())
    averager.step = 1000
    averager.load_state_dict({key: one for key, one in averager.state_dict().items() if key != "anchor_0"})
    averager.average_parameters(model.parameters())
    return values, [event.wire_bytes for event in events if isinstance(event, averagers.RoundFinished)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_anchor_of_all_loads_onto_another_number_of_ranks(world_size: int, tmp_path: Path) -> None:
    saved = run_ranks(_saved, 5 - world_size, "anchor", str(tmp_path))
    for values, (coded, plain) in run_ranks(_loaded_elsewhere, world_size, "anchor", str(tmp_path)):
        assert values == saved[0]
        assert coded < plain / 2  # counted from the anchor at once


def _refused_elsewhere(rank: int, name: str, folder: str) -> str:
    model, averager = _Odd(), _AVERAGERS[name]()
    with pytest.raises(dcp.CheckpointException, match="Missing key") as caught:
        dcp.load(_state(model, averager), checkpoint_id=folder)
    return str(caught.value)


@pytest.mark.parametrize(("name", "before", "now"), [("residuals", 2, 3), ("sparse", 3, 2)])
def test_residuals_are_refused_on_another_number_of_ranks(name: str, before: int, now: int, tmp_path: Path) -> None:
    run_ranks(_saved, before, name, str(tmp_path))
    for message in run_ranks(_refused_elsewhere, now, name, str(tmp_path)):
        assert f"averager.residual_0.rank 0 in groups of {now}.0.sent" in message


def _sharded(rank: int, shape: tuple[int, int], folder: str, load: bool) -> list[list[float]]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    optimizer = torch.optim.SGD(fully_shard(model, mesh=mesh["shard"]).parameters(), lr=0.1)
    averager = averagers.PeriodicModelAverager(2, process_group=mesh["replicate"], codec=averagers.Int8())
    state = _state(model, averager)
    if load:
        dcp.load(state, checkpoint_id=folder)
    else:
        for step in range(3):
            generator = torch.Generator().manual_seed(100 * step + rank)
            model(torch.randn(4, 5, generator=generator)).square().mean().backward()
            optimizer.step()
            averager.average_parameters(model.parameters())
        dcp.save(state, checkpoint_id=folder)
    entries = state["averager"].state_dict()
    return [entries[f"anchor_0.{name}"].full_tensor().reshape(-1).tolist() for name, _ in model.named_parameters()]


@pytest.mark.parametrize("shape", [(2, 2), (2, 1), (2, 3)])
def test_the_anchor_of_a_sharded_model_is_saved_in_shards_and_loads_onto_others(
    shape: tuple[int, int], tmp_path: Path
) -> None:
    saved = run_ranks(_sharded, 4, (2, 2), str(tmp_path), False)
    assert any(saved[0][0])
    assert run_ranks(_sharded, shape[0] * shape[1], shape, str(tmp_path), True) == [saved[0]] * (shape[0] * shape[1])


def _sharded_and_offloaded(rank: int) -> str:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(nn.Linear(5, 7), mesh=mesh["shard"])
    averager = averagers.PeriodicModelAverager(
        2, process_group=mesh["replicate"], mixer=averagers.Nesterov(), offload="cpu"
    )
    assert _state(model, averager)["averager"].state_dict()
    # As on a machine whose model is elsewhere than the CPU.
    with mock.patch.object(Anchor, "home", return_value="meta"):
        another = averagers.PeriodicModelAverager(2, process_group=mesh["replicate"], mixer=averagers.Nesterov())
        with pytest.raises(averagers.InvalidValueError) as caught:
            _state(model, another)["averager"].state_dict()
    return str(caught.value)


def test_an_anchor_that_lies_elsewhere_than_its_sharded_tensor_is_refused() -> None:
    for message in run_ranks(_sharded_and_offloaded, 2):
        assert "the anchor of a DTensor on cpu cannot be saved as such" in message


def _refused(rank: int, folder: str) -> list[str]:
    model, averager = _Odd(), _AVERAGERS["anchor"]()
    messages = []
    for build in (
        lambda: averagers.DistributedState(averager, model.parameters()),
        lambda: averagers.DistributedState(averager, [*model.named_parameters(), ("matrix", torch.ones(2))]),
        lambda: averagers.DistributedState(model, model.named_parameters()),
        lambda: averagers.DistributedState(averager, dict(model.named_parameters())),
    ):
        with pytest.raises(averagers.AveragersError) as caught:
            build()
        messages.append(str(caught.value))
    dcp.save(_state(model, averager), checkpoint_id=folder)
    with pytest.raises(averagers.StateDictError) as other:
        dcp.load(_state(model, averagers.PeriodicModelAverager(3, codec=averagers.Int8())), checkpoint_id=folder)
    return [*messages, str(other.value)]


def test_what_cannot_be_saved_or_loaded_is_refused_by_name(tmp_path: Path) -> None:
    for unnamed, twice, averager, params, configuration in run_ranks(_refused, 2, str(tmp_path)):
        assert "named_params must name everything that is averaged" in unnamed
        assert "tensor #0 has no name" in unnamed
        assert "named_params must have different names, got matrix twice" in twice
        assert "averager must be a PeriodicModelAverager or HierarchicalModelAverager of averagers" in averager
        assert "params must be an iterable" in params
        assert "state_dict is of an averager with period=2, this one has period=3" in configuration


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(4, 5, generator=generator)).square().mean().backward()
        optimizer.step()


def _attached(rank: int, codec: Any, wrapped: bool, folder: str) -> tuple[bool, bool]:
    """Groups of parameters in another order than the model's, and buffers that go along."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = _network()
        biases = [param for name, param in model.named_parameters() if name.endswith("bias")]
        weights = [param for name, param in model.named_parameters() if name.endswith("weight")]
        optimizer = torch.optim.SGD([{"params": biases}, {"params": weights}], lr=0.1, momentum=0.9)
        averager = averagers.PeriodicModelAverager(3, codec=codec)
        if wrapped:
            wrapper = averagers.ModelAveragingOptimizer(optimizer, averager)
            return model, wrapper, wrapper
        return model, optimizer, averagers.attach(optimizer, averager, module=model)

    untouched, optimizer, _ = build()
    _steps(untouched, optimizer, rank, range(11))
    model, optimizer, handle = build()
    _steps(model, optimizer, rank, range(5))
    state = {"averager": averagers.DistributedState(handle, model.named_parameters())}
    dcp.save(state, checkpoint_id=folder)
    weights, inner = model.state_dict(), optimizer.state_dict()
    weights = {name: value.clone() for name, value in weights.items()}
    inner = copy.deepcopy(inner)
    _steps(model, optimizer, rank, range(5, 11))
    resumed, optimizer, handle = build()
    dcp.load({"averager": averagers.DistributedState(handle, resumed.named_parameters())}, checkpoint_id=folder)
    resumed.load_state_dict(weights)
    optimizer.load_state_dict(inner)
    _steps(resumed, optimizer, rank, range(5, 11))
    return _bits(model) == _bits(untouched), _bits(resumed) == _bits(untouched)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("codec", [averagers.Int8(), averagers.TopK(4), averagers.Int4(error_feedback=0.9)])
def test_with_attach_the_order_is_that_of_the_optimizer(codec: Any, wrapped: bool, tmp_path: Path) -> None:
    assert run_ranks(_attached, 2, codec, wrapped, str(tmp_path)) == [(True, True)] * 2


def _other_order(rank: int) -> list[str]:
    first, second = torch.ones(3), torch.full((3,), 2.0)
    messages = []
    averager = averagers.PeriodicModelAverager(2, codec=averagers.Int8())
    averager.average_parameters([second, first])
    with pytest.raises(averagers.InvalidValueError) as caught:
        averagers.DistributedState(averager, [("first", first), ("second", second)])
    messages.append(str(caught.value))
    with pytest.raises(averagers.InvalidValueError) as caught:
        averagers.DistributedState(averager, [("first", torch.ones(4))])
    messages.append(str(caught.value))
    before = averager.state_dict()["anchor_0"]["values"]["0"].tolist()
    averagers.DistributedState(averager, [("second", second), ("first", first)])
    assert averager.state_dict()["anchor_0"]["values"]["0"].tolist() == before
    fresh = averagers.PeriodicModelAverager(2, codec=averagers.Int8())
    state = averagers.DistributedState(fresh, [("first", first), ("second", second)])
    with pytest.raises(averagers.InvalidValueError) as caught:
        fresh.average_parameters([second, first])
    messages.append(str(caught.value))
    assert state.state_dict()["anchor_0.first"].tolist() == first.tolist()
    return messages


def test_another_order_than_that_of_the_rounds_is_refused() -> None:
    for another, others, later in run_ranks(_other_order, 2):
        assert "the tensor at position 0 had position 1 before" in another
        assert "named_params must be what is averaged" in others
        assert "params must come in the same order in each round, and to DistributedState" in later


def _after_a_failure(rank: int, folder: str) -> bool:
    model, averager = _Odd(), _AVERAGERS["residuals"]()
    _train(model, averager, rank, range(3))
    state = _state(model, averager)
    dcp.save(state, checkpoint_id=folder)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    _train(model, averager, rank, range(3, 7))
    expected = _bits(model)
    averager._refuse_until_loaded()  # as a failed round does
    with pytest.raises(averagers.ClosedError):
        averager.average_parameters(model.parameters())
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(weights)
    _train(model, averager, rank, range(3, 7))
    return _bits(model) == expected


def test_a_distributed_checkpoint_makes_an_averager_usable_after_a_failed_round(tmp_path: Path) -> None:
    assert run_ranks(_after_a_failure, 2, str(tmp_path)) == [True] * 2


def _outside(rank: int, folder: str) -> int:
    group = dist.new_group([0, 1])
    model = _Odd()
    averager = averagers.PeriodicModelAverager(2, process_group=group, codec=averagers.Int8())
    _train(model, averager, rank, range(3))
    dcp.save(_state(model, averager), checkpoint_id=folder)
    another = averagers.PeriodicModelAverager(2, process_group=group, codec=averagers.Int8())
    dcp.load(_state(model, another), checkpoint_id=folder)
    return another.step


def test_ranks_outside_the_process_group_save_and_load_the_step(tmp_path: Path) -> None:
    assert run_ranks(_outside, 3, str(tmp_path)) == [3] * 3


def _sizes(rank: int, sizes: dict[int, int], folder: str, load: bool) -> float:
    weight = torch.full((3,), float(rank))
    averager = averagers.HierarchicalModelAverager(sizes, codec={max(sizes): averagers.Int8()})
    state = {"averager": averagers.DistributedState(averager, [("weight", weight)])}
    if load:
        dcp.load(state, checkpoint_id=folder)
    else:
        averager.average_parameters([weight])
        dcp.save(state, checkpoint_id=folder)
    return float(averager.state_dict()["anchor_0" if len(sizes) == 1 else "anchor_1"]["values"]["0"][0].item())


def test_the_top_anchor_of_a_hierarchy_loads_onto_other_sizes(tmp_path: Path) -> None:
    assert run_ranks(_sizes, 4, {2: 2, 8: 4}, str(tmp_path), False) == [1.5] * 4
    assert run_ranks(_sizes, 2, {2: 1, 8: 2}, str(tmp_path), True) == [1.5] * 2
