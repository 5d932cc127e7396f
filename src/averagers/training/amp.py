"""Gradient scaling without lost steps: every rank steps, also the one that saw an inf.

`torch.amp.GradScaler` skips ``optimizer.step()`` on the rank whose gradients overflowed, and the ranks'
step counters would drift apart. It calls ``step`` always on an optimizer that says that it handles the
scale itself; so the optimizer says so, and the hooks here do what the scaler would have done.
"""

from __future__ import annotations

from typing import Any, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

_SUPPORTS_SCALING = "_step_supports_amp_scaling"

# Several averagers may follow one optimizer: the last one to leave puts back what the first one found.
_handlers_of: WeakKeyDictionary[torch.optim.Optimizer, list[int]] = WeakKeyDictionary()
_supported_before: WeakKeyDictionary[torch.optim.Optimizer, bool | None] = WeakKeyDictionary()


@final
class ScaledStep:
    """Handles the scale of one optimizer around each of its steps.

    Args:
        optimizer: The optimizer that a scaler may be given.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._hidden: list[tuple[Tensor, Tensor]] = []
        if optimizer not in _handlers_of:
            _supported_before[optimizer] = optimizer.__dict__.get(_SUPPORTS_SCALING)
        _handlers_of.setdefault(optimizer, []).append(id(self))
        setattr(optimizer, _SUPPORTS_SCALING, True)

    def before(self) -> None:
        """Unscale the gradients, and hide them from the inner step if one of them is inf or NaN."""
        self.after()  # if the last step raised
        scale: Tensor | None = getattr(self._optimizer, "grad_scale", None)
        # 0 where no parameter has a gradient.
        found_inf: Tensor | int | None = getattr(self._optimizer, "found_inf", None)
        if scale is None and found_inf is None:
            return
        # The inner step must not unscale once more. The scaler deletes both attributes after it.
        self._optimizer.grad_scale = None  # type: ignore[attr-defined]
        self._optimizer.found_inf = None  # type: ignore[attr-defined]
        parameters = [
            parameter
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        if scale is not None:
            inverse = scale.double().reciprocal().float()
            for parameter in parameters:
                parameter.grad.mul_(inverse.to(parameter.grad.device))
        if found_inf is not None and float(found_inf):
            self._hidden = [(parameter, parameter.grad) for parameter in parameters]
            for parameter in parameters:
                parameter.grad = None

    def after(self) -> None:
        """Give hidden gradients back."""
        if self._hidden:
            for parameter, grad in self._hidden:
                parameter.grad = grad
            self._hidden = []

    def remove(self) -> None:
        """Leave the optimizer as it was, once nobody else handles its scale."""
        _handlers_of[self._optimizer].remove(id(self))
        if _handlers_of[self._optimizer]:
            return
        del _handlers_of[self._optimizer]
        supported_before = _supported_before.pop(self._optimizer)
        if supported_before is None:
            self._optimizer.__dict__.pop(_SUPPORTS_SCALING, None)
        else:
            setattr(self._optimizer, _SUPPORTS_SCALING, supported_before)


def is_state_initialization(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether a step only makes the optimizer's state, and is none of the training.

    `torch.distributed.checkpoint.state_dict` steps a fresh optimizer once, as ``step(closure=None)``,
    with a learning rate of 0 and gradients of 0.
    """
    return (
        bool(kwargs)
        and kwargs.get("closure", "") is None
        and len(args) <= 1
        and not optimizer.state
        and all(float(group.get("lr", 0.0)) == 0.0 for group in optimizer.param_groups)
        and not any(_has_gradient(parameter) for group in optimizer.param_groups for parameter in group["params"])
    )


def _has_gradient(parameter: Tensor) -> bool:
    return parameter.grad is not None and bool(parameter.grad.any())
