"""Mixers: what the mean of the replicas does to the anchor, and so to the weights (pure)."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import Any, final

from averagers.arguments import check_number, check_positive, check_whole_number
from averagers.errors import InvalidTypeError, InvalidValueError, StateDictError
from averagers.reduction.interface import Tensor

# Kinds of parameters that a call must give where they have no default.
_NAMED = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


class Mixer(ABC):
    """What the mean does to the weights; give it as ``mixer=``.

    Attributes:
        needs_lr: Whether it reads the inner optimizer's learning rate.
    """

    needs_lr = False

    def check_group_size(self, size: int) -> None:
        """Raise unless it works in groups of ``size`` ranks."""
        return

    def check_start(self, stand_ins: Sequence[Tensor]) -> None:
        """Raise unless it can ``start``, told by tensors of the anchor's shapes, whose values mean nothing."""
        return

    @abstractmethod
    def start(self, anchor: Sequence[Tensor]) -> Mixing:
        """Return what moves ``anchor``, tensor by tensor, at each round."""


class Mixing(ABC):
    """A mixer at work on one anchor."""

    pull: float | None = None
    """By which share of the way each replica moves to the anchor before that moves; None to take the anchor's place."""

    @abstractmethod
    def mix_(self, displacements: Sequence[Tensor], *, num_ranks: int, lrs: Sequence[float]) -> None:
        """Move the anchor.

        Args:
            displacements: The mean of the replicas minus the anchor; their memory may be used.
            num_ranks: How many ranks the mean is of.
            lrs: The inner learning rate of each tensor, where it is needed.
        """

    def settings(self) -> str:
        """Return what must be equal on all ranks, beyond the mixer's own description."""
        return ""

    def buffers(self) -> Sequence[Tensor] | None:
        """Return what it keeps for each tensor of the anchor, in its shape; None if it keeps something else."""
        return ()

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return what it keeps between rounds; copies."""

    @abstractmethod
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what it kept."""


@final
@dataclass(frozen=True)
class Assign(Mixer):
    """The mean becomes the weights: plain averaging, the default.

    Example:
        >>> averager = averagers.PeriodicModelAverager(4, mixer=averagers.Assign())
    """

    def start(self, anchor: Sequence[Tensor]) -> Mixing:
        """Move the anchor to the mean."""
        return _AssignMixing(anchor)


@final
class _AssignMixing(Mixing):
    """Keeps nothing but the anchor."""

    def __init__(self, anchor: Sequence[Tensor]) -> None:
        self._anchor = anchor

    def mix_(self, displacements: Sequence[Tensor], *, num_ranks: int, lrs: Sequence[float]) -> None:
        for anchor, displacement in zip(self._anchor, displacements, strict=True):
            anchor.add_(displacement)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        return


@final
@dataclass(frozen=True)
class Outer(Mixer):
    """An outer optimizer steps the anchor, with anchor minus mean as its gradient; the weights become the anchor.

    Costs an anchor in float32, the optimizer's state, and as much as the anchor once more while a round lasts. Inner
    optimizers keep their state. Where parameters are sharded, each rank's optimizer sees its shards.

    Args:
        factory: Makes the optimizer from a list of tensors, such as ``functools.partial(torch.optim.SGD, lr=0.7)``. It
            is called once more at the averager's first step, to see that it can.

    Raises:
        InvalidTypeError: ``factory`` cannot be called.

    References:
        Douillard et al., `DiLoCo <https://arxiv.org/abs/2311.08105>`_; Chen and Huo, `BMUF
        <https://doi.org/10.1109/ICASSP.2016.7472805>`_.

    Example:
        >>> outer = averagers.Outer(functools.partial(torch.optim.AdamW, lr=1e-3))
        >>> averager = averagers.PeriodicModelAverager(50, mixer=outer)
    """

    factory: Callable[[list[Any]], Any]

    def __post_init__(self) -> None:
        if not callable(self.factory):
            raise InvalidTypeError(
                "factory must make an optimizer from a list of tensors, such as functools.partial(torch.optim.SGD, "
                f"lr=0.7), got {self.factory!r} of type {type(self.factory).__name__}"
            )

    def __repr__(self) -> str:
        name = getattr(self.factory, "func", self.factory)
        settings = getattr(self.factory, "keywords", {})
        shown = [getattr(name, "__name__", type(name).__name__), *(f"{key}={one!r}" for key, one in settings.items())]
        return f"Outer({', '.join(shown)})"

    def check_start(self, stand_ins: Sequence[Tensor]) -> None:
        """Make an optimizer for nothing, long before the first round needs one."""
        self._optimizer_of(stand_ins)

    def start(self, anchor: Sequence[Tensor]) -> Mixing:
        """Make the optimizer."""
        return _OuterMixing(self._optimizer_of(anchor), anchor)

    def _optimizer_of(self, tensors: Sequence[Tensor]) -> Any:
        try:
            optimizer = self.factory(list(tensors))
        except Exception as error:
            raise InvalidValueError(
                f"factory of mixer={self!r} must make an optimizer from a list of tensors, and raised "
                f"{type(error).__name__}: {error}"
            ) from error
        if any(not hasattr(optimizer, name) for name in ("param_groups", "step", "state_dict", "load_state_dict")):
            raise InvalidTypeError(
                f"factory of mixer={self!r} must return an optimizer, such as torch.optim.SGD(tensors, lr=0.7), got "
                f"{optimizer!r} of type {type(optimizer).__name__}"
            )
        if any(
            one.default is one.empty and one.kind in _NAMED for one in signature(optimizer.step).parameters.values()
        ):
            raise InvalidValueError(
                f"factory of mixer={self!r} must return an optimizer whose step() can do without a closure, because "
                f"there is no loss to compute again, got {type(optimizer).__name__}"
            )
        return optimizer


@final
class _OuterMixing(Mixing):
    """Steps an optimizer whose parameters are the anchor."""

    def __init__(self, optimizer: Any, anchor: Sequence[Tensor]) -> None:
        self._optimizer = optimizer
        self._anchor = anchor

    def mix_(self, displacements: Sequence[Tensor], *, num_ranks: int, lrs: Sequence[float]) -> None:
        for param, displacement in zip(self._anchor, displacements, strict=True):
            param.grad = displacement.neg_()
        self._optimizer.step()
        for param in self._anchor:
            param.grad = None

    def settings(self) -> str:
        groups = [
            {name: value for name, value in group.items() if name != "params"} for group in self._optimizer.param_groups
        ]
        return f"{type(self._optimizer).__name__} with {groups}"

    def buffers(self) -> None:
        return None

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = _copied(self._optimizer.state_dict())
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        try:
            self._optimizer.load_state_dict(_copied(dict(state_dict)))
        except (KeyError, TypeError, ValueError) as error:
            raise StateDictError(f"the outer optimizer's state in state_dict does not fit: {error}") from None


class _Momentum(Mixer):
    """What mixers with a momentum have in common."""

    lr: float
    momentum: float
    num_rounds: int | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "lr", check_positive("lr", self.lr))
        object.__setattr__(self, "momentum", _check_momentum(self.momentum, self.num_rounds))

    def start(self, anchor: Sequence[Tensor]) -> Mixing:
        """Start without momentum."""
        return _MomentumMixing(self, anchor)


@final
@dataclass(frozen=True)
class Nesterov(_Momentum):
    """Outer SGD with Nesterov's momentum on anchor minus mean: DiLoCo, and BMUF.

    ``buf = momentum * buf + g``, then ``anchor -= lr * (g + momentum * buf)``: what `Outer` does with
    ``torch.optim.SGD(nesterov=True)``. From scratch it takes many rounds to pay, about ``3 / (1 - momentum)``: start
    after a warm-up of data parallel, or take a smaller momentum. Costs an anchor and ``buf``, eight bytes an
    element, and four more while a round lasts.

    Args:
        lr: The outer learning rate, over 0.
        momentum: From 0 to below 1.
        num_rounds: How many rounds the run has, for a warning where they are too few; None if unknown.

    Raises:
        InvalidTypeError, InvalidValueError: an argument breaks a rule.

    References:
        Douillard et al., `DiLoCo <https://arxiv.org/abs/2311.08105>`_; Chen and Huo, `BMUF
        <https://doi.org/10.1109/ICASSP.2016.7472805>`_.

    Example:
        >>> averager = averagers.PeriodicModelAverager(50, mixer=averagers.Nesterov(lr=0.7, momentum=0.9))
    """

    lr: float = 0.7
    momentum: float = 0.9
    num_rounds: int | None = field(default=None, kw_only=True, compare=False, repr=False)


@final
@dataclass(frozen=True)
class SlowMo(_Momentum):
    """Slow momentum: ``u = momentum * u + (anchor - mean) / gamma``, then ``anchor -= lr * gamma * u``.

    ``gamma`` is the inner learning rate of the round, read from the parameter groups: give
    ``optimizer.param_groups`` as ``params``, as `attach` does. Momentum is in units of steps, so that it stays right
    when the learning rate changes. At a learning rate of 0 the mean is taken as it is, and ``u`` stays.
    Costs an anchor and ``u``, eight bytes an element, and four more while a round lasts.

    Args:
        momentum: From 0 to below 1; 0.4 to 0.8 are usual.
        lr: Of the slow step, over 0.
        num_rounds: How many rounds the run has, for a warning where they are too few; None if unknown.

    Raises:
        InvalidTypeError, InvalidValueError: an argument breaks a rule.

    References:
        Wang et al., `SlowMo <https://arxiv.org/abs/1910.00643>`_.

    Example:
        >>> averager = averagers.PeriodicModelAverager(12, mixer=averagers.SlowMo(momentum=0.7))
        >>> handle = averagers.attach(optimizer, averager)
    """

    momentum: float
    lr: float = 1.0
    num_rounds: int | None = field(default=None, kw_only=True, compare=False, repr=False)
    needs_lr = True


@final
class _MomentumMixing(Mixing):
    """Keeps a buffer for each tensor."""

    def __init__(self, mixer: _Momentum, anchor: Sequence[Tensor]) -> None:
        self._mixer = mixer
        self._anchor = anchor
        self._buffers = [one.new_zeros(one.shape) for one in anchor]

    def mix_(self, displacements: Sequence[Tensor], *, num_ranks: int, lrs: Sequence[float]) -> None:
        lr, momentum = self._mixer.lr, self._mixer.momentum
        for anchor, buffer, displacement, gamma in zip(self._anchor, self._buffers, displacements, lrs, strict=True):
            if isinstance(self._mixer, Nesterov):
                nesterov_(anchor, displacement.neg_(), buffer, lr=lr, momentum=momentum)
            elif gamma:
                slow_momentum_(anchor, displacement.neg_(), buffer, lr=lr, momentum=momentum, gamma=gamma)
            else:
                anchor.add_(displacement)

    def buffers(self) -> Sequence[Tensor]:
        return self._buffers

    def state_dict(self) -> dict[str, Any]:
        return {"buffers": [buffer.clone() for buffer in self._buffers]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        try:
            for buffer, saved in zip(self._buffers, state_dict["buffers"], strict=True):
                buffer.copy_(saved)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise StateDictError(f"the momentum in state_dict does not fit: {error}") from None


def nesterov_(anchor: Tensor, pseudo_grad: Tensor, momentum_buffer: Tensor, *, lr: float, momentum: float) -> None:
    """One outer step: ``buf = momentum * buf + g``, then ``anchor -= lr * (g + momentum * buf)``; writes over ``g``."""
    momentum_buffer.mul_(momentum).add_(pseudo_grad)
    anchor.add_(pseudo_grad.add_(momentum_buffer, alpha=momentum), alpha=-lr)


def slow_momentum_(
    anchor: Tensor, pseudo_grad: Tensor, momentum_buffer: Tensor, *, lr: float, momentum: float, gamma: float
) -> None:
    """One slow step: ``u = momentum * u + g / gamma``, then ``anchor -= lr * gamma * u``."""
    momentum_buffer.mul_(momentum).add_(pseudo_grad, alpha=1 / gamma)
    anchor.add_(momentum_buffer, alpha=-lr * gamma)


@final
@dataclass(frozen=True)
class Elastic(Mixer):
    """Elastic averaging: replicas and a common center pull each other, ``e_i = alpha * (x_i - center)``.

    ``x_i -= e_i`` and ``center += sum of e_i``: replicas stay apart, and the center, which is the anchor, is the model
    to evaluate; ``finish`` puts it in place on every rank. Costs an anchor, four bytes an element, and as much once
    more while a round lasts.

    Args:
        alpha: The pull, from 0 to 1 / group size; 0.9 / group size is usual.

    Raises:
        InvalidTypeError, InvalidValueError: an argument breaks a rule.

    References:
        Zhang et al., `Deep learning with elastic averaging SGD <https://arxiv.org/abs/1412.6651>`_.

    Example:
        >>> averager = averagers.PeriodicModelAverager(10, mixer=averagers.Elastic(alpha=0.225))
    """

    alpha: float

    def __post_init__(self) -> None:
        alpha = check_number("alpha", self.alpha)
        if not 0 <= alpha <= 1:
            raise InvalidValueError(f"alpha must be from 0 to 1 / group size, got {self.alpha}")
        object.__setattr__(self, "alpha", alpha)

    def check_group_size(self, size: int) -> None:
        """Raise if the center would be pulled beyond the mean."""
        if self.alpha * size > 1:
            raise InvalidValueError(
                f"alpha of Elastic must be at most 1 / group size, got {self.alpha} with groups of {size}: more pulls "
                "the center beyond the mean of the replicas"
            )

    def start(self, anchor: Sequence[Tensor]) -> Mixing:
        """Keep nothing but the anchor."""
        return _ElasticMixing(self.alpha, anchor)


@final
class _ElasticMixing(Mixing):
    """Moves the center."""

    def __init__(self, alpha: float, anchor: Sequence[Tensor]) -> None:
        self.pull = alpha
        self._alpha = alpha
        self._anchor = anchor

    def mix_(self, displacements: Sequence[Tensor], *, num_ranks: int, lrs: Sequence[float]) -> None:
        for anchor, displacement in zip(self._anchor, displacements, strict=True):
            anchor.add_(displacement, alpha=num_ranks * self._alpha)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        return


def _check_momentum(momentum: float, num_rounds: int | None) -> float:
    """Return a checked momentum as a float; warn where the run is too short for it."""
    number = check_number("momentum", momentum)
    if not 0 <= number < 1:
        raise InvalidValueError(f"momentum must be from 0 to below 1, got {momentum}")
    if num_rounds is None:
        return number
    needed = 3 / (1 - momentum)
    if check_whole_number("num_rounds", num_rounds, minimum=1) < needed:
        warnings.warn(
            f"a momentum of {momentum} takes about {needed:.0f} rounds to pay, and there are {num_rounds}: take a "
            "smaller momentum, or average more often",
            UserWarning,
            stacklevel=4,
        )
    return number


def _copied(state: Any) -> Any:
    """Return a copy of nested dicts and lists, tensors included."""
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    if isinstance(state, list):
        return [_copied(value) for value in state]
    return state.clone() if hasattr(state, "clone") else state
