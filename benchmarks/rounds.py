"""What a round costs, beside torch's and TensorPlay's own averagers and a bare all-reduce, in one run.

    make bench                                   # all of it, about 5 minutes
    python benchmarks/rounds.py --quick          # small models, to try the script

Ranks are processes of this machine that talk over gloo on loopback. Each figure is a median of rounds
in turn with the peers' rounds. Prints a table and writes benchmarks/results/rounds.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.algorithms.model_averaging import utils as torch_averaging

import averagers

RESULTS = Path(__file__).parent / "results" / "rounds.json"
REPETITIONS = 9
MIB = 2**20


def transformer_shapes(millions: int) -> list[tuple[int, ...]]:
    """Shapes of a decoder's parameters, about ``millions`` million elements."""
    width, layers, vocabulary = {
        2: (128, 4, 9000),
        10: (384, 4, 8000),
        24: (512, 6, 10000),
        100: (768, 12, 20000),
    }[millions]
    shapes: list[tuple[int, ...]] = [(vocabulary, width)]
    for _ in range(layers):
        shapes += [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
        shapes += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return shapes


def parameters(millions: int, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    torch.manual_seed(dist.get_rank())
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in transformer_shapes(millions)]


def side_by_side(actions: dict[str, Callable[[], float]]) -> dict[str, float]:
    """Median seconds of each action, taken in turn; the first turn warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(REPETITIONS + 1):
        for name, action in actions.items():
            dist.barrier()
            elapsed = action()
            if turn:
                seconds[name].append(elapsed)
    return {name: statistics.median(values) for name, values in seconds.items()}


def timed(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def round_times(millions: int, dtype_name: str) -> dict[str, float]:
    dtype = getattr(torch, dtype_name)
    params = parameters(millions, dtype)
    flat = torch.randn(sum(p.numel() for p in params)).to(dtype)

    def torch_round() -> float:
        storages = [p.data for p in params]
        elapsed = timed(lambda: torch_averaging.average_parameters(iter(params), dist.group.WORLD))
        for p, storage in zip(params, storages, strict=True):
            p.data = storage
        return elapsed

    def bare() -> None:
        dist.all_reduce(flat)
        flat.div_(dist.get_world_size())

    averagers.average_parameters(params)  # makes the groups
    return side_by_side(
        {
            "averagers": lambda: timed(lambda: averagers.average_parameters(params)),
            "torch": torch_round,
            "all_reduce": lambda: timed(bare),
        }
    )


def tensorplay_round_times(millions: int) -> dict[str, float]:
    import tensorplay as tp
    import tensorplay.distributed as tp_dist
    from tensorplay.distributed.algorithms.model_averaging import utils as tensorplay_averaging

    import averagers.tensorplay

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    tp.set_num_threads(1)
    tp.manual_seed(dist.get_rank())
    tp_dist.init_process_group(
        "gloo", init_method=f"file://{folder[0]}/rendezvous", rank=dist.get_rank(), world_size=dist.get_world_size()
    )
    params = [tp.nn.Parameter(tp.randn(shape)) for shape in transformer_shapes(millions)]

    # A list of their own: TensorPlay's averager leaves parameters that are views of one buffer.
    theirs = [tp.nn.Parameter(tp.randn(shape)) for shape in transformer_shapes(millions)]
    world = tp_dist.GroupMember.WORLD
    averagers.tensorplay.average_parameters(params)  # makes the groups
    times = side_by_side(
        {
            "averagers": lambda: timed(lambda: averagers.tensorplay.average_parameters(params)),
            "tensorplay": lambda: timed(lambda: tensorplay_averaging.average_parameters(iter(theirs), world)),
        }
    )
    tp_dist.destroy_process_group()
    dist.barrier()
    shutil.rmtree(folder[0], ignore_errors=True)
    return times


def peak_extra_mib(millions: int) -> dict[str, float]:
    """Highest resident memory during a round, less that before it."""
    params = parameters(millions, torch.float32)

    def peak(action: Callable[[], Any]) -> float:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        before = status_mib("VmRSS")
        action()
        return status_mib("VmHWM") - before

    dist.all_reduce(torch.zeros(MIB))  # gloo's own buffers
    ours = peak(lambda: averagers.average_parameters(params))
    theirs = peak(lambda: torch_averaging.average_parameters(iter(params), dist.group.WORLD))
    return {"averagers": ours, "torch": theirs}


def status_mib(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise LookupError(field)


def idle_microseconds() -> dict[str, float]:
    """Cost of a step at which no round is due."""
    params = [torch.nn.Parameter(torch.zeros(4))]
    averager = averagers.HierarchicalModelAverager({2**40: 2, 2**41: dist.get_world_size()}, warmup_steps=1)
    averager.average_parameters(params)

    def per_call(action: Callable[[], Any]) -> float:
        calls = 20_000
        start = time.perf_counter()
        for _ in range(calls):
            action()
        return (time.perf_counter() - start) / calls * 1e6

    plain, attached = torch.optim.SGD(params), torch.optim.SGD(params)
    averagers.attach(attached, averager)
    turns = [
        (per_call(lambda: averager.average_parameters(params)), per_call(plain.step), per_call(attached.step))
        for _ in range(REPETITIONS)
    ]
    call, plain_step, attached_step = (statistics.median(column) for column in zip(*turns, strict=True))
    return {"average_parameters": call, "attach": attached_step - plain_step}


def first_round_milliseconds() -> float:
    """From the call of a first round of 1,000 tensors to the agreement of the ranks on it."""
    params = [torch.nn.Parameter(torch.randn(8, 8)) for _ in range(1000)]
    samples = []
    for _ in range(REPETITIONS):
        agreed: list[float] = []
        averager = averagers.PeriodicModelAverager(
            2, observers=[lambda event, agreed=agreed: agreed.append(time.perf_counter())]
        )
        dist.barrier()
        start = time.perf_counter()
        averager.average_parameters(params)
        samples.append((agreed[0] - start) * 1e3)
        averager.close()
    return statistics.median(samples)


def rank_main(job: Callable[..., Any], args: tuple[Any, ...], rank: int, size: int, path: str, sender: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
    result = job(*args)
    if rank == 0:
        sender.send(result)
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(size: int, job: Callable[..., Any], *args: Any) -> Any:
    """Run ``job`` on ``size`` ranks and return rank 0's result."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "averagers.averager"])
    with tempfile.TemporaryDirectory() as folder:
        receiver, sender = context.Pipe(duplex=False)
        processes = [
            context.Process(target=rank_main, args=(job, args, rank, size, f"{folder}/rendezvous", sender), daemon=True)
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        sender.close()
        try:
            if not receiver.poll(600):
                raise TimeoutError(f"{job.__name__} did not end within 600 s on {size} ranks")
            return receiver.recv()
        finally:
            for process in processes:
                process.join(10)
                process.kill()


def hierarchy_seconds() -> dict[str, float]:
    """Build 5 levels over 4,096 ranks on torch's fake process group, as rank 1,234."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1234, world_size=4096)
    start = time.perf_counter()
    averager = averagers.HierarchicalModelAverager({2: 8, 8: 64, 32: 512, 128: 2048, 512: 4096})
    seconds = time.perf_counter() - start
    groups = len(set(averager.period_process_group_dict.values()))
    dist.destroy_process_group()
    return {"seconds": seconds, "groups": groups}


def measure(quick: bool) -> list[dict[str, Any]]:
    """Take every measurement; a row says what, how much, and what is asked for."""
    rows: list[dict[str, Any]] = []

    def row(what: str, value: float, unit: str, limit: float | None, **details: Any) -> None:
        rows.append({"what": what, "value": value, "unit": unit, "limit": limit, **details})

    for size in (2, 4):
        for millions, dtype in [(2, "float32")] if quick else [(24, "float32"), (100, "float32"), (24, "bfloat16")]:
            times = on_ranks(size, round_times, millions, dtype)
            name = f"{dtype} round, {millions}M parameters, {size} ranks"
            if dtype == "float32":
                row(f"{name} / torch's", times["averagers"] / times["torch"], "", 0.75, seconds=times)
            limit = 1.25 if dtype == "float32" else 2.0
            row(
                f"{name} / bare all-reduce",
                times["averagers"] / times["all_reduce"],
                "",
                limit,
                seconds=times,
            )
    for size in (2, 4):
        millions = 2 if quick else 10
        times = on_ranks(size, tensorplay_round_times, millions)
        name = f"float32 round on TensorPlay, {millions}M parameters, {size} ranks / TensorPlay's"
        row(name, times["averagers"] / times["tensorplay"], "", 1.0, seconds=times)
    for size in (2, 4):
        millions = 2 if quick else 100
        extra = on_ranks(size, peak_extra_mib, millions)
        row(f"extra memory, {millions}M parameters, {size} ranks", extra["averagers"], "MiB", 64.0)
        row(f"the same, torch's averager, {size} ranks", extra["torch"], "MiB", None)
    idle = on_ranks(2, idle_microseconds)
    row("average_parameters, nothing due", idle["average_parameters"], "µs", 2.0)
    row("added to optimizer.step by attach, nothing due", idle["attach"], "µs", 2.0)
    row("set-up of a first round, 1,000 tensors, 4 ranks", on_ranks(4, first_round_milliseconds), "ms", 20.0)
    hierarchy = hierarchy_seconds()
    row("hierarchy of 5 levels over 4,096 ranks", hierarchy["seconds"], "s", 2.0)
    row("process groups that one rank makes for it", hierarchy["groups"], "", None)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small models only")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where to write the figures")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    warnings.simplefilter("ignore")
    rows = measure(options.quick)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    machine = {"python": sys.version.split()[0], "torch": torch.__version__, "cores": os.cpu_count()}
    options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")
    table = Table("measure", "value", "at most", "", title=f"medians of {REPETITIONS}, {os.cpu_count()} cores")
    for entry in rows:
        limit = entry["limit"]
        verdict = "" if limit is None else "ok" if entry["value"] <= limit else "over"
        table.add_row(
            entry["what"],
            f"{entry['value']:.3g} {entry['unit']}",
            "" if limit is None else f"{limit:g}",
            verdict,
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
