"""Runs a function on several real ranks: processes with a gloo group, killed together at a timeout."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import frameworks
from frameworks import dist, lib

# What ranks would else import one by one: torch's optimizers need its compiler.
_PRELOADED = [
    "pytest",
    "torch.distributed.checkpoint.state_dict",
    "torch._dynamo",
    "averagers.averager",
    "averagers.reduction.pytorch",
    "averagers.training.ddp",
    "averagers.training.optimizer",
    "averagers.tensorplay",
    "tensorplay.distributed.optim",
]


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60,
    group_timeout_s: float = 30,
    may_die: Collection[int] = (),
    initialize: bool = True,
) -> list[Any]:
    """Call ``function(rank, *args)`` on each of ``world_size`` processes and return what each returned.

    Args:
        function: A function of a module; it and what it returns are pickled. It must not return tensors,
            whose memory would go with the rank.
        world_size: How many ranks.
        args: Passed on to each.
        timeout_s: After how many seconds all are killed and the test fails.
        group_timeout_s: Timeout of the default process group.
        may_die: Ranks whose death is part of the test; they return None.
        initialize: Whether to call ``init_process_group`` before and destroy it after.

    Raises:
        AssertionError: a rank raised, died or did not end in time; with every rank's traceback.
    """
    context = multiprocessing.get_context("forkserver")
    _start_forkserver()
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = str(Path(folder) / "rendezvous")
        pipes, processes = [], []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            setting = (rank, world_size, rendezvous, group_timeout_s, initialize, frameworks.current())
            process = context.Process(target=_rank_main, args=(function, args, setting, sender), daemon=True)
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            outcomes = _collect(pipes, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                process.join(5 if process.is_alive() else 0)
                process.kill()
                process.join()
    problems = [
        f"--- rank {rank} ---\n{outcomes.get(rank, ('did not end within ' + str(timeout_s) + ' s',))[-1]}"
        for rank in range(world_size)
        if outcomes.get(rank, ("late",))[0] != "returned" and rank not in may_die
    ]
    assert not problems, "\n".join(problems)
    return [outcomes[rank][1] if outcomes.get(rank, ("late",))[0] == "returned" else None for rank in range(world_size)]


def _start_forkserver() -> None:
    """Start the process that ranks are forked from, if it does not run yet.

    It must not measure coverage itself: a rank would do it twice, and end with a traceback on a signal.
    """
    coverage = ["coverage"] if "coverage" in sys.modules else []
    forkserver.set_forkserver_preload([*_PRELOADED, *coverage])
    measured = os.environ.pop("COVERAGE_PROCESS_CONFIG", None)
    try:
        forkserver.ensure_running()
    finally:
        if measured is not None:
            os.environ["COVERAGE_PROCESS_CONFIG"] = measured


def _collect(pipes: list[Any], deadline: float) -> dict[int, tuple[str, Any]]:
    """Receive one outcome a rank, until all have one or the deadline is over."""
    outcomes: dict[int, tuple[str, Any]] = {}
    while len(outcomes) < len(pipes):
        open_pipes = [pipe for rank, pipe in enumerate(pipes) if rank not in outcomes]
        ready = wait(open_pipes, max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            try:
                outcomes[pipes.index(pipe)] = pipe.recv()
            except EOFError:
                outcomes[pipes.index(pipe)] = ("died", "died without a word")
    return outcomes


def _rank_main(function: Callable[..., Any], args: Any, setting: Any, sender: Any) -> None:
    gc.freeze()  # what was preloaded need not be searched for garbage, which takes 0.1 s at the end
    rank, world_size, rendezvous, group_timeout_s, initialize, framework = setting
    frameworks.use(framework)
    lib.set_num_threads(1)
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(world_size)
    warnings.simplefilter("error")
    try:
        if initialize:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{rendezvous}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=group_timeout_s),
            )
        outcome = ("returned", function(rank, *args))
    except BaseException:
        outcome = ("raised", traceback.format_exc())
    sender.send(outcome)
    sender.close()
    if dist.is_initialized():
        dist.destroy_process_group()
