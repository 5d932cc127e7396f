"""The engine: decides, agrees, averages, tells, counts; the averagers fill in when and with whom."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from averagers.arguments import check_seconds, check_whole_number
from averagers.content import RoundContent, as_content
from averagers.errors import ClosedError, DisagreementError, InvalidTypeError, StateDictError
from averagers.events import Announcer, Observer, RoundReport
from averagers.hierarchy import Hierarchy
from averagers.reduction.interface import Framework, Group, Selection
from averagers.safety.agreement import Statement, agree, format_ranks
from averagers.safety.failure import explain_failure
from averagers.schedule import Schedule


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
        self.process_group = self._framework().groups.resolve(process_group)
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
    def _framework(cls) -> Framework:
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
            twin.__dict__[name] = value if name == "process_group" else copy.deepcopy(value, memo)
        return twin

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled, because its process groups belong to this process: "
            "save its state_dict() and load that into a new one"
        )


class ScheduledAverager(ModelAverager):
    """The engine: decides, agrees, averages, tells, counts. Use one of its subclasses.

    Args:
        process_group: The ranks that average; None means all of them.
        schedule: When to average.
        hierarchy: With whom at each level; None for one level of all ranks.
        configuration: What must be equal on all ranks, and in a checkpoint that is loaded.
        bucket_bytes: Most bytes of a bucket; about four buckets of memory are used on top of the model, for
            16-bit floats up to twelve.
        timeout_s: After how many seconds a round fails; None for the process group's own timeout.
        observers: Called with each event of a round, see `averagers.events`.
        measure_drift: Measure the replicas' distance from the mean in each round, for the observers;
            costs a pass over the weights and one more small message.
    """

    def __init__(
        self,
        process_group: Any,
        schedule: Schedule,
        hierarchy: Hierarchy | None,
        configuration: Mapping[str, Any],
        *,
        bucket_bytes: int,
        timeout_s: float | None,
        observers: Iterable[Observer],
        measure_drift: bool,
    ) -> None:
        check_whole_number("bucket_bytes", bucket_bytes, minimum=1)
        self._timeout_s = check_seconds("timeout_s", timeout_s)
        self._announcer = Announcer(observers)
        if not isinstance(measure_drift, bool):
            raise InvalidTypeError(f"measure_drift must be True or False, got {measure_drift!r}")
        super().__init__(process_group)
        self._schedule = schedule
        self._hierarchy = hierarchy
        self._configuration = dict(configuration)
        self._measure_drift = measure_drift
        self._bucket_bytes = bucket_bytes
        self._reducer = self._framework().new_reducer(bucket_bytes)
        self._checked_params = False
        self._once_trainable: set[int] = set()
        self._refusal: str | None = None
        self._is_closed = False
        self._level_groups: list[Group] = []
        self._open_groups()

    @property
    def warmup_steps(self) -> int:
        """How many steps come before the first round may be due."""
        return self._schedule.warmup_steps

    def average_parameters(self, params: Iterable[Any]) -> None:
        """Average ``params`` in place if a round is due at this step, and count the step.

        Every rank of the process group must call this equally often. The first call reads and checks
        ``params`` even where no round is due.

        Args:
            params: ``model.parameters()``, ``model.named_parameters()``, ``optimizer.param_groups`` or
                any iterable of tensors, named or not. Floating and complex tensors are averaged,
                except parameters that have never been trainable.

        Raises:
            InvalidTypeError: ``params`` is none of those; nothing was sent.
            UnsupportedTensorError: a tensor cannot be averaged in place; nothing was sent.
            DisagreementError: the ranks do not agree on the step or on the tensors; nothing was averaged.
            RoundFailedError: a rank died, or did not come within the timeout.
            ClosedError: the averager was closed, or a round failed before.
        """
        if self._refusal is not None:
            raise ClosedError(self._refusal)
        round_ = self._schedule.due(self._step)
        if round_ is not None or not self._checked_params:
            content = as_content(params)
            selection = None if self._checked_params else self._select(content)
            if round_ is not None:
                self._run_round(content, selection, round_.level, "average_parameters")
        self._step += 1

    def finish(self, params: Iterable[Any]) -> None:
        """End a run: average once more among all ranks, if the last step did not.

        Afterwards all replicas are one model. Does not count as a step. Every rank must call this,
        after equally many steps; raises what ``average_parameters`` raises.

        Args:
            params: As for ``average_parameters``.
        """
        self._refuse_if_unusable()
        last = self._schedule.due(self._step - 1) if self._step else None
        content = as_content(params)
        selection = self._select(content)
        if self._is_alone:
            return
        # Two levels of one size share their group.
        is_one_model = last is not None and self._level_groups[last.level] is self._level_groups[-1]
        self._run_round(content, selection, self._top, "finish", only_agree=is_one_model)

    def broadcast(self, tensors: Iterable[tuple[str, Any]]) -> None:
        """Replace tensors of any dtype by those of the process group's first rank, in place.

        Every rank must call this. Does not count as a step.

        Args:
            tensors: ``(name, tensor)`` pairs, such as ``model.state_dict().items()``.
        """
        self._refuse_if_unusable()
        selection = self._reducer.select_all(tensors)
        if not self._is_alone:
            with self._together(self._level_groups[-1], self._top, "broadcast", selection):
                self._reducer.broadcast_(selection, self._level_groups[-1])

    @contextmanager
    def averaged(self, params: Iterable[Any]) -> Iterator[None]:
        """Put the mean of all replicas in place, for evaluation or saving; each rank's own values come back.

        The mean is a round among all ranks, outside the schedule, which every rank must enter. The
        values come back on an exception too. Costs a copy of ``params`` while it lasts.

        Args:
            params: As for ``average_parameters``; give buffers too if evaluation reads them.

        Example:
            >>> with averager.averaged(model.parameters()):
            ...     torch.save(model.state_dict(), path)
        """
        self._refuse_if_unusable()
        content = as_content(params)
        selection = self._reducer.select(content.tensors(), set(self._once_trainable))
        if self._is_alone:
            yield
            return
        snapshot = self._reducer.snapshot(selection)
        try:
            self._run_round(content, selection, self._top, "averaged")
            yield
        finally:
            self._reducer.restore_(selection, snapshot)

    def close(self) -> None:
        """Release the process groups and buffers; the averager cannot be used any more."""
        self._release_groups()
        self._reducer.close()
        self._is_closed = True
        self._refusal = f"this {type(self).__name__} was closed: build a new one"

    def state_dict(self) -> dict[str, Any]:
        """Return the step, the configuration, and which parameters were ever trainable."""
        return {
            "step": self._step,
            "configuration": dict(self._configuration),
            "once_trainable": sorted(self._once_trainable),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` returned; also makes an averager usable after a failed round.

        After a failed round every rank of the process group must call this, because groups are made anew.

        Raises:
            StateDictError: an entry is missing or wrong, or the configuration is another one.
            ClosedError: the averager was closed.
        """
        if self._is_closed:
            self._refuse_if_unusable()
        step, once_trainable = _checked_state(state_dict, self._configuration)
        if self._refusal is not None:
            self._release_groups()
            self._open_groups()
            self._refusal = None
        self._step = step
        self._once_trainable = once_trainable

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = self.__copy__()
        memo[id(self)] = twin
        return twin

    def __copy__(self) -> Any:
        twin = super().__copy__()
        twin._reducer = self._framework().new_reducer(self._bucket_bytes)
        twin._once_trainable = set(self._once_trainable)
        twin._level_groups = list(self._level_groups)
        for group in twin._level_groups:
            self._framework().groups.share(group)
        return twin

    def __repr__(self) -> str:
        settings = [f"{name}={value}" for name, value in self._configuration.items() if name != "class"]
        ranks = "no ranks (this one is outside)" if self._ranks is None else format_ranks(self._ranks)
        return f"{type(self).__name__}({', '.join(settings)}, step={self._step}, {ranks})"

    @property
    def is_usable(self) -> bool:
        """Whether rounds are possible: not closed, no round failed, no process group destroyed."""
        groups = self._framework().groups
        return self._refusal is None and all(groups.is_alive(group) for group in self._level_groups)

    @property
    def _top(self) -> int:
        return len(self._level_groups) - 1

    @property
    def _is_alone(self) -> bool:
        """Whether there is nobody to average with: outside the process group, or the only one in it."""
        return not self._level_groups or self._level_groups[-1].size == 1

    def _select(self, content: RoundContent) -> Selection:
        selection = self._reducer.select(content.tensors(), self._once_trainable)
        self._checked_params = True
        return selection

    def _run_round(
        self,
        content: RoundContent,
        selection: Selection | None,
        level: int,
        call: str,
        *,
        only_agree: bool = False,
    ) -> None:
        """Average ``content`` in the group of ``level``."""
        group = self._level_groups[level] if self._level_groups else None
        if group is None or group.size == 1:
            return
        selection = selection or self._select(content)
        with self._together(group, level, call, selection) as report:
            if not only_agree:
                report.started(len(selection.tensors), selection.listing.num_elements)
                reduced = self._reducer.average_(selection, group, measure_drift=self._measure_drift)
                content.landed()
                report.finished(reduced.wire_bytes, reduced.drift)

    @contextmanager
    def _together(self, group: Group, level: int, call: str, selection: Selection) -> Iterator[RoundReport]:
        """Agree with ``group``, then communicate; the one way to the wire, and out of a failure."""
        if not self._framework().groups.is_alive(group):
            raise ClosedError(
                f"the process group of this {type(self).__name__} was destroyed: initialize again and build a new one"
            )
        self._reducer.check(selection, group)
        report = self._announcer.report(call, self._step, level, group.size, group.rank)
        try:
            facts = {**self._configuration, "call": call, "step": self._step}
            agree(group, Statement(facts, selection.listing))
            yield report
        except DisagreementError as error:
            report.failed(error)
            raise
        except RuntimeError as error:
            self._refuse_until_loaded()
            failure = explain_failure(group, error, step=self._step, level=level)
            report.failed(failure, failure.missing_ranks)
            raise failure from error
        except BaseException:
            self._refuse_until_loaded()
            raise

    def _refuse_if_unusable(self) -> None:
        if self._refusal is not None:
            raise ClosedError(self._refusal)

    def _refuse_until_loaded(self) -> None:
        # The groups of all levels: the others may have failed at another one, and all must make the same anew.
        for group in self._level_groups:
            self._framework().groups.abandon(group)
        self._refusal = (
            f"a round of this {type(self).__name__} failed at step {self._step}, and the weights may be half "
            "averaged: load a checkpoint on every rank, this averager's load_state_dict included"
        )

    def _open_groups(self) -> None:
        """Compare the configuration on the caller's group, then make a group for each level."""
        groups = self._framework().groups
        self._ranks = groups.members(self.process_group)
        if self._ranks is None:
            return
        caller_group = groups.borrow(self.process_group, timeout_s=self._timeout_s)
        try:
            if caller_group.size > 1:
                options = {"bucket_bytes": self._bucket_bytes, "timeout_s": self._timeout_s}
                facts = {**self._configuration, **options, "measure_drift": self._measure_drift}
                agree(caller_group, Statement(facts))
            for level in range(len(self._hierarchy.levels) if self._hierarchy else 1):
                members = self._ranks
                if self._hierarchy:
                    members = self._hierarchy.members(level, self._ranks, caller_group.rank)
                self._level_groups.append(groups.open(self.process_group, members, timeout_s=self._timeout_s))
        except DisagreementError:
            raise
        except RuntimeError as error:
            self._release_groups()
            raise explain_failure(caller_group, error) from error

    def _release_groups(self) -> None:
        for group in self._level_groups:
            self._framework().groups.release(group)
        self._level_groups = []


def _checked_state(state_dict: Any, configuration: Mapping[str, Any]) -> tuple[int, set[int]]:
    """Return the step and the positions of once trainable parameters, all checked."""
    if not isinstance(state_dict, Mapping):
        raise StateDictError(f"state_dict must be what state_dict() returned, got {type(state_dict).__name__}")
    missing = {"step", "configuration", "once_trainable"} - set(state_dict)
    if missing:
        raise StateDictError(f"state_dict lacks {sorted(missing)}: give what state_dict() returned")
    saved = state_dict["configuration"]
    if not isinstance(saved, Mapping):
        raise StateDictError(f"the configuration in state_dict must be a dict, got {saved!r}")
    for name in [*configuration, *(name for name in saved if name not in configuration)]:
        if saved.get(name) != configuration.get(name):
            raise StateDictError(
                f"state_dict is of an averager with {name}={saved.get(name)}, this one has "
                f"{name}={configuration.get(name)}: build it with the same, or set only its step"
            )
    try:
        step = check_whole_number("step in state_dict", state_dict["step"], minimum=0)
        positions = [check_whole_number("a position", one, minimum=0) for one in state_dict["once_trainable"]]
    except (TypeError, ValueError) as error:
        raise StateDictError(f"state_dict is damaged: {error}") from None
    return step, set(positions)
