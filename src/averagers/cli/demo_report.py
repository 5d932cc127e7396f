"""What the demo ends with: a table, what it says about the methods, and a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from averagers.cli.demo_task import (
    GLOBAL_PERIOD,
    NODE_PERIOD,
    RANKS_PER_NODE,
    WORLD_SIZE,
    Run,
    RunResult,
    Task,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLES: Mapping[Run, str] = {"ddp": "DDP", "hierarchical": "hierarchical", "periodic": "periodic"}

_COLORS: Mapping[Run, str] = {"ddp": "#4d4d4d", "hierarchical": "#0072b2", "periodic": "#d55e00"}

_NUM_NODES = WORLD_SIZE // RANKS_PER_NODE


def report(task: Task, results: Mapping[Run, RunResult]) -> Group:
    """Return the table of all runs, its footnote, and what follows from it."""
    return Group(_table(results), Text(_footnote(task), style="dim"), Text(), _verdict(results))


def _table(results: Mapping[Run, RunResult]) -> Table:
    # 75 columns wide, for a terminal of 80.
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("\n\nrun", no_wrap=True)
    for heading in (
        "\nvalidation\nloss",
        "\n\nseconds",
        "MB\nwithin\nnodes",
        "MB\nbetween\nnodes",
        f"rounds\nof {RANKS_PER_NODE}\nranks",
        f"rounds\nof {WORLD_SIZE}\nranks",
        "\n\ndrift",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for run, result in results.items():
        table.add_row(
            TITLES[run],
            f"{result.validation_loss:.4f}",
            f"{result.seconds:.1f}",
            f"{result.traffic.intra_node_bytes / 1e6:,.0f}",
            f"{result.traffic.inter_node_bytes / 1e6:,.0f}",
            str(result.num_rounds.get(RANKS_PER_NODE, "-")),
            str(result.num_rounds.get(WORLD_SIZE, "-")),
            "-" if result.drift is None else f"{result.drift:.3f}",
            style="bold" if run == "hierarchical" else None,
        )
    return table


def _footnote(task: Task) -> str:
    return (
        f"Validation loss in nats a byte, of the final model. {WORLD_SIZE} processes stand for {_NUM_NODES} nodes of "
        f"{RANKS_PER_NODE} ranks; {task.num_steps} steps each. Hierarchical: models averaged every {NODE_PERIOD} steps "
        f"within a node and every {GLOBAL_PERIOD} among all; periodic: every {GLOBAL_PERIOD} among all; both after "
        f"{task.warmup_steps} steps of data parallel. Seconds: training without evaluation; here all links are this "
        "machine's memory. Drift: distance of a replica from the mean before a round of all ranks, mean over the "
        "rounds.\n"
        "MB: in a ring all-reduce of B bytes among P ranks each rank sends 2(P-1)/P x B to the next; a link between "
        f"ranks of different nodes counts as between nodes: 2 of the {WORLD_SIZE} links in the ring of all, none in a "
        "node's own. Each run counts every bucket of gradients and every round of weights by this formula; not "
        "counted are headers, the ranks' agreement (a few dozen bytes a round) and the broadcast at the start."
    )


def _verdict(results: Mapping[Run, RunResult]) -> Text:
    ddp, hierarchical, periodic = results["ddp"], results["hierarchical"], results["periodic"]
    ratio = hierarchical.validation_loss / ddp.validation_loss
    fewer = ddp.traffic.inter_node_bytes / max(1, hierarchical.traffic.inter_node_bytes)
    excess = hierarchical.validation_loss / periodic.validation_loss
    return Text.assemble(
        ("hierarchical / DDP validation loss: ", ""),
        (f"{ratio:.3f}", "bold"),
        ("\nhierarchical / periodic validation loss: ", ""),
        (f"{excess:.3f}", "bold"),
        ("\nbytes between nodes, DDP / hierarchical: ", ""),
        (f"{fewer:.1f} times fewer", "bold"),
    )


def draw(results: Mapping[Run, RunResult], path: Path) -> None:
    """Draw validation loss against steps, and against megabytes sent between nodes.

    Args:
        results: Of each run.
        path: The PNG file to write.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    figure = Figure(figsize=(10, 4.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    by_step, by_bytes = figure.subplots(1, 2, sharey=True)
    for run, result in results.items():
        losses = [evaluation.loss for evaluation in result.evaluations]
        steps = [float(evaluation.step) for evaluation in result.evaluations]
        megabytes = [evaluation.inter_node_bytes / 1e6 for evaluation in result.evaluations]
        _draw_run(by_step, run, steps, losses)
        _draw_run(by_bytes, run, megabytes, losses)
    by_step.set(xlabel="steps", ylabel="validation loss (nats a byte)")
    by_bytes.set(xlabel="MB sent between nodes (logarithmic)", xscale="log")
    by_bytes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    by_bytes.xaxis.set_major_formatter(FuncFormatter(lambda megabytes, _: f"{megabytes:,.0f}"))
    by_bytes.xaxis.set_minor_formatter(NullFormatter())
    _mark_saving(by_bytes, results["ddp"], results["hierarchical"])
    by_step.legend(frameon=False, title="final loss", alignment="left")
    for axes in (by_step, by_bytes):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"One language model, trained three ways on {_NUM_NODES} nodes of {RANKS_PER_NODE} ranks")
    figure.savefig(path)


def _draw_run(axes: Axes, run: Run, positions: list[float], losses: list[float]) -> None:
    label = f"{losses[-1]:.3f}  {TITLES[run]}"
    axes.plot(positions, losses, color=_COLORS[run], label=label, linewidth=1.8, marker="o", markersize=3.5)


def _mark_saving(axes: Axes, ddp: RunResult, hierarchical: RunResult) -> None:
    """Draw an arrow from DDP's end to the hierarchical run's, with how many times fewer bytes that is."""
    from_megabytes, from_loss = ddp.traffic.inter_node_bytes / 1e6, ddp.validation_loss
    to_megabytes, to_loss = hierarchical.traffic.inter_node_bytes / 1e6, hierarchical.validation_loss
    arrow = {"arrowstyle": "->", "color": _COLORS["hierarchical"], "shrinkA": 6, "shrinkB": 6, "linestyle": "--"}
    axes.annotate("", (to_megabytes, to_loss), (from_megabytes, from_loss), arrowprops=arrow)
    middle = ((from_megabytes * to_megabytes) ** 0.5, (from_loss + to_loss) / 2)
    axes.annotate(
        f"{from_megabytes / to_megabytes:.0f} times fewer bytes",
        middle,
        xytext=(0, 6),
        textcoords="offset points",
        ha="center",
        color=_COLORS["hierarchical"],
    )
