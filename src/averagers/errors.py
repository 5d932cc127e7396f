"""The exceptions that averagers raises, in one tree.

::

    AveragersError
    ├── InvalidValueError      (ValueError)    an argument's value breaks a rule
    │   └── StateDictError                     a state dict does not fit this averager
    ├── InvalidTypeError       (TypeError)     an argument is of the wrong type
    │   └── UnsupportedTensorError             a tensor that cannot be averaged
    ├── NotInitializedError    (RuntimeError)  no process group to work in
    ├── ClosedError            (RuntimeError)  the averager was closed, or a round failed midway
    ├── DisagreementError      (RuntimeError)  the ranks do not agree on a round
    ├── RoundFailedError       (RuntimeError)  a round did not end: a rank died or never came
    └── MissingDependencyError (ImportError)   an optional package is not installed
"""

from __future__ import annotations

from collections.abc import Sequence


class AveragersError(Exception):
    """Base class of every exception that averagers raises on purpose."""


class InvalidValueError(AveragersError, ValueError):
    """An argument's value breaks a rule; the message names argument, value and rule."""


class StateDictError(InvalidValueError):
    """A state dict is malformed, or was saved by an averager with another configuration."""


class InvalidTypeError(AveragersError, TypeError):
    """An argument is of the wrong type; the message names argument, type and position."""


class UnsupportedTensorError(InvalidTypeError):
    """A tensor of a kind that cannot be averaged in place: sparse, float8, DTensor and others."""


class NotInitializedError(AveragersError, RuntimeError):
    """There is no process group: ``torch.distributed.init_process_group`` was not called."""


class ClosedError(AveragersError, RuntimeError):
    """The averager was closed, or a round failed after it had begun to change weights."""


class DisagreementError(AveragersError, RuntimeError):
    """The ranks of a group do not agree on what to average; every one of them raises this."""


class RoundFailedError(AveragersError, RuntimeError):
    """A round did not end within the timeout.

    Attributes:
        step: The averager's step at the round; None while an averager is being built.
        level: The level of the hierarchy; None while an averager is being built.
        missing_ranks: The global ranks that did not arrive, in ascending order.
    """

    def __init__(
        self,
        message: str,
        *,
        step: int | None = None,
        level: int | None = None,
        missing_ranks: Sequence[int] = (),
    ) -> None:
        super().__init__(message)
        self.step = step
        self.level = level
        self.missing_ranks = tuple(missing_ranks)


class MissingDependencyError(AveragersError, ImportError):
    """An optional package is not installed; the message says what to type."""
