"""An averager in a distributed checkpoint: what comes back, on as many ranks and on others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import averagers
from ranks_runner import run_ranks

_AVERAGERS: dict[str, Any] = {
    "residuals": lambda: averagers.PeriodicModelAverager(2, codec=averagers.Int4(error_feedback=0.95)),
    "sparse": lambda: averagers.PeriodicModelAverager(2, codec=averagers.TopK(4)),
    "anchor": lambda: averagers.PeriodicModelAverager(2, codec=averagers.Int8()),
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
        assert "params must have names" in unnamed
        assert "params must have different names, got matrix twice" in twice
        assert (
            "averager must be a PeriodicModelAverager or HierarchicalModelAverager of averagers, got _Odd" in averager
        )
        assert "params must be an iterable" in params
        assert "state_dict is of an averager with period=2, this one has period=3" in configuration
