"""A module's buffers in a round: running statistics are merged, other floating buffers averaged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from averagers.content import Aside, RoundContent


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

    def write(self) -> None:
        """Write the merged statistics back."""
        with torch.no_grad():
            self.mean.copy_(self.first_moment)
            self.variance.copy_((self.second_moment - self.first_moment**2).clamp_(min=0))


@final
class ModuleContent(RoundContent):
    """The parameters of an optimizer, and the floating buffers of a module.

    Args:
        optimizer: Whose parameters are averaged.
        module: Whose buffers go along; its integer buffers, such as counts of batches, stay local.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
        self._optimizer = optimizer
        self._module = module
        self._statistics: list[_RunningStatistics] = []

    def tensors(self) -> Iterator[Any]:
        """Yield the parameter groups, then the buffers by name."""
        yield from self._optimizer.param_groups
        self._statistics = list(_running_statistics(self._module))
        merged = {id(tensor) for layer in self._statistics for tensor in (layer.mean, layer.variance)}
        for name, buffer in self._module.named_buffers():
            if id(buffer) not in merged:
                yield Aside(name, buffer)
        for layer in self._statistics:
            yield Aside(f"{layer.name}.running_mean", layer.first_moment)
            yield Aside(f"{layer.name}.running_var", layer.second_moment)

    def landed(self) -> None:
        """Write the merged statistics back."""
        for layer in self._statistics:
            layer.write()
        self._statistics = []


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
