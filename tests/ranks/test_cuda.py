"""The same rounds on GPUs over NCCL; runs where there are at least two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import averagers
from ranks_runner import run_ranks

WORLD = 2

METHODS: list[dict[str, Any]] = [
    {"mixer": averagers.Nesterov(), "offload": "cpu"},
    {"codec": averagers.Int8(), "offload": "cpu"},
    {"overlap": averagers.Delayed(2, keep=0.5)},
    {"mixer": averagers.Nesterov(), "overlap": averagers.Delayed(2, carry=True), "offload": "cpu"},
]


def nccl_round(rank: int, folder: str) -> Any:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{folder}/r", rank=rank, world_size=WORLD, device_id=device)
    found = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64):
        torch.manual_seed(rank)
        params = [torch.nn.Parameter(torch.randn(shape, dtype=dtype, device=device)) for shape in ((700, 300), (5,))]
        everyone = [torch.empty((WORLD, *p.shape), dtype=dtype, device=device) for p in params]
        for parameter, rows in zip(params, everyone, strict=True):
            dist.all_gather(list(rows.unbind()), parameter.detach())
        averager = averagers.PeriodicModelAverager(2, bucket_bytes=100_000)
        averager.average_parameters(params)
        for parameter, rows in zip(params, everyone, strict=True):
            wide = torch.promote_types(dtype, torch.float32)
            found.append(torch.equal(parameter.detach(), rows.to(wide).mean(0).to(dtype)))
        averager.close()
    return found


def methods(rank: int, folder: str, device_type: str) -> list[list[float]]:
    """Return the weights after some steps of each method."""
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    backend = "nccl" if device_type == "cuda" else "gloo"
    if device_type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{folder}/{backend}", rank=rank, world_size=WORLD)
    found = []
    for options in METHODS:
        averager = averagers.PeriodicModelAverager(3, **options)
        random = torch.Generator().manual_seed(rank)
        weights = [torch.randn(700, 30, generator=random).to(device), torch.randn(50, generator=random).to(device)]
        for _ in range(10):
            for weight in weights:
                weight.add_(torch.randn(weight.shape, generator=random).to(device), alpha=0.1)
            averager.average_parameters(weights)
        averager.finish(weights)
        found.append(torch.cat([weight.flatten() for weight in weights]).tolist())
    return found


@pytest.mark.skipif(torch.cuda.device_count() < WORLD, reason="needs two GPUs")
def test_late_and_offloaded_rounds_on_nccl_end_as_on_the_cpu(tmp_path: Any) -> None:
    cpu, cuda = (run_ranks(methods, WORLD, str(tmp_path), device, initialize=False)[0] for device in ("cpu", "cuda"))
    for ours, theirs in zip(cpu, cuda, strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs))


@pytest.mark.skipif(torch.cuda.device_count() < WORLD, reason="needs two GPUs")
def test_rounds_on_nccl_are_the_mean(tmp_path: Any) -> None:
    assert all(all(found) for found in run_ranks(nccl_round, WORLD, str(tmp_path), initialize=False))
