"""What the demo trains, and what its ranks tell of it: frozen records (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

from averagers.cli.traffic import Traffic

Run = Literal["ddp", "hierarchical", "periodic"]

RUNS: tuple[Run, ...] = ("ddp", "hierarchical", "periodic")

RANKS_PER_NODE = 2
WORLD_SIZE = 4
NODE_PERIOD = 4
GLOBAL_PERIOD = 32


@final
@dataclass(frozen=True)
class Task:
    """What every run trains, the same in all three.

    Attributes:
        folder: Where the JSON lines of the runs go.
        seed: Of the first weights and of the order of the data.
        num_steps: Steps of each run.
        batch_size: Windows of text a rank and step.
        context: Bytes of a window.
        width: Features of the model.
        num_layers: Its blocks.
        num_heads: Heads of each attention.
        learning_rate: The highest; it rises to it over the first steps, then falls to a tenth.
    """

    folder: str
    seed: int = 0
    num_steps: int = 1100
    batch_size: int = 8
    context: int = 64
    width: int = 96
    num_layers: int = 2
    num_heads: int = 2
    learning_rate: float = 4e-3

    @property
    def warmup_steps(self) -> int:
        """Steps of data parallel first, in the two runs that average models: at most 6 % of all."""
        return self.num_steps * 6 // 100 // GLOBAL_PERIOD * GLOBAL_PERIOD

    @property
    def evaluation_period(self) -> int:
        """Steps from one evaluation to the next, so that it meets rounds among all ranks."""
        return max(1, self.num_steps // (8 * GLOBAL_PERIOD)) * GLOBAL_PERIOD

    def learning_rate_factor(self, step: int) -> float:
        """Return the share of `learning_rate` at ``step``."""
        rise = min(1.0, (step + 1) / 30)
        return rise * (1 - 0.9 * step / self.num_steps)


@final
@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
        run: Which run.
        step: Steps done.
        loss: Mean training loss of the first rank since the last report, in nats a byte.
        tokens: Bytes of text that all ranks have trained on.
        seconds: Time spent in training, evaluations not counted.
        traffic: Bytes sent by all ranks.
    """

    run: Run
    step: int
    loss: float
    tokens: int
    seconds: float
    traffic: Traffic


@final
@dataclass(frozen=True)
class Evaluation:
    """The validation loss of the ranks' common model.

    Attributes:
        step: Steps done.
        loss: In nats a byte.
        inter_node_bytes: Bytes sent between nodes until then.
    """

    step: int
    loss: float
    inter_node_bytes: int


@final
@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    Attributes:
        run: Which run.
        evaluations: In order; the last is that of the final model.
        seconds: Time spent in training, evaluations not counted.
        traffic: Bytes sent by all ranks.
        num_rounds: Maps a group size to the number of rounds in groups of it.
        drift: Mean over the rounds among all ranks; None where there was none.
    """

    run: Run
    evaluations: tuple[Evaluation, ...]
    seconds: float
    traffic: Traffic
    num_rounds: dict[int, int]
    drift: float | None

    @property
    def validation_loss(self) -> float:
        """Of the final model, in nats a byte."""
        return self.evaluations[-1].loss


@final
@dataclass(frozen=True)
class Failure:
    """Why a rank ended early.

    Attributes:
        rank: Its global rank.
        message: One line.
        details: The traceback, where the line alone does not tell the cause.
        is_consequence: Whether it only says that another rank is gone.
    """

    rank: int
    message: str
    details: str | None
    is_consequence: bool
