"""`ModelAveragingOptimizer`: an optimizer and its averager as one optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, final

import torch

from averagers.errors import StateDictError
from averagers.training.attach import attach, check_pair

_AVERAGER_KEY = "averager"


@final
class ModelAveragingOptimizer(torch.optim.Optimizer):
    """Steps an inner optimizer, then averages its parameters, as ``averager`` decides.

    Takes the place of ``torch.distributed.optim.PostLocalSGDOptimizer`` and loads its checkpoints.
    Parameter groups and state are always the inner optimizer's own.

    Args:
        optim: The inner optimizer.
        averager: An averager; torch's own will do, without ``optimizer_state``.
        optimizer_state: What each round does with entries of the inner optimizer's state, see `attach`.

    Attributes:
        optim: The inner optimizer.
        averager: The averager.

    Raises:
        InvalidTypeError: an argument is of the wrong type.
        InvalidValueError: the averager already serves an optimizer, which would count every step twice;
            or ``optim`` shards its state and would overwrite local steps.

    Example:
        >>> optimizer = averagers.ModelAveragingOptimizer(torch.optim.AdamW(model.parameters()), averager)
        >>> loss_fn(model(batch), labels).backward()
        >>> optimizer.step()
        >>> optimizer.finish()
    """

    def __init__(
        self,
        optim: torch.optim.Optimizer,
        averager: Any,
        *,
        optimizer_state: Mapping[str, str | int] | None = None,
    ) -> None:
        check_pair(optim, averager)
        self.averager = averager
        self._inner: torch.optim.Optimizer | None = None
        # Sets up hooks and profiling; its groups are placeholders that the properties below replace.
        super().__init__([{"params": []}], {})
        self._inner = self.optim = optim
        self.defaults = optim.defaults
        self._optimizer_state = optimizer_state
        self._attachment = attach(self, averager, optimizer_state=optimizer_state)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's parameter groups."""
        return [] if self._inner is None else self._inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if self._inner is not None:
            self._inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The inner optimizer's state."""
        return {} if self._inner is None else self._inner.state

    @state.setter
    def state(self, state: Any) -> None:
        if self._inner is not None:
            self._inner.state = state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the inner optimizer, average if a round is due, and return the closure's loss."""
        return self.optim.step() if closure is None else self.optim.step(closure)

    @property
    def weight(self) -> float | None:
        """How much the next steps count, see ``average_parameters``; can be set before a step."""
        return self._attachment.weight

    @weight.setter
    def weight(self, value: float | None) -> None:
        self._attachment.weight = value

    def params(self) -> Any:
        """Return what each round averages."""
        return self._attachment.params()

    def finish(self) -> None:
        """End the run: average once more among all ranks, if the last step did not."""
        self._attachment.finish()

    def join(self) -> None:
        """End the run on a rank that is out of data, while others may not be: see ``averager.join``."""
        self._attachment.join()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as the inner optimizer does."""
        self.optim.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the inner optimizer; it is averaged from then on."""
        if self._inner is not None:
            self._inner.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state dict, with ``"averager"`` and, as in torch's wrapper, ``"step"``."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state_dict = {**self.optim.state_dict(), **self._averager_state()}
        for after in self._optimizer_state_dict_post_hooks.values():
            state_dict = after(self, state_dict) or state_dict
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned here or in torch's wrapper, or a plain optimizer's state.

        Without a step in it the averager's step becomes 0, with a ``UserWarning``; except for what
        ``torch.distributed.checkpoint.state_dict`` made, beside which the averager is loaded by itself.

        Raises:
            StateDictError: the averager's part is damaged or of another configuration; nothing was loaded.
            ValueError: the inner optimizer refuses its part; nothing was loaded.
        """
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        if "param_groups" not in state_dict or "state" not in state_dict:
            raise StateDictError("state_dict lacks 'state' or 'param_groups': give what state_dict() returned")
        averager_before = self._averager_state()
        self._load_averager(state_dict)
        try:
            inner = {name: value for name, value in state_dict.items() if name not in ("step", _AVERAGER_KEY)}
            self.optim.load_state_dict(inner)
        except BaseException:
            self._load_averager(averager_before)
            raise
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _averager_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"step": self.averager.step}
        if hasattr(self.averager, "state_dict"):
            state[_AVERAGER_KEY] = self.averager.state_dict()
        return state

    def _load_averager(self, state_dict: dict[str, Any]) -> None:
        step = state_dict.get("step", 0)
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise StateDictError(f"step in state_dict must be an int of at least 0, got {step!r}")
        if _AVERAGER_KEY in state_dict and hasattr(self.averager, "load_state_dict"):
            self.averager.load_state_dict(state_dict[_AVERAGER_KEY])
        elif "step" in state_dict:
            self.averager.step = step
        elif not _names_its_parameters(state_dict):
            self.averager.step = 0
            warnings.warn(
                "state_dict has no step of an averager, as a plain optimizer's has none: the step is 0 now, and the "
                "warm-up starts again; set averager.step to go on where the run stopped",
                UserWarning,
                stacklevel=3,
            )

    def __reduce__(self) -> Any:
        return _rebuilt, (type(self), self.optim, self.averager, self._optimizer_state)

    def __repr__(self) -> str:
        return f"ModelAveragingOptimizer({self.optim!r}, {self.averager!r})"


def _rebuilt(kind: Any, optim: torch.optim.Optimizer, averager: Any, optimizer_state: Any) -> Any:
    """Make a copy, for ``copy``."""
    return kind(optim, averager, optimizer_state=optimizer_state)


def _names_its_parameters(state_dict: dict[str, Any]) -> bool:
    """Tell whether `torch.distributed.checkpoint.state_dict` made this: parameters have names in place of numbers."""
    groups = state_dict.get("param_groups", [])
    return any(isinstance(parameter, str) for group in groups for parameter in group["params"])


PostLocalSGDOptimizer = ModelAveragingOptimizer
