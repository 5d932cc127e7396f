"""`ModelAverager`: what all averagers have in common."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, NoReturn

from averagers.arguments import check_whole_number
from averagers.reduction.framework import Framework


class ModelAverager(ABC):
    """Base class of all model averagers; subclass it to write one of your own.

    Args:
        process_group: The ranks that average; None means all of them.

    Attributes:
        process_group: The process group given, or the default one.

    Raises:
        NotInitializedError: ``torch.distributed.init_process_group`` was not called.
        InvalidTypeError: ``process_group`` is not a process group.

    Example:
        >>> class EveryStep(averagers.ModelAverager):
        ...     def average_parameters(self, params):
        ...         averagers.average_parameters(params, self.process_group)
        ...         self.step += 1
        >>> EveryStep().average_parameters(model.parameters())
    """

    def __init__(self, process_group: Any = None) -> None:
        self._framework = self._framework_of(process_group)
        self.process_group = self._framework.groups.resolve(process_group)
        self._step = 0

    @property
    def step(self) -> int:
        """How many calls of ``average_parameters`` have returned; can be set, to resume."""
        return self._step

    @step.setter
    def step(self, value: int) -> None:
        self._step = check_whole_number("step", value, minimum=0)

    @abstractmethod
    def average_parameters(self, params: Iterable[Any]) -> None:
        """Average ``params`` if a round is due, and count the step."""

    @classmethod
    def _framework_of(cls, process_group: Any) -> Framework:
        """Return what makes groups of ``process_group``, and works on the tensors."""
        own: Framework | None = getattr(process_group, "averagers_framework", None)
        return cls._default_framework() if own is None else own

    @classmethod
    def _default_framework(cls) -> Framework:
        from averagers.reduction.pytorch import PYTORCH

        return PYTORCH

    def __copy__(self) -> Any:
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        for name, value in self.__dict__.items():
            is_shared = name in ("process_group", "_framework")
            twin.__dict__[name] = value if is_shared else copy.deepcopy(value, memo)
        return twin

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled, because its process groups belong to this process: "
            "save its state_dict() and load that into a new one"
        )
