"""Models that are sharded or tensor-parallel: each rank's shards are averaged with those who hold the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import averagers
from ranks_runner import run_ranks

NUM_STEPS = 7


def _model(width: int = 7) -> nn.Sequential:
    """Return a network whose rows, with 7, do not divide among ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3))


def _batch(replica: int, member: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10_000 * replica + 100 * member + step)
    return torch.randn(4, 5, generator=generator), torch.randn(4, 3, generator=generator)


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return ((model(inputs) - targets) ** 2).mean()


def _whole(model: nn.Module) -> list[Tensor]:
    """Return all of each parameter, on every rank."""
    params = [param.detach() for param in model.parameters()]
    return [param.full_tensor() if isinstance(param, DTensor) else param for param in params]


def _unsharded(
    group_of: list[list[list[int]]], num_replicas: int, num_members: int, width: int = 7
) -> list[list[Tensor]]:
    """Train the replicas without any sharding, each on its members' data, and average them the obvious way.

    Args:
        group_of: For each step the groups of replicas that average after it.
    """
    models = [_model(width) for _ in range(num_replicas)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    for step in range(NUM_STEPS):
        for replica, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            losses = [_loss(model, _batch(replica, member, step)) for member in range(num_members)]
            (sum(losses) / num_members).backward()
            optimizer.step()
        for group in group_of[step]:
            with torch.no_grad():
                for params in zip(*(models[replica].parameters() for replica in group), strict=True):
                    mean = torch.stack(list(params)).mean(0)
                    for param in params:
                        param.copy_(mean)
    return [[param.detach() for param in model.parameters()] for model in models]


def _train(model: nn.Module, averager: Any, replica: int, member: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        _loss(model, _batch(replica, member, step)).backward()
        optimizer.step()
        averager.average_parameters(model.parameters())


def _close(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.allclose(one, other, rtol=1e-5, atol=1e-6) for one, other in zip(found, expected, strict=True))


def _fully_sharded(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _fsdp_and_periodic(rank: int) -> list[bool]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    replica, member = mesh.get_coordinate() or (0, 0)
    model = _fully_sharded(_model(), mesh["shard"])
    averager = averagers.PeriodicModelAverager(3, 1, mesh["replicate"])
    _train(model, averager, replica, member)
    expected = _unsharded([[[0, 1]] if step in (1, 4) else [] for step in range(NUM_STEPS)], 2, 2)
    trained = _close(_whole(model), expected[replica])
    averager.finish(model.parameters())
    mean = [torch.stack(params).mean(0) for params in zip(*expected, strict=True)]
    params = list(model.parameters())
    return [trained, _close(_whole(model), mean), all(isinstance(param, DTensor) for param in params)]


def test_fsdp_within_and_averaging_across_equals_the_same_training_unsharded() -> None:
    assert run_ranks(_fsdp_and_periodic, 4) == [[True] * 3] * 4


def _fsdp_and_hierarchy(rank: int) -> list[Any]:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("cluster", "node", "shard"))
    cluster, node, member = mesh.get_coordinate() or (0, 0, 0)
    model = _fully_sharded(_model(), mesh["shard"])
    averager = averagers.HierarchicalModelAverager.from_mesh(mesh, {"node": 2, "cluster": 4})
    groups = {period: dist.get_process_group_ranks(g) for period, g in averager.period_process_group_dict.items()}
    replica = 2 * cluster + node
    _train(model, averager, replica, member)
    groups_at = {0: [[0, 1, 2, 3]], 2: [[0, 1], [2, 3]], 4: [[0, 1, 2, 3]], 6: [[0, 1], [2, 3]]}
    expected = _unsharded([groups_at.get(step, []) for step in range(NUM_STEPS)], 4, 2)
    return [_close(_whole(model), expected[replica]), groups]


def test_a_hierarchy_over_two_axes_of_a_mesh_beside_a_sharding_axis() -> None:
    results = run_ranks(_fsdp_and_hierarchy, 8)
    assert [close for close, _ in results] == [True] * 8
    assert results[5][1] == {2: [5, 7], 4: [1, 3, 5, 7]}


def _tensor_parallel(rank: int) -> bool:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "tp"))
    replica, _ = mesh.get_coordinate() or (0, 0)
    model = _model(8)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    averager = averagers.HierarchicalModelAverager.from_mesh(mesh, {"replicate": 3}, warmup_steps=1)
    _train(model, averager, replica, 0)
    expected = _unsharded([[[0, 1]] if step in (3, 6) else [] for step in range(NUM_STEPS)], 2, 1, 8)
    return _close(_whole(model), expected[replica])


def test_tensor_parallel_within_and_averaging_across_equals_the_same_training_whole() -> None:
    assert run_ranks(_tensor_parallel, 4) == [True] * 4


def _two_hierarchies(rank: int) -> tuple[float, float]:
    """Tensor parallel over 2, data parallel over 4: each data-parallel group has a hierarchy of its own."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("outer", "inner", "tp"))
    averager = averagers.HierarchicalModelAverager.from_mesh(mesh, {"outer": 2, "inner": 1})
    averager.step = 1
    tensor = torch.tensor([float(rank)])
    averager.average_parameters([tensor])
    among_two = tensor.item()
    averager.average_parameters([tensor])
    return among_two, tensor.item()


def test_two_hierarchies_side_by_side_build_and_average_without_meeting() -> None:
    found = run_ranks(_two_hierarchies, 8)
    assert found == [(1.0, 3.0), (2.0, 4.0), (1.0, 3.0), (2.0, 4.0), (5.0, 3.0), (6.0, 4.0), (5.0, 3.0), (6.0, 4.0)]


def _fsdp_and_codec(rank: int) -> tuple[bool, float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    replica, member = mesh.get_coordinate() or (0, 0)
    model = _fully_sharded(_model(), mesh["shard"])
    averager = averagers.HierarchicalModelAverager.from_mesh(mesh, {"replicate": 2}, codec=averagers.Int8())
    _train(model, averager, replica, member)
    expected = _unsharded([[[0, 1]] if step % 2 == 0 else [] for step in range(NUM_STEPS)], 2, 2)
    pairs = list(zip(_whole(model), expected[replica], strict=True))
    off = max((one - other).abs().max().item() for one, other in pairs)
    gathered = [torch.empty_like(pairs[0][0]) for _ in range(4)]
    dist.all_gather(gathered, pairs[0][0])
    return all(torch.equal(one, gathered[0]) for one in gathered), off


def test_shards_travel_coded_too() -> None:
    for alike, off in run_ranks(_fsdp_and_codec, 4):
        assert alike
        assert 0 < off < 0.01


def _mixed_shards(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    params = [("w", distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Replicate(), Shard(0)]))]
    before = params[0][1].to_local().tolist()
    messages = []
    for group in (None, mesh["shard"]):
        averager = averagers.PeriodicModelAverager(2, process_group=group)
        with pytest.raises(averagers.DisagreementError) as caught:
            averager.average_parameters(params)
        messages.append(str(caught.value))
    assert params[0][1].to_local().tolist() == before
    averagers.PeriodicModelAverager(2, process_group=mesh["replicate"]).average_parameters(params)
    return messages


def test_a_group_that_mixes_shards_is_refused_with_the_axis_and_what_to_do() -> None:
    for world, shard in run_ranks(_mixed_shards, 4):
        assert "shard 0 of 2 along dim 0 (mesh axis 'shard'), on ranks 0, 2" in world
        assert "shard 1 of 2 along dim 0 (mesh axis 'shard'), on ranks 1, 3" in world
        assert "HierarchicalModelAverager.from_mesh" in world
        assert "mesh axis 'shard'" in shard


def _written_in_place(rank: int) -> dict[str, bool]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    replica, _ = mesh.get_coordinate() or (0, 0)
    averager = averagers.PeriodicModelAverager(2, process_group=mesh["replicate"])
    whole = torch.arange(12.0).view(6, 2)
    parameter = nn.Parameter(distribute_tensor(whole + 10 * replica, mesh["shard"], [Shard(0)], src_data_rank=None))
    frozen = nn.Parameter(distribute_tensor(whole + replica, mesh["shard"], [Shard(0)], src_data_rank=None), False)
    copied = distribute_tensor(whole + replica, mesh, [Replicate(), Replicate()], src_data_rank=None)
    uneven = distribute_tensor(torch.arange(3.0) + 2 * replica, mesh["shard"], [Shard(0)], src_data_rank=None)
    address, version = parameter.to_local().data_ptr(), parameter._version
    with averager.averaged([parameter]):
        inside = torch.equal(parameter.full_tensor(), whole + 5)
    back = torch.equal(parameter.full_tensor(), whole + 10 * replica)
    averager.average_parameters([parameter, frozen, copied, uneven, torch.tensor([float(rank)])])
    averager.broadcast([("w", frozen)])
    return {
        "averaged shows the mean and gives back": inside and back,
        "the mean is in the shards": torch.equal(parameter.full_tensor(), whole + 5),
        "where it was": parameter.to_local().data_ptr() == address,
        "autograd sees it": parameter._version > version,
        "replicated DTensors too": torch.equal(copied.to_local(), whole + 0.5),
        "uneven shards too": torch.equal(uneven.full_tensor(), torch.arange(3.0) + 1),
        "broadcast took the first replica's": torch.equal(frozen.full_tensor(), whole),
    }


def test_shards_are_written_in_place() -> None:
    for claims in run_ranks(_written_in_place, 4):
        assert [claim for claim, holds in claims.items() if not holds] == []


def _refused(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    from_mesh = averagers.HierarchicalModelAverager.from_mesh
    partial = DTensor.from_local(torch.ones(2), mesh["shard"], [Partial()])
    messages = []
    for build in (
        lambda: from_mesh(mesh, {"rows": 4}),
        lambda: from_mesh(mesh, {}),
        lambda: from_mesh(mesh, {"replicate": 0}),
        lambda: from_mesh(mesh, {"replicate": 4, "shard": 4}),
        lambda: from_mesh(mesh, ["replicate"]),
        lambda: from_mesh(init_device_mesh("cpu", (4,)), {"replicate": 4}),
        lambda: averagers.PeriodicModelAverager(4, process_group=mesh),
        lambda: averagers.PeriodicModelAverager(4, process_group=mesh["replicate"]).average_parameters([partial]),
    ):
        with pytest.raises(averagers.AveragersError) as caught:
            build()
        messages.append(str(caught.value))
    return messages


def test_a_mesh_or_axis_that_does_not_fit_is_refused_by_name() -> None:
    results = run_ranks(_refused, 4)
    assert results == [results[0]] * 4
    unknown, empty, zero, equal, no_mapping, no_names, two_axes, partial = results[0]
    assert "which has 'replicate', 'shard', got {'rows': 4}" in unknown
    assert "which has 'replicate', 'shard', got {}" in empty
    assert "the period of axis 'replicate' in axis_period_dict must be at least 1, got 0" in zero
    assert "'shard' lies within 'replicate', and has period 4, not less than 4" in equal
    assert "axis_period_dict must map axes of the mesh to periods" in no_mapping
    assert "give init_device_mesh its mesh_dim_names" in no_names
    assert "process_group must be a torch.distributed.ProcessGroup, a DeviceMesh of one axis or None" in two_axes
    assert "it is a DTensor; average the plain tensors it is made of" in partial
