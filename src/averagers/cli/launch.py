"""Starts ranks on this machine through torch's own launcher, and hears what they tell."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from averagers.cli.demo_task import Failure
from averagers.errors import AveragersError, RoundFailedError

RankFunction = Callable[[Any, Callable[[Any], None]], None]


class RanksFailedError(AveragersError, RuntimeError):
    """A rank ended early; the message says which one and why.

    Attributes:
        details: The rank's traceback, or None where the message says enough.
    """

    def __init__(self, message: str, details: str | None) -> None:
        super().__init__(message)
        self.details = details


def start_preloading() -> None:
    """Begin to load torch in the process that ranks are forked from, while this one goes on."""
    from multiprocessing import forkserver

    # torch's optimizers need its compiler, which would else be loaded by each rank.
    forkserver.set_forkserver_preload(["averagers.cli.demo_training", "torch._dynamo"])
    # Inherited: Ctrl-C reaches the whole foreground group, and that process must leave it to this one.
    with _handlers({signal.SIGINT: signal.SIG_IGN}):
        forkserver.ensure_running()


def launch(function: RankFunction, task: Any, num_ranks: int, hear: Callable[[Any], None]) -> None:
    """Call ``function(task, tell)`` on each of ``num_ranks`` processes with a gloo process group.

    Args:
        function: A function of a module.
        task: Passed on; both are pickled.
        num_ranks: How many processes.
        hear: Called in a thread of this process with whatever a rank gives to ``tell``.

    Raises:
        RanksFailedError: a rank raised, or died.
        KeyboardInterrupt: on Ctrl-C, after all ranks were ended.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _wait_for_forkserver()
    # A pipe a rank, not a queue: a rank that is killed cannot leave a lock behind.
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(num_ranks)]
    senders = [sender for _, sender in pipes]
    with (
        tempfile.TemporaryDirectory(prefix="averagers-") as log_folder,
        _handlers({}),
        _without_log(),
        _listening([receiver for receiver, _ in pipes], hear) as failures,
    ):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            start_method="forkserver",
            logs_specs=DefaultLogsSpecs(log_dir=log_folder),
            shutdown_timeout=5,
        )
        try:
            elastic_launch(config, _run_rank)(function, task, senders)
        except SignalException as ended:
            if ended.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + ended.sigval) from None
        except ChildFailedError as error:
            death = error
        else:
            return
    raise _explained(failures, death)


def _wait_for_forkserver() -> None:
    """Wait until ranks can be forked.

    Ranks that are asked for while it still loads torch would come after an early Ctrl-C, and print that
    what they need is gone.
    """
    first = multiprocessing.get_context("forkserver").Process(target=os.getpid)
    first.start()
    first.join()


@contextmanager
def _listening(receivers: list[Connection], hear: Callable[[Any], None]) -> Iterator[list[Failure]]:
    """Hear the ranks in a thread during the block, and what was sent in it to the end; yields the failures."""
    failures: list[Failure] = []
    is_over = threading.Event()

    def listen() -> None:
        while (ready := [receiver for receiver in receivers if receiver.poll()]) or not is_over.wait(0.05):
            for receiver in ready:
                report = receiver.recv()
                if isinstance(report, Failure):
                    failures.append(report)
                else:
                    hear(report)

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        yield failures
    finally:
        is_over.set()
        # Not for ever: a rank that is killed may leave half a report.
        thread.join(5)


def _explained(failures: list[Failure], error: Any) -> RanksFailedError:
    """Return an error that tells why the first rank failed that had a reason of its own."""
    rank, ended = error.get_first_failure()
    causes = [failure for failure in failures if not failure.is_consequence]
    if not causes and ended.exitcode < 0:
        return RanksFailedError(f"rank {rank} died ({ended.signal_name()})", None)
    if not failures:
        return RanksFailedError(f"rank {rank} ended with exit code {ended.exitcode}", None)
    told = (causes or failures)[0]
    return RanksFailedError(told.message, told.details)


def _run_rank(function: RankFunction, task: Any, senders: list[Connection]) -> None:
    """Set up this process as a rank, run ``function``, and tell of its failure."""
    # The launcher ends ranks by signals: die at once and without a traceback, also within a collective.
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, signal.SIG_DFL)
    _use_loopback()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    tell = senders[rank].send
    try:
        dist.init_process_group("gloo", timeout=timedelta(minutes=2))
        function(task, tell)
        dist.destroy_process_group()
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _end(tell, Failure(rank, f"{where}{error.strerror or error}", None, is_consequence=False))
    except Exception as error:
        message = " ".join(f"rank {rank}: {type(error).__name__}: {error}".split())
        details = None if isinstance(error, AveragersError) else traceback.format_exc()
        # gloo raises a bare RuntimeError where a peer is gone.
        is_consequence = isinstance(error, RoundFailedError | dist.DistError) or type(error) is RuntimeError
        _end(tell, Failure(rank, message, details, is_consequence))


def _end(tell: Callable[[Any], None], failure: Failure) -> NoReturn:
    tell(failure)
    if failure.is_consequence:
        # The launcher names the rank that ends first: let that be the one with the cause.
        time.sleep(3)
    sys.exit(1)


def _use_loopback() -> None:
    """Let gloo's ranks meet on this machine's loopback, whatever the machine is called."""
    for _, name in socket.if_nameindex():
        if name in ("lo", "lo0"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("TP_SOCKET_IFNAME", name)


@contextmanager
def _handlers(handlers: dict[signal.Signals, Any]) -> Iterator[None]:
    """Set handlers of signals for a block, and put back those of before, also where others changed them."""
    touched = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in touched}
    for number, handler in handlers.items():
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _without_log() -> Iterator[None]:
    """Keep the launcher's log of its own doings off the screen for a block: what counts is raised."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
