"""Rounds over slow links: namespaces on a bridge, as `make bench-network` measures them, here with a small model."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NETWORK = [sys.executable, str(ROOT / "benchmarks" / "network.py"), "--quick"]


def _namespaces_of(pid: int) -> list[str]:
    if shutil.which("ip") is None:
        return []
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"averagers-{pid}-")]


def _start(*options: str) -> subprocess.Popen[str]:
    return subprocess.Popen([*NETWORK, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _skip_where_there_is_none(code: int, errors: str) -> None:
    if code == 2 and "no network of nodes can be made here" in errors:
        warnings.warn(f"NOT TESTED: {errors.strip()}", RuntimeWarning, stacklevel=2)
        pytest.skip(errors.strip())


@pytest.mark.filterwarnings("default:NOT TESTED:RuntimeWarning")
def test_a_round_through_the_nodes_sends_fewest_bytes_over_the_link_and_leaves_no_namespace(tmp_path: Path) -> None:
    program = _start("--json", str(tmp_path / "network.json"))
    _, errors = program.communicate(timeout=110)
    _skip_where_there_is_none(program.returncode, errors)
    assert program.returncode == 0, errors
    (result,) = json.loads((tmp_path / "network.json").read_text())
    share: dict[str, Any] = {way: one["bytes"] / result["minimum_bytes"] for way, one in result["ways"].items()}
    assert 1.4 < share["torch"] < 1.7
    # A small model: the messages that open a round count.
    assert 1.0 <= share["averagers"] < 1.06
    assert _namespaces_of(program.pid) == []


@pytest.mark.filterwarnings("default:NOT TESTED:RuntimeWarning")
def test_namespaces_go_when_the_program_is_killed(tmp_path: Path) -> None:
    program = _start("--json", str(tmp_path / "network.json"))
    deadline = time.monotonic() + 30
    while program.poll() is None and len(_namespaces_of(program.pid)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    if program.poll() is not None:
        _skip_where_there_is_none(program.returncode, program.communicate()[1])
    assert len(_namespaces_of(program.pid)) == 3
    os.kill(program.pid, signal.SIGKILL)
    program.communicate(timeout=30)
    while _namespaces_of(program.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _namespaces_of(program.pid) == []


def test_without_root_or_tools_it_says_so_and_exits_with_2() -> None:
    environment = {**os.environ, "PATH": "/nowhere"}
    done = subprocess.run(NETWORK, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "no network of nodes can be made here" in done.stderr
    assert "Traceback" not in done.stderr
