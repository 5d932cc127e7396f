"""What the experiments share: replicas computed together, and a claim that is checked, printed, saved and drawn."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor

import averagers

RESULTS = Path(__file__).parents[1] / "results" / "quality"


def train_together(
    replicas: Sequence[Tensor],
    averager_of: Callable[[averagers.ReplicaGroup], Any],
    is_due: Callable[[int], bool],
    local_step: Callable[[int], None],
    num_steps: int,
) -> int:
    """Train replicas whose local steps are computed together, and average them by the engine that ranks run.

    Args:
        replicas: Tensors with a row for each replica.
        averager_of: Builds a replica's averager on its group.
        is_due: Whether a round is due at a step, so that the other replicas need not wake before.
        local_step: One step of all replicas.
        num_steps: How many.

    Returns:
        How many rounds there were.
    """
    num_replicas = len(replicas[0])
    gate = threading.Barrier(num_replicas)
    due = [step for step in range(num_steps) if is_due(step)]

    def replica(group: averagers.ReplicaGroup) -> None:
        averager = averager_of(group)
        own = [tensor[group.rank] for tensor in replicas]
        done = 0
        for step in [*due, num_steps]:
            if group.rank == 0:
                for local in range(done, min(step + 1, num_steps)):
                    local_step(local)
                done = step + 1
            gate.wait()
            averager.step = step
            if step < num_steps:
                averager.average_parameters(own)
            else:
                averager.finish(own)
            gate.wait()

    averagers.run_replicas(replica, num_replicas)
    return len(due)


@dataclass
class Claim:
    """A claim, what was measured for it, and whether it holds.

    Attributes:
        name: Of the files.
        text: What is claimed.
        rows: What was measured, a row each.
        checks: What must hold, and whether it does.
        curves: Numbers to draw, by name: pairs of x and y.
        axes: What x and y are.
    """

    name: str
    text: str
    axes: tuple[str, str]
    rows: list[dict[str, Any]] = field(default_factory=list)
    checks: list[tuple[str, bool]] = field(default_factory=list)
    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def report(self) -> int:
        """Print, save and draw what was measured; return 1 where the claim does not hold."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        console = Console(width=110)
        table = Table(*self.rows[0], title=self.text)
        for row in self.rows:
            table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
        console.print(table)
        for text, holds in self.checks:
            console.print(f"{'holds' if holds else 'DOES NOT HOLD'}: {text}")
        RESULTS.mkdir(parents=True, exist_ok=True)
        holds = all(holds for _, holds in self.checks)
        record = {"claim": self.text, "holds": holds, "checks": self.checks, "rows": self.rows, "curves": self.curves}
        (RESULTS / f"{self.name}.json").write_text(json.dumps(record, indent=2) + "\n")
        figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
        for name, points in self.curves.items():
            axes.plot(*zip(*points, strict=True), marker="o" if len(points) < 40 else "", label=name)
        axes.set(xlabel=self.axes[0], ylabel=self.axes[1], title=self.text)
        axes.legend()
        figure.savefig(RESULTS / f"{self.name}.png", dpi=100)
        pyplot.close(figure)
        return 0 if holds else 1
