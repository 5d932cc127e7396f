"""What a round carries: the caller's tensors, or more than that (pure)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, NamedTuple, final


class Aside(NamedTuple):
    """A tensor that goes along with the parameters: it is averaged plainly, whatever is done with them."""

    name: str
    tensor: Any


class RoundContent(ABC):
    """What a round carries, where that is more than a list of tensors.

    May be given in place of ``params``.
    """

    @abstractmethod
    def tensors(self) -> Iterable[Any]:
        """Return what ``params`` could be; called when a round begins, and to check it at the first call."""

    def begin(self, *, is_last: bool) -> None:
        """Called before ``tensors``.

        Args:
            is_last: The round ends the run.
        """
        return

    @abstractmethod
    def landed(self, *, is_kept: bool) -> None:
        """Called when the tensors hold their mean.

        Args:
            is_kept: It stays; else ``taken_back`` is called later.
        """

    def taken_back(self) -> None:
        """Called when the tensors hold again what they did before."""
        return


@final
class _Tensors(RoundContent):
    """Just the caller's ``params``."""

    def __init__(self, params: Iterable[Any]) -> None:
        self._params = params

    def tensors(self) -> Iterable[Any]:
        return self._params

    def landed(self, *, is_kept: bool) -> None:
        return


def as_content(params: Iterable[Any] | RoundContent) -> RoundContent:
    """Return ``params`` as what a round carries."""
    return params if isinstance(params, RoundContent) else _Tensors(params)
