"""What goes along in a round: a module's buffers, whose running statistics are merged, and an optimizer's state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from averagers.content import Aside, RoundContent
from averagers.errors import InvalidTypeError, InvalidValueError


@final
@dataclass
class _RunningStatistics:
    """One normalization layer's running mean and variance, as moments that a plain mean merges.

    The variance over all replicas' data is the mean of the variances plus the variance of the means,
    which is the mean of ``variance + mean ** 2`` minus the square of the mean. In float64, because
    both terms may be far larger than their difference.
    """

    name: str
    mean: Tensor
    variance: Tensor

    def __post_init__(self) -> None:
        # Written by the round, which is in no inference mode.
        with torch.inference_mode(False), torch.no_grad():
            self.first_moment = self.mean.double()
            self.second_moment = self.variance.double() + self.first_moment**2

    @property
    def own(self) -> tuple[Tensor, Tensor]:
        """The layer's own tensors."""
        return self.mean, self.variance

    def write(self) -> None:
        """Write the merged statistics back."""
        with torch.no_grad():
            self.mean.copy_(self.first_moment)
            self.variance.copy_((self.second_moment - self.first_moment**2).clamp_(min=0))


@final
class TrainingContent(RoundContent):
    """The parameters of an optimizer, and what goes along: buffers of a module, entries of the optimizer's state.

    Args:
        optimizer: Whose parameters are averaged.
        module: Whose floating buffers go along; its integer buffers, such as counts of batches, stay local. None for
            none.
        optimizer_state: What to do with entries of the optimizer's state, see `attach`.
        num_rounds: Returns how many rounds of the schedule there were.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        module: nn.Module | None,
        optimizer_state: Mapping[str, str | int],
        num_rounds: Callable[[], int],
    ) -> None:
        self._is_last = False
        self._optimizer = optimizer
        self._module = module
        self._actions = dict(optimizer_state)
        self._num_rounds = num_rounds
        self._statistics: list[_RunningStatistics] = []
        self._before: list[tuple[Tensor, Tensor]] = []

    def tensors(self) -> Iterator[Any]:
        """Yield the parameter groups, then entries of the optimizer's state, then the buffers by name."""
        yield from self._optimizer.param_groups
        for name, action in self._actions.items():
            if action == "average" or (isinstance(action, int) and (self._is_last or not self._num_rounds() % action)):
                for position, tensor in self._entries(name):
                    yield Aside(f"{name} of parameter {position}", tensor)
        self._statistics = [] if self._module is None else list(_running_statistics(self._module))
        merged = {id(tensor) for layer in self._statistics for tensor in (layer.mean, layer.variance)}
        for name, buffer in self._module.named_buffers() if self._module is not None else ():
            if id(buffer) not in merged:
                yield Aside(name, buffer)
        for layer in self._statistics:
            yield Aside(f"{layer.name}.running_mean", layer.first_moment)
            yield Aside(f"{layer.name}.running_var", layer.second_moment)

    @property
    def has_asides(self) -> bool:
        """Whether anything goes along with the parameters, in some round."""
        buffers = () if self._module is None else self._module.buffers()
        is_state_averaged = any(action not in ("keep", "reset") for action in self._actions.values())
        return is_state_averaged or any(buffer.is_floating_point() or buffer.is_complex() for buffer in buffers)

    def begin(self, *, is_last: bool) -> None:
        """Note whether the round ends the run, and everything that is ever averaged is."""
        self._is_last = is_last

    def taken_back(self) -> None:
        """Put this rank's own statistics back."""
        for tensor, before in self._before:
            with torch.no_grad():
                tensor.copy_(before)
        self._before = []

    def landed(self, *, is_kept: bool) -> None:
        """Write the merged statistics back, and reset what is to be."""
        self._before = [] if is_kept else [(one, one.clone()) for layer in self._statistics for one in layer.own]
        for layer in self._statistics:
            layer.write()
        self._statistics = []
        for name, action in self._actions.items():
            if action == "reset" and is_kept:
                for _, tensor in self._entries(name):
                    tensor.zero_()

    def _entries(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """Yield the position of each parameter whose state has this entry, and the entry.

        Raises:
            InvalidValueError: there is state, but no such entry.
        """
        states = self._optimizer.state
        params = [param for group in self._optimizer.param_groups for param in group["params"]]
        known = dict.fromkeys(key for param in params for key in states.get(param, ()))
        if known and name not in known:
            raise InvalidValueError(
                f"optimizer_state must name entries of the {type(self._optimizer).__name__}'s state, which are "
                f"{', '.join(map(str, known))}, got {name!r}"
            )
        for position, param in enumerate(params):
            tensor = states.get(param, {}).get(name)
            if isinstance(tensor, Tensor):
                yield position, tensor


def check_actions(optimizer_state: object) -> dict[str, str | int]:
    """Return what to do with entries of an optimizer's state, if it says so in a way that is known.

    Raises:
        InvalidTypeError: it is not a dict.
        InvalidValueError: an action is none of those there are.
    """
    if optimizer_state is None:
        return {}
    if not isinstance(optimizer_state, Mapping):
        raise InvalidTypeError(
            "optimizer_state must be a dict such as {'exp_avg': 'average', 'exp_avg_sq': 6}, got "
            f"{optimizer_state!r} of type {type(optimizer_state).__name__}"
        )
    for name, action in optimizer_state.items():
        is_period = isinstance(action, int) and not isinstance(action, bool) and action >= 1
        if not is_period and action not in ("average", "keep", "reset"):
            raise InvalidValueError(
                f"optimizer_state[{name!r}] must be 'average', 'keep', 'reset', or every how many rounds to average, a "
                f"whole number of at least 1, got {action!r}"
            )
    return dict(optimizer_state)


def named_state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and buffer of ``module`` with its name, each once."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def _running_statistics(module: nn.Module) -> Iterator[_RunningStatistics]:
    for name, layer in module.named_modules():
        mean, variance = getattr(layer, "running_mean", None), getattr(layer, "running_var", None)
        if isinstance(mean, Tensor) and isinstance(variance, Tensor) and _are_moments(mean, variance):
            yield _RunningStatistics(name, mean, variance)


def _are_moments(mean: Tensor, variance: Tensor) -> bool:
    return mean.is_floating_point() and variance.is_floating_point() and mean.shape == variance.shape
