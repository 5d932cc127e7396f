"""`attach`: averaging after each step of an optimizer, with no change in the loop."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import Any, final

import torch
from torch import nn

from averagers.averager import average_parameters
from averagers.engine import ScheduledAverager
from averagers.errors import InvalidTypeError, InvalidValueError
from averagers.training.amp import ScaledStep, is_state_initialization
from averagers.training.module_state import TrainingContent, check_actions, named_state

_optimizer_of: weakref.WeakKeyDictionary[Any, weakref.ref[torch.optim.Optimizer]] = weakref.WeakKeyDictionary()


def attach(
    optimizer: torch.optim.Optimizer,
    averager: Any,
    *,
    module: nn.Module | None = None,
    optimizer_state: Mapping[str, str | int] | None = None,
) -> Attachment:
    """Average the optimizer's parameters after each of its steps, as ``averager`` decides.

    Args:
        optimizer: Any optimizer; a gradient scaler, a closure or a scheduler may use it as before.
        averager: An averager; torch's own will do, without ``module`` and ``optimizer_state``.
        module: If given, its weights and buffers are first made equal on all ranks (those of the
            group's first rank, as DDP does), and its floating buffers go along in each round. Running
            means of normalization layers are averaged, their running variances merged as the mean of
            the variances plus the variance of the means; integer buffers stay local.
        optimizer_state: What each round does with entries of the optimizer's state, such as ``{"exp_avg": "average",
            "exp_avg_sq": 6}``: ``"average"``; a number, to average them every so many rounds; ``"reset"`` to 0; or
            ``"keep"``, as without. They are averaged plainly, whatever the mixer, and never in fewer bytes.

    Returns:
        A handle with ``finish()`` and ``remove()``. As a context manager it does both at the end of its
        block; after an exception it only removes the hooks.

    Raises:
        InvalidTypeError: an argument is of the wrong type.
        InvalidValueError: the averager already serves an optimizer, which would count every step twice;
            or the optimizer shards its state and would overwrite local steps; or buffers or optimizer state would go
            along with rounds that land later or in fragments.

    Example:
        >>> with averagers.attach(optimizer, averager, module=model):
        ...     for batch, labels in data:
        ...         optimizer.zero_grad()
        ...         loss_fn(model(batch), labels).backward()
        ...         optimizer.step()
    """
    check_pair(optimizer, averager)
    actions = check_actions(optimizer_state)
    if module is not None and not isinstance(module, nn.Module):
        raise InvalidTypeError(f"module must be a torch.nn.Module or None, got {type(module).__name__}")
    if module is None and not actions:
        return Attachment(optimizer, averager, None)
    if not isinstance(averager, ScheduledAverager):
        raise InvalidTypeError(
            f"{'module' if actions == {} else 'optimizer_state'}= needs a PeriodicModelAverager or "
            "HierarchicalModelAverager of averagers, which take buffers and optimizer state along, got "
            f"{type(averager).__name__}"
        )
    content = TrainingContent(optimizer, module, actions, lambda: averager.num_rounds)
    if content.has_asides:
        averager.check_asides()
    if module is not None:
        averager.broadcast(named_state(module))
    return Attachment(optimizer, averager, content)


@final
class Attachment:
    """What `attach` returns: ends the averaging, and can finish it first.

    Attributes:
        averager: The averager.
        optimizer: The optimizer whose steps it follows.
        weight: How much the next steps count, see ``average_parameters``; set it before a step, to the number of
            samples or tokens in it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, averager: Any, content: TrainingContent | None) -> None:
        self.optimizer = optimizer
        self.averager = averager
        self.weight: float | None = None
        self._content = content
        self._scaled_step = ScaledStep(optimizer)
        self._counts = True
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        _optimizer_of[averager] = weakref.ref(optimizer)

    def finish(self) -> None:
        """End the run: average once more among all ranks, if the last step did not.

        Every rank must call this, after equally many steps.
        """
        finish = getattr(self.averager, "finish", None)
        if finish is not None:
            finish(self.params())
        else:
            average_parameters(self.params(), self.averager.process_group)

    def join(self) -> None:
        """End the run on a rank that is out of data, while others may not be: see ``averager.join``."""
        self.averager.join(self.params())

    def remove(self) -> None:
        """Take the hooks off the optimizer; nothing is communicated."""
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._scaled_step.remove()
        _optimizer_of.pop(self.averager, None)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Not after an exception: the other ranks may never come.
        try:
            if kind is None:
                self.finish()
        finally:
            self.remove()

    def __repr__(self) -> str:
        state = "" if self._hooks else ", removed"
        return f"Attachment({type(self.optimizer).__name__}, {self.averager!r}{state})"

    def params(self) -> Any:
        """Return what each round averages."""
        return self._content or self.optimizer.param_groups

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._counts = not (kwargs and is_state_initialization(optimizer, args, kwargs))
        self._scaled_step.before()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._scaled_step.after()
        if self._counts:
            if self.weight is None:
                self.averager.average_parameters(self.params())
            else:
                self.averager.average_parameters(self.params(), weight=self.weight)


def check_pair(optimizer: Any, averager: Any) -> None:
    """Raise unless ``averager`` can follow the steps of ``optimizer``."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidTypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(optimizer).__mro__):
        raise InvalidValueError(
            "optimizer is a ZeroRedundancyOptimizer: after each step it overwrites every rank's weights with the "
            "owner's, so that local steps are lost; use a plain optimizer on each rank"
        )
    if not callable(getattr(averager, "average_parameters", None)) or not isinstance(
        getattr(averager, "step", None), int
    ):
        raise InvalidTypeError(
            f"averager must be a ModelAverager, with average_parameters and step, got {type(averager).__name__}"
        )
    served = _served_by(averager)
    if served is not None:
        raise InvalidValueError(
            f"averager already follows the steps of a {type(served).__name__}, and a second optimizer would count "
            "every step twice: build an averager for each, or remove the first attachment"
        )


def _served_by(averager: Any) -> torch.optim.Optimizer | None:
    """Return the optimizer in use whose steps ``averager`` follows."""
    if averager not in _optimizer_of:
        return None
    gc.collect()  # one that nobody can reach any more still refers to itself by its hooks
    return _optimizer_of.get(averager, lambda: None)()
