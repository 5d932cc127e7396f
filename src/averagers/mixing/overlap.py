"""When the mean lands: at once, or some steps later, while training goes on (pure)."""

from __future__ import annotations

import threading
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from averagers.arguments import check_number, check_whole_number
from averagers.errors import InvalidTypeError, InvalidValueError, StateDictError
from averagers.events import RoundReport
from averagers.reduction.anchor import flat_copy
from averagers.reduction.groups import Route
from averagers.reduction.interface import Tensor
from averagers.reduction.reducer import Reduced, Staged


class Overlap(ABC):  # noqa: B024 - what users may give
    """When the mean lands; give it as ``overlap=``."""


@final
@dataclass(frozen=True)
class Delayed(Overlap):
    """The round is sent, training goes on, and the mean lands some steps later.

    At landing the weights become ``keep * weights + (1 - keep) * mean``: 0 discards what this rank did meanwhile. With
    ``carry`` they become the mean plus that progress. With a mixer the anchor it moved takes the mean's place. Costs a
    copy of what travels, and with ``carry`` one of the weights, while the round is under way; and process groups of its
    own. A round that is still under way when the next one of its level, or of a level above, begins lands first;
    ``finish`` lands all. A process that ends before waits for what is under way, at most until its timeout.

    Args:
        steps: From sending to landing; 0 lands at once.
        keep: The share of this rank's weights, from 0 to 1.
        carry: Keep this rank's progress instead; then ``keep`` must be left out.

    Raises:
        InvalidTypeError, InvalidValueError: an argument breaks a rule.

    References:
        Douillard et al., `Streaming DiLoCo <https://arxiv.org/abs/2501.18512>`_.

    Example:
        >>> averager = averagers.PeriodicModelAverager(50, overlap=averagers.Delayed(steps=5, keep=0.5))
    """

    steps: int
    keep: float = 0.5
    carry: bool = False

    def __post_init__(self) -> None:
        check_whole_number("steps", self.steps, minimum=0)
        keep = check_number("keep", self.keep)
        if not 0 <= keep <= 1:
            raise InvalidValueError(f"keep must be from 0 to 1, got {self.keep}")
        object.__setattr__(self, "keep", keep)
        if not isinstance(self.carry, bool):
            raise InvalidTypeError(f"carry must be True or False, got {self.carry!r}")
        if self.carry and keep != type(self).keep:
            raise InvalidValueError(f"keep must be left out with carry=True, which keeps all progress, got {self.keep}")


@final
class Flight:
    """A round under way.

    Attributes:
        unit: Which fragment of which level, as the averager counts them.
        sent_at: The step at which it was sent.
        land_at: The step at which it lands.
        digest: Of the tensors, without their names.
        staged: What travels; the mean once it has ended.
        sent: The weights as they were sent; None where nobody will ask.
        lrs: The learning rates then.
        route: How it travels.
        report: Tells of it.
    """

    def __init__(
        self,
        unit: int,
        *,
        sent_at: int,
        land_at: int,
        digest: bytes,
        staged: Staged,
        sent: Sequence[Tensor] | None,
        lrs: Sequence[float | None],
        route: Route | None,
        report: RoundReport | None,
    ) -> None:
        self.unit = unit
        self.sent_at = sent_at
        self.land_at = land_at
        self.digest = digest
        self.staged = staged
        self.sent = sent
        self.lrs = lrs
        self.route = route
        self.report = report
        self._thread: threading.Thread | None = None
        self._reduced = Reduced(0, None)
        self._error: BaseException | None = None

    def begin(self, work: Callable[[], Reduced], *, after: Flight | None) -> None:
        """Do ``work`` on a thread of its own, once ``after`` has ended: in the same order on every rank."""

        def run() -> None:
            if after is not None:
                after.join()
            try:
                self._reduced = work()
            except BaseException as error:  # raised where it lands
                self._error = error

        # Not a daemon: one that still communicates when the interpreter goes would abort the process.
        self._thread = threading.Thread(target=run, name="averagers-round", daemon=False)
        self._thread.start()

    def wait(self) -> Reduced:
        """Return when it has ended; raises what it raised."""
        self.join()
        if self._error is not None:
            raise self._error
        return self._reduced

    def state_dict(self) -> dict[str, Any]:
        """Wait until it has ended, and return all that its landing needs; copies."""
        self.wait()
        return {
            "unit": self.unit,
            "sent_at": self.sent_at,
            "land_at": self.land_at,
            "digest": self.digest.hex(),
            "values": [one.clone() for one in self.staged.values],
            "sent": None if self.sent is None else [one.clone() for one in self.sent],
            "lrs": list(self.lrs),
        }

    @classmethod
    def all_loaded(cls, states: Any, num_units: int) -> list[Flight]:
        """Return the rounds, ended, that ``states`` has copies of.

        Raises:
            StateDictError: an entry is damaged.
        """
        if not isinstance(states, list):
            raise StateDictError(f"flights in state_dict must be a list, got {states!r}")
        return [cls.loaded(state, num_units) for state in states]

    @classmethod
    def loaded(cls, state_dict: Mapping[str, Any], num_units: int) -> Flight:
        """Return the round, ended, that ``state_dict`` has copies of.

        Raises:
            StateDictError: an entry is damaged.
        """
        try:
            unit, sent_at, land_at = (
                check_whole_number(name, state_dict[name], minimum=0) for name in ("unit", "sent_at", "land_at")
            )
            if unit >= num_units:
                raise InvalidValueError(f"unit must be below {num_units}, got {unit}")
            sent = state_dict["sent"]
            return cls(
                unit,
                sent_at=sent_at,
                land_at=land_at,
                digest=bytes.fromhex(state_dict["digest"]),
                staged=Staged([flat_copy(one) for one in state_dict["values"]]),
                sent=None if sent is None else [one.clone() for one in sent],
                lrs=list(state_dict["lrs"]),
                route=None,
                report=None,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StateDictError(f"flights in state_dict is damaged: {error!r}") from None

    def join(self) -> None:
        """Return when it has ended, however it did."""
        if self._thread is not None:
            self._thread.join()
