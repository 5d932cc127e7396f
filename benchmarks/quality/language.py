"""What the language experiments share: a byte-level transformer, trained data parallel and then by replicas."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import averagers
from averagers.cli.language_model import ByteTransformer, batches, help_text, next_byte_loss, split

CONTEXT = 64
BATCH_SIZE = 16
NUM_REPLICAS = 2
NUM_STEPS = 1000
START_STEPS = NUM_STEPS // 5
PERIOD = 50


class Language:
    """The demo's text, and models that are trained on it from one seed.

    Args:
        seed: Of the first weights and of the data.
        peak: The highest learning rate.
    """

    def __init__(self, seed: int, peak: float) -> None:
        self._seed = seed
        self._peak = peak
        self._training, self._validation = split(help_text(), CONTEXT)
        torch.manual_seed(seed)
        self.model: nn.Module = ByteTransformer(64, 2, 2, CONTEXT)
        self._optimizer = self._new_optimizer(self.model)

    def _new_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self._peak, weight_decay=0.1, betas=(0.9, 0.95))

    def _lr_at(self, step: int) -> float:
        rise = min(1.0, (step + 1) / 30)
        return self._peak * rise * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / NUM_STEPS)))

    def _data(self, replica: int, from_step: int) -> Iterator[tuple[Tensor, Tensor]]:
        stream = batches(self._training, BATCH_SIZE, CONTEXT, 1000 * self._seed + replica)
        for _ in range(from_step):
            next(stream)
        return stream

    def _step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], step: int
    ) -> None:
        for group in optimizer.param_groups:
            group["lr"] = self._lr_at(step)
        optimizer.zero_grad()
        next_byte_loss(model, *batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def data_parallel(self, from_step: int, to_step: int) -> None:
        """Train with the mean gradient of all replicas' batches."""
        streams = [self._data(replica, from_step) for replica in range(NUM_REPLICAS)]
        for step in range(from_step, to_step):
            drawn = [next(stream) for stream in streams]
            batch = (torch.cat([inputs for inputs, _ in drawn]), torch.cat([targets for _, targets in drawn]))
            self._step(self.model, self._optimizer, batch, step)

    def replicas(self, averager_of: Callable[[averagers.ReplicaGroup], Any], from_step: int, to_step: int) -> None:
        """Train replicas from where the model is, in one process, and go on with what they end as."""

        def train(group: averagers.ReplicaGroup) -> nn.Module:
            model = copy.deepcopy(self.model)
            optimizer = self._new_optimizer(model)
            optimizer.load_state_dict(copy.deepcopy(self._optimizer.state_dict()))
            stream = self._data(group.rank, from_step)
            averager = averager_of(group)
            for step in range(from_step, to_step):
                self._step(model, optimizer, next(stream), step)
                averager.average_parameters(model.named_parameters())
            averager.finish(model.named_parameters())
            return model

        self.model = averagers.run_replicas(train, NUM_REPLICAS)[0]

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Return the loss in nats a byte."""
        losses = [next_byte_loss(self.model, rows[:, :-1], rows[:, 1:]).item() for rows in self._validation.split(64)]
        sizes = [len(rows) for rows in self._validation.split(64)]
        return sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes)


def after_a_start(seed: int, peak: float, **options: Any) -> float:
    """Return the validation loss of a fifth of data parallel, then DiLoCo with these options.

    There are 16 rounds: too few for DiLoCo's momentum of 0.9, which takes about 30 to pay.
    """
    language = Language(seed, peak)
    language.data_parallel(0, START_STEPS)
    language.replicas(
        lambda group: averagers.PeriodicModelAverager(
            PERIOD, process_group=group, mixer=averagers.Nesterov(lr=0.9, momentum=0.6), **options
        ),
        START_STEPS,
        NUM_STEPS,
    )
    return language.validation_loss()
