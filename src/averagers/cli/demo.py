"""The demo: launches the ranks, shows how far they are, and reports."""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path
from typing import Any, final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from averagers.cli import demo_report
from averagers.cli.demo_task import RUNS, WORLD_SIZE, Run, RunResult, Task
from averagers.cli.demo_task import Progress as RankProgress
from averagers.cli.launch import launch, start_preloading
from averagers.errors import MissingDependencyError


def run_demo(task: Task, console: Console, *, with_picture: bool) -> None:
    """Train ``task`` three ways, showing progress on ``console``, and end with table and picture.

    Args:
        task: What to train; its folder is made, and the files of an earlier demo in it are replaced.
        console: Where to show it.
        with_picture: Whether to draw ``demo.png``, which needs matplotlib.

    Raises:
        MissingDependencyError: torch or matplotlib is not installed.
        OSError: the folder cannot be written, or the disk is full.
        RanksFailedError: a rank ended early.
    """
    _require("torch", "pip install torch")
    if with_picture:
        _require("matplotlib", "pip install 'averagers[plot]', or say --no-picture")
    folder = Path(task.folder)
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / "demo.png"
    for stale in (*(folder / f"{run}.jsonl" for run in RUNS), picture):
        stale.unlink(missing_ok=True)
    start_preloading()
    results = _train(task, console)
    console.print(demo_report.report(task, results))
    if with_picture:
        demo_report.draw(results, picture)
        console.print(f"Picture: {picture}", soft_wrap=True, highlight=False)
    console.print(f"JSON lines: {folder}/{{{','.join(RUNS)}}}.jsonl", soft_wrap=True, highlight=False)


def _train(task: Task, console: Console) -> dict[Run, RunResult]:
    with _Display(task, console) as display:
        display.say("starting 4 processes")
        from averagers.cli.demo_training import train_all

        launch(train_all, task, WORLD_SIZE, display.hear)
    return display.results


def _require(package: str, remedy: str) -> None:
    # ValueError: somebody put something without a spec in its place.
    spec = None
    with contextlib.suppress(ValueError):
        spec = importlib.util.find_spec(package)
    if spec is None:
        raise MissingDependencyError(f"{package} is not installed: {remedy}")


@final
class _Display:
    """A line a run: step, loss, speed, bytes between nodes, time left.

    Attributes:
        results: Of the runs that ended.
    """

    def __init__(self, task: Task, console: Console) -> None:
        self.results: dict[Run, RunResult] = {}
        self._progress = Progress(
            TextColumn("{task.description:<12}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True, table_column=Column(min_width=5)),
            console=console,
            expand=True,
        )
        self._lines: dict[Run, TaskID] = {
            run: self._progress.add_task(demo_report.TITLES[run], total=task.num_steps, start=False, figures="")
            for run in RUNS
        }

    def say(self, what: str) -> None:
        """Show ``what`` beside the first run."""
        self._progress.update(self._lines[RUNS[0]], figures=what)

    def hear(self, report: Any) -> None:
        """Take in a report of the ranks."""
        if isinstance(report, RunResult):
            self.results[report.run] = report
        elif isinstance(report, RankProgress):
            line = self._lines[report.run]
            self._progress.start_task(line)
            self._progress.update(line, completed=report.step, figures=_figures(report))

    def __enter__(self) -> _Display:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()


def _figures(report: RankProgress) -> str:
    speed = report.tokens / report.seconds / 1e3
    megabytes = report.traffic.inter_node_bytes / 1e6
    return f"step {report.step:>4} loss {report.loss:.3f} {speed:3.0f}k tok/s {megabytes:>5,.0f} MB between nodes"
