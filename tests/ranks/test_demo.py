"""`averagers demo` and the example as their users start them: real processes, a few steps."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import averagers
from averagers.cli.launch import RanksFailedError, launch
from ranks_runner import run_ranks

ROOT = Path(__file__).parents[2]
DEMO = [sys.executable, "-c", "from averagers.cli import main; main(prog_name='averagers')", "demo"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
TIMEOUT_S = 90
ENVIRONMENT = {**os.environ, "COLUMNS": "100", "OMP_NUM_THREADS": "1"}


def start(*command: str) -> subprocess.Popen[str]:
    """Start a program as the leader of a session of its own, so that all it starts can be found and ended."""
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        start_new_session=True,
    )


def end(program: subprocess.Popen[str]) -> tuple[str, str]:
    """Return what the program printed, when it has ended; kill it and all that it started at the timeout."""
    try:
        return program.communicate(timeout=TIMEOUT_S)
    finally:
        for process in processes_of(program):
            os.kill(process, signal.SIGKILL)
        program.wait()


def processes_of(program: subprocess.Popen[str]) -> list[int]:
    """Return the processes of the program's session that are alive, from Linux's own table."""
    alive = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:  # it has just ended
            continue
        if int(session) == program.pid and state != "Z":
            alive.append(int(path.parent.name))
    return alive


def wait_for(path: Path) -> None:
    """Wait until the file has a line."""
    deadline = time.monotonic() + TIMEOUT_S
    while not (path.exists() and path.read_text().count("\n")):
        assert time.monotonic() < deadline, f"{path} stayed empty"
        time.sleep(0.05)


def test_a_short_demo_ends_with_table_picture_and_json_lines(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    program = start(*DEMO, "--steps", "34", "--seed", "3", "--out", str(tmp_path / "demo"))
    output, errors = end(program)
    assert (program.returncode, errors) == (0, "")
    table = [line.split() for line in output.splitlines() if len(line.split()) == 8]
    rounds_of_runs = {run: (within, between) for run, *_, within, between, _ in table}
    assert rounds_of_runs.pop("DDP") == ("-", "-")
    assert rounds_of_runs.pop("hierarchical") == ("7", "3")
    assert rounds_of_runs.pop("periodic") == ("-", "3")
    assert re.search(r"bytes between nodes, DDP / hierarchical: 11\.3 times fewer", output)
    assert (tmp_path / "demo" / "demo.png").read_bytes().startswith(b"\x89PNG")
    lines = [json.loads(line) for line in (tmp_path / "demo" / "hierarchical.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["event"] == "step"] == [10, 20, 30, 34]
    rounds = [line["step"] for line in lines if line["event"] == "round_finished"]
    assert rounds == [0, 4, 8, 12, 16, 20, 24, 28, 32, 34]
    assert lines[-1]["event"] == "run_finished"
    # 34 times the gradients among all ranks: two links of the ring, each 3/2 of 4 bytes a weight.
    num_weights = next(line["num_elements"] for line in lines if line["event"] == "round_finished")
    last = json.loads((tmp_path / "demo" / "ddp.jsonl").read_text().splitlines()[-1])
    assert last["inter_node_bytes"] == last["intra_node_bytes"] == 34 * 2 * 3 * 4 * num_weights // 2


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in Linux's own table")
def test_ctrl_c_ends_a_demo_in_one_line_and_leaves_no_process(tmp_path: Path) -> None:
    program = start(*DEMO, "--no-picture", "--out", str(tmp_path))
    try:
        wait_for(tmp_path / "ddp.jsonl")
        os.killpg(program.pid, signal.SIGINT)  # as a terminal does: to all processes in the foreground
    finally:
        _, errors = end(program)
    assert (program.returncode, errors) == (130, "averagers: interrupted\n")
    assert processes_of(program) == []


def nothing(rank: int) -> None:
    pass


@pytest.fixture(scope="module")
def preloaded() -> None:
    """Start the process that ranks are forked from as the other tests do, with torch loaded."""
    run_ranks(nothing, 1)


def write_to_a_full_disk(path: str, tell: Callable[[Any], None]) -> None:
    if dist.get_rank() == 0:
        averagers.JsonLines(path).write("note", {})
    dist.barrier()


def refuse(message: str, tell: Callable[[Any], None]) -> None:
    if dist.get_rank() == 1:
        raise ValueError(message)
    dist.barrier()


def kill_itself(rank: int, tell: Callable[[Any], None]) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def count_ranks(start: int, tell: Callable[[Any], None]) -> None:
    total = torch.tensor(start)
    dist.all_reduce(total)
    tell((dist.get_rank(), total.item()))


@pytest.mark.usefixtures("preloaded")
def test_what_the_ranks_tell_is_heard_to_the_end() -> None:
    heard: list[Any] = []
    launch(count_ranks, 5, 2, heard.append)
    assert sorted(heard) == [(0, 10), (1, 10)]


@pytest.mark.usefixtures("preloaded")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_full_disk_is_told_in_one_line_with_the_file() -> None:
    with pytest.raises(RanksFailedError, match=r"^/dev/full: No space left on device$") as caught:
        launch(write_to_a_full_disk, "/dev/full", 2, print)
    assert caught.value.details is None


@pytest.mark.usefixtures("preloaded")
def test_a_rank_that_raises_is_told_with_its_traceback() -> None:
    with pytest.raises(RanksFailedError, match=r"^rank 1: ValueError: the loss is NaN$") as caught:
        launch(refuse, "the loss\nis NaN", 2, print)
    assert "in refuse" in str(caught.value.details)


@pytest.mark.usefixtures("preloaded")
def test_a_rank_that_dies_is_told_with_the_signal() -> None:
    with pytest.raises(RanksFailedError, match=r"^rank 1 died \(SIGKILL\)$"):
        launch(kill_itself, 1, 2, print)


def train(log_folder: Path, *options: str) -> str:
    """Run the example on two ranks and return the validation loss that it printed."""
    launcher = [*TORCHRUN, "--rdzv-endpoint", "localhost:0", "--log-dir", str(log_folder)]
    program = start(*launcher, str(ROOT / "examples" / "train_lm.py"), *options)
    output, errors = end(program)
    assert program.returncode == 0, errors
    (loss,) = re.findall(r"validation loss (\S+)", output)
    return str(loss)


def test_the_example_trains_and_a_resumed_run_ends_as_one_that_was_not_stopped(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 200)
    folder = tmp_path / "checkpoint"
    options = ("--data", str(text), "--steps", "75", "--checkpoint", str(folder), "--save-period", "70")
    to_the_end = train(tmp_path / "log", *options)
    assert sorted(path.name for path in folder.iterdir()) == ["rank-0-step-70.pt", "rank-1-step-70.pt"]
    # Saved between two rounds: the ranks' weights differ.
    saved = [torch.load(path, weights_only=True)["model"]["embedding.weight"] for path in folder.iterdir()]
    assert not torch.equal(*saved)
    assert train(tmp_path / "log", *options) == to_the_end
