"""The same rounds on GPUs over NCCL; runs where there are at least two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import averagers
from ranks_runner import run_ranks

WORLD = 2


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


@pytest.mark.skipif(torch.cuda.device_count() < WORLD, reason="needs two GPUs")
def test_rounds_on_nccl_are_the_mean(tmp_path: Any) -> None:
    assert all(all(found) for found in run_ranks(nccl_round, WORLD, str(tmp_path), initialize=False))
