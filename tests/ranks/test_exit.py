"""A process that ends while a round is under way ends as it would without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
from unittest import mock
import torch, torch.distributed as dist
import averagers
from averagers.mixing.overlap import Flight

rank, folder, way = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
averager = averagers.PeriodicModelAverager(4, overlap=averagers.Delayed(3), timeout_s=3)
weight = torch.full((1_000_000,), float(rank))
is_stuck = way == "stuck" and rank == 1
with mock.patch.object(Flight, "begin", lambda *arguments, **options: None) if is_stuck else mock.MagicMock():
    for _ in range(2):
        averager.average_parameters([weight])
print("sent", flush=True)
if way == "raise":
    raise ValueError("a fault of the caller")
if way == "destroy":
    dist.destroy_process_group()
if is_stuck:
    sys.stdin.read()
"""


@pytest.mark.parametrize(("way", "code"), [("end", 0), ("raise", 1), ("destroy", 0)])
def test_a_round_under_way_does_not_change_how_a_process_ends(way: str, code: int, tmp_path: Path) -> None:
    processes = [start(rank, tmp_path, way) for rank in range(2)]
    for process in processes:
        output, errors = process.communicate(timeout=60)
        assert output == "sent\n"
        assert process.returncode == code, errors
        assert ("a fault of the caller" in errors) == (way == "raise")
        assert "terminate called" not in errors


def test_a_round_that_nobody_else_comes_to_holds_the_end_until_its_timeout(tmp_path: Path) -> None:
    first, second = (start(rank, tmp_path, "stuck") for rank in range(2))
    try:
        # The process group's timeout is half an hour, the averager's three seconds.
        output, errors = first.communicate(timeout=60)
        assert (output, first.returncode) == ("sent\n", 0), errors
        assert second.poll() is None
    finally:
        second.communicate(timeout=60)


def start(rank: int, folder: Path, way: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, str(rank), str(folder), way]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
