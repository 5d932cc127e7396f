"""What each rank of the demo does: trains the same task three ways in turn."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from averagers.averager import HierarchicalModelAverager, PeriodicModelAverager
from averagers.cli.demo_task import (
    GLOBAL_PERIOD,
    NODE_PERIOD,
    RANKS_PER_NODE,
    RUNS,
    WORLD_SIZE,
    Evaluation,
    Progress,
    Run,
    RunResult,
    Task,
)
from averagers.cli.language_model import ByteTransformer, batches, help_text, next_byte_loss, split
from averagers.cli.traffic_meter import MeteredGradients, TrafficMeter
from averagers.events import Observer
from averagers.observe.jsonl import JsonLines
from averagers.training.attach import attach
from averagers.training.ddp import PostLocalSGDState

_STEPS_A_REPORT = 10


def train_all(task: Task, tell: Callable[[Any], None]) -> None:
    """Train ``task`` in each of the ways of `RUNS`, on an initialized process group.

    Args:
        task: What to train.
        tell: Called on the first rank with each `Progress` and `RunResult`.
    """
    # Of a full disk: the run's own next line meets it too, and ends the run with the cause.
    warnings.filterwarnings("ignore", message="the observer JsonLines")
    # A group of one: gradients that stay where they are. Each rank makes its own.
    alone, _ = dist.new_subgroups(group_size=1)
    for run in RUNS:
        result = _Training(task, run, alone, tell).run()
        if dist.get_rank() == 0:
            tell(result)


def run_path(task: Task, run: Run) -> Path:
    """Return the file that ``run`` writes its JSON lines to."""
    return Path(task.folder) / f"{run}.jsonl"


@final
class _Training:
    """One run on this rank.

    Args:
        task: What to train.
        run: How.
        alone: A process group of this rank only.
        tell: Called on the first rank with each `Progress`.
    """

    def __init__(self, task: Task, run: Run, alone: Any, tell: Callable[[Any], None]) -> None:
        self.task = task
        self.name = run
        self.tell = tell
        self.is_first = dist.get_rank() == 0
        self.meter = TrafficMeter(RANKS_PER_NODE)
        self.sink = JsonLines(run_path(task, run)) if self.is_first else None
        self.seconds = 0.0
        self.losses: list[float] = []
        self.evaluations: list[Evaluation] = []
        training, self.validation = split(help_text(), task.context)
        data_seed = task.seed * WORLD_SIZE + dist.get_rank()
        self.batches = batches(training, task.batch_size, task.context, data_seed)
        torch.manual_seed(task.seed)
        self.model = ByteTransformer(task.width, task.num_layers, task.num_heads, task.context)
        self.averager = self._new_averager()
        self.ddp_model = DistributedDataParallel(self.model, forward_sync_buffers=False, gradient_as_bucket_view=True)
        post_local_sgd = None if self.averager is None else PostLocalSGDState(self.averager, alone)
        MeteredGradients(self.meter, post_local_sgd).register(self.ddp_model)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=task.learning_rate, betas=(0.9, 0.99), weight_decay=0.0, fused=True
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, task.learning_rate_factor)

    def run(self) -> RunResult:
        """Train, and return how it ended."""
        with ExitStack() as stack:
            if self.sink is not None:
                stack.enter_context(self.sink)
            if self.averager is not None:
                stack.callback(self.averager.close)
            with self._averaging():
                for step in range(self.task.num_steps):
                    with self._stopwatch():
                        self._train_step(step)
                    self._report(step + 1)
                    # Right after a round among all ranks, or a step of data parallel: the replicas are equal.
                    if 0 < step < self.task.num_steps - 1 and step % self.task.evaluation_period == 0:
                        self._evaluate(step + 1)
            self._evaluate(self.task.num_steps)
            drifts = self.meter.global_drifts
            result = RunResult(
                self.name,
                tuple(self.evaluations),
                self.seconds,
                self.meter.traffic,
                dict(self.meter.num_rounds),
                sum(drifts) / len(drifts) if drifts else None,
            )
            self._write("run_finished", validation_loss=result.validation_loss, drift=result.drift, **self._figures())
        return result

    def _new_averager(self) -> HierarchicalModelAverager | PeriodicModelAverager | None:
        warmup_steps = self.task.warmup_steps
        observers: list[Observer] = [self.meter] if self.sink is None else [self.meter, self.sink]
        if self.name == "hierarchical":
            return HierarchicalModelAverager(
                {NODE_PERIOD: RANKS_PER_NODE, GLOBAL_PERIOD: WORLD_SIZE},
                warmup_steps,
                observers=observers,
                measure_drift=True,
            )
        if self.name == "periodic":
            return PeriodicModelAverager(GLOBAL_PERIOD, warmup_steps, observers=observers, measure_drift=True)
        return None

    @contextmanager
    def _averaging(self) -> Iterator[None]:
        """Average the models in this block as the run's averager decides, once more at its end."""
        attachment: AbstractContextManager[Any] = nullcontext()
        if self.averager is not None:
            attachment = attach(self.optimizer, self.averager)
        dist.barrier()
        with attachment:
            yield

    def _train_step(self, step: int) -> None:
        inputs, targets = next(self.batches)
        self.optimizer.zero_grad()
        loss = next_byte_loss(self.ddp_model, inputs, targets)
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.losses.append(loss.item())

    @contextmanager
    def _stopwatch(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - started

    def _report(self, step: int) -> None:
        if not self.is_first or (step % _STEPS_A_REPORT and step != self.task.num_steps):
            return
        loss = sum(self.losses) / len(self.losses)
        self.losses.clear()
        tokens = step * self.task.batch_size * self.task.context * WORLD_SIZE
        self.tell(Progress(self.name, step, loss, tokens, self.seconds, self.meter.traffic))
        self._write("step", step=step, loss=loss, tokens=tokens, **self._figures())

    def _evaluate(self, step: int) -> None:
        """Take the loss over the validation text, each rank its share."""
        total = torch.zeros(2, dtype=torch.float64)
        self.model.eval()
        with torch.no_grad():
            for windows in self.validation[dist.get_rank() :: WORLD_SIZE].split(64):
                loss = next_byte_loss(self.model, windows[:, :-1], windows[:, 1:])
                total += torch.tensor([loss.item() * len(windows), len(windows)], dtype=torch.float64)
        self.model.train()
        dist.all_reduce(total)
        loss_of_all = _ratio(total)
        self.evaluations.append(Evaluation(step, loss_of_all, self.meter.traffic.inter_node_bytes))
        self._write("evaluation", step=step, validation_loss=loss_of_all, **self._figures())

    def _figures(self) -> dict[str, Any]:
        traffic = self.meter.traffic
        return {
            "inter_node_bytes": traffic.inter_node_bytes,
            "intra_node_bytes": traffic.intra_node_bytes,
            "seconds": self.seconds,
        }

    def _write(self, kind: str, **fields: Any) -> None:
        if self.sink is not None:
            self.sink.write(kind, {"run": self.name, **fields})


def _ratio(total: Tensor) -> float:
    weighted, count = total.tolist()
    return float(weighted / count)
