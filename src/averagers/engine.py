"""The engine: decides, agrees, averages, tells, counts; the averagers fill in when and with whom."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from averagers.arguments import check_averager_state, check_weight, check_whole_number
from averagers.content import RoundContent, as_content
from averagers.errors import ClosedError, InvalidTypeError
from averagers.hierarchy import Hierarchy
from averagers.mixing.mixers import Mixing
from averagers.mixing.overlap import Flight
from averagers.pace import Pace, PacedSchedule, Stopwatch
from averagers.reduction.anchor import Anchor
from averagers.reduction.groups import Group
from averagers.reduction.selection import Selection
from averagers.rounds import RoundAverager
from averagers.safety.agreement import Agreement, format_ranks
from averagers.schedule import Round, Schedule


class ScheduledAverager(RoundAverager):
    """The engine: decides, agrees, averages, tells, counts. Use one of its subclasses.

    Args:
        process_group: The ranks that average; None means all of them.
        schedule: When to average.
        hierarchy: With whom at each level; None for one level of all ranks.
        configuration: What must be equal on all ranks, and in a checkpoint that is loaded.
        options: The rest of what `RoundAverager` takes.
    """

    def __init__(
        self,
        process_group: Any,
        schedule: Schedule,
        hierarchy: Hierarchy | None,
        configuration: Mapping[str, Any],
        **options: Any,
    ) -> None:
        counts = [one.fragments.count for one in options["parts"]]
        # It may note what it decides.
        self._schedule = copy.copy(schedule.in_fragments(counts))
        self._is_paced = isinstance(schedule, PacedSchedule)
        self._num_rounds = 0
        super().__init__(process_group, hierarchy, {**configuration, **schedule.configuration()}, **options)

    @property
    def warmup_steps(self) -> int:
        """How many steps come before the first round may be due."""
        return self._schedule.warmup_steps

    @property
    def step(self) -> int:
        """How many calls of ``average_parameters`` have returned; can be set, to resume."""
        return self._step

    @step.setter
    def step(self, value: int) -> None:
        self._step = check_whole_number("step", value, minimum=0)
        if isinstance(self._schedule, PacedSchedule):
            # What was decided is counted from a step that may be to come.
            self._schedule.next_step = min(self._schedule.next_step, value + self._schedule.period)

    @property
    def num_rounds(self) -> int:
        """How many rounds of the schedule were due."""
        return self._num_rounds

    def average_parameters(self, params: Iterable[Any], *, weight: float | None = None) -> None:
        """Average ``params`` in place if a round is due at this step, and count the step.

        Every rank of the process group must call this equally often. The first call reads and checks
        ``params`` even where no round is due.

        Args:
            params: ``model.parameters()``, ``model.named_parameters()``, ``optimizer.param_groups`` or
                any iterable of tensors, named or not. Floating and complex tensors are averaged,
                except parameters that have never been trainable.
            weight: How much this step counts, such as the number of samples or tokens it saw. A round weighs each
                rank by the sum of the weights since the last round of its level; a rank with 0 only receives. Give
                it on every rank or on none; None everywhere weighs all ranks the same.

        Raises:
            InvalidTypeError: ``params`` is none of those, or ``weight`` no number; nothing was sent.
            InvalidValueError: ``weight`` is negative or not finite; or the weights of all ranks are 0, or do not fit
                the level's rule: then every rank raises this, and nothing was averaged.
            UnsupportedTensorError: a tensor cannot be averaged in place; nothing was sent.
            DisagreementError: the ranks do not agree on the step or on the tensors; nothing was averaged.
            RoundFailedError: a rank died, or did not come within the timeout.
            ClosedError: the averager was closed, or a round failed before.
        """
        if self._refusal is not None:
            raise ClosedError(self._refusal)
        round_ = self._schedule.due(self._step)
        self._num_calls += 1
        if round_ is None and weight is None and self._checked_params and not self._flights and not self._is_paced:
            self._step += 1
            return
        self._stopwatch.begin_call()
        weights_before = self._weights
        if weight is not None:
            seen = check_weight(weight)
            self._weights = [check_weight(seen + (before or 0.0)) for before in self._weights]
        try:
            selection = self._land_due(params, round_) if self._flights else None
            if round_ is not None:
                self._run_due(as_content(params), selection, round_)
            elif not self._checked_params:
                self._select(as_content(params))
        except BaseException:
            self._weights = weights_before
            raise
        self._step += 1
        self._stopwatch.end_call()

    def finish(self, params: Iterable[Any]) -> None:
        """End a run: average once more among all ranks, if the last step did not.

        Afterwards all replicas are one model. Does not count as a step. Every rank must call this,
        after equally many steps; raises what ``average_parameters`` raises.

        Args:
            params: As for ``average_parameters``.
        """
        self._refuse_if_unusable()
        content = as_content(params)
        content.begin(is_last=True)
        selection = self._select(content)
        for flight in list(self._flights):
            self._land(flight, selection)
        if not self._is_alone:
            is_one_model = self._one_model_at == (self._step, selection.listing.digest)
            for fragment in range(self._parts[self._top].fragments.count):
                self._run_round(content, selection, self._top, "finish", fragment, is_wanted=not is_one_model)
            self._one_model_at = (self._step, selection.listing.digest)

    def join(self, params: Iterable[Any]) -> None:
        """End a run on a rank that has run out of data, while others may still have some.

        Takes part in the rounds of the others, which go on by their schedule, until all have called this; then
        `finish`. In its first round the rank still counts for what it did since the last one, later it only receives.
        Every rank calls this in place of ``finish``. Steps are counted on, so that all end at the same one.

        Args:
            params: As for ``average_parameters``.
        """
        self._refuse_if_unusable()
        if isinstance(params, Iterator):
            params = list(params)
        self._has_joined = True
        try:
            is_going = not self._is_alone
            while is_going:
                round_ = self._schedule.due(self._step)
                selection = self._land_due(params, round_) if self._flights else None
                if round_ is not None:
                    is_wanted = self._run_due(as_content(params), selection, round_, is_wanted=False)
                    is_going = is_wanted or round_.level != self._top
                self._step += 1
            self.finish(params)
        finally:
            self._has_joined = False

    def broadcast(self, tensors: Iterable[tuple[str, Any]]) -> None:
        """Replace tensors of any dtype by those of the process group's first rank, in place.

        Every rank must call this. Does not count as a step.

        Args:
            tensors: ``(name, tensor)`` pairs, such as ``model.state_dict().items()``.
        """
        self._refuse_if_unusable()
        selection = self._reducer.select_all(tensors)
        if not self._is_alone:
            group = self._routes.levels[-1].group
            self._reducer.check(selection, group)
            with self._together(group, self._top, "broadcast", selection):
                self._reducer.broadcast_(selection, group)

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
            content.taken_back()

    def close(self) -> None:
        """Release the process groups and buffers; the averager cannot be used any more."""
        self._release_groups()
        self._reducer.close()
        self._is_closed = True
        self._refusal = f"this {type(self).__name__} was closed: build a new one"

    def state_dict(self) -> dict[str, Any]:
        """Return the step, the configuration, which parameters were ever trainable, weights so far, and anchors."""
        return {
            "step": self._step,
            "configuration": dict(self._configuration),
            "once_trainable": sorted(self._once_trainable),
            "weights": list(self._weights),
            "num_rounds": self._num_rounds,
            "num_steps_since": [self._num_calls - calls for calls in self._calls_at_round],
            "one_model_at": self._one_model_at and [self._one_model_at[0], self._one_model_at[1].hex()],
            **({"schedule": self._schedule.state_dict()} if isinstance(self._schedule, PacedSchedule) else {}),
            "flights": self._flight_states(),
            **self._anchors.state_dict(),
        }

    def _flight_states(self) -> list[dict[str, Any]]:
        for flight in self._flights:
            with self._ending(flight):
                flight.wait()
        return [flight.state_dict() for flight in self._flights]

    def anchors_of(
        self, params: Iterable[Any]
    ) -> tuple[Selection, list[tuple[Group, tuple[Anchor, Mixing | None] | None]]]:
        """Return what is averaged of ``params``, and of each level the group, and the anchor with what moves it.

        Where there is no anchor yet, there is memory for one. No ranks are met. Works after a failed round too.

        Raises:
            InvalidValueError: the rounds have had other tensors, or the same in another order.
        """
        if self._is_closed:
            self._refuse_if_unusable()
        selection = self._reducer.select(as_content(params).tensors(), set(self._once_trainable))
        routes = self._routes.levels
        anchors = self._anchors.prepare(selection, self._reducer, routes) if routes else []
        return selection, [(route.group, anchor) for route, anchor in zip(routes, anchors, strict=True)]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` returned; also makes an averager usable after a failed round.

        After a failed round every rank of the process group must call this, because groups are made anew. Where
        that cannot be had of every rank, close the averager and build a new one on all of them.

        Raises:
            StateDictError: an entry is missing or wrong, or the configuration is another one.
            ClosedError: the averager was closed.
        """
        if self._is_closed:
            self._refuse_if_unusable()
        state = check_averager_state(state_dict, self._configuration, len(self._units))
        anchors = self._anchors.loaded(state_dict)
        flights = Flight.all_loaded(state_dict.get("flights"), len(self._units))
        if isinstance(self._schedule, PacedSchedule):
            self._schedule.load_state_dict(state_dict.get("schedule", {}))
        if self._refusal is not None or self._left_a_round:
            self._routes.abandon()
            self._release_groups()
            self._open_groups()
            self._refusal = None
            self._left_a_round = False
        self._one_model_at = state.one_model_at
        self._anchors = anchors
        self._step = state.step
        self._once_trainable = set(state.once_trainable)
        self._weights = list(state.weights)
        self._num_rounds = state.num_rounds
        self._calls_at_round = [self._num_calls - since for since in state.num_steps_since]
        for flight in self._flights:
            flight.join()
        self._flights = flights

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = self.__copy__()
        memo[id(self)] = twin
        return twin

    def __copy__(self) -> Any:
        if self.has_overlap:
            raise InvalidTypeError(
                f"a {type(self).__name__} with overlap cannot be copied, because its rounds under way have process "
                "groups of their own: build a new one, and load state_dict() into it"
            )
        twin = super().__copy__()
        twin._reducer = self._framework.new_reducer(self._bucket_bytes)
        twin._once_trainable = set(self._once_trainable)
        twin._anchors = self._anchors.copy()
        twin._weights = list(self._weights)
        twin._calls_at_round = list(self._calls_at_round)
        twin._schedule = copy.copy(self._schedule)
        twin._stopwatch = Stopwatch()
        twin._routes = self._routes.shared()
        return twin

    def __repr__(self) -> str:
        settings = [f"{name}={value}" for name, value in self._configuration.items() if name != "class"]
        ranks = "no ranks (this one is outside)" if self._ranks is None else format_ranks(self._ranks)
        return f"{type(self).__name__}({', '.join(settings)}, step={self._step}, {ranks})"

    def _run_due(
        self, content: RoundContent, selection: Selection | None, round_: Round, *, is_wanted: bool = True
    ) -> bool:
        """Run a round of the schedule, after the one within that is due with it; return if any rank wants it."""
        if round_.within is not None:
            selection = selection or self._select(content)
            self._run_due(content, selection, round_.within, is_wanted=is_wanted)
        content.begin(is_last=False)
        is_wanted = self._run_round(
            content, selection, round_.level, "average_parameters", round_.fragment, is_wanted=is_wanted
        )
        # Also where nobody wanted it, so that all ranks count the same.
        self._num_rounds += 1
        return is_wanted

    def _land_due(self, params: Iterable[Any], round_: Round | None) -> Selection | None:
        """Land what is due, and what must not be under way while ``round_`` is; return what was selected for it."""
        due = [
            flight
            for flight in self._flights
            if flight.land_at <= self._step or (round_ is not None and self._must_land(flight, round_))
        ]
        if not due:
            return None
        selection = self._select(as_content(params))
        for flight in due:
            self._land(flight, selection)
        return selection

    def _must_land(self, flight: Flight, round_: Round) -> bool:
        """Tell whether a round may not begin before ``flight`` landed: of the same tensors, of its level or above."""
        level, fragment = self._units[flight.unit]
        return level < round_.level or (level, fragment) == (round_.level, round_.fragment)

    def _note_round(self, level: int, selection: Selection, agreement: Agreement, *, is_one_model: bool) -> None:
        """Note what a round of the schedule changed beside the weights."""
        if isinstance(self._schedule, PacedSchedule):
            paces = [figures[1:] for figures in agreement.figures]
            self._schedule.decide(self._step, Pace(*map(max, zip(*paces, strict=True))))
        # Two levels of one size share their group.
        is_of_all = self._routes.levels[level].group is self._routes.levels[-1].group
        self._one_model_at = (self._step + 1, selection.listing.digest) if is_one_model and is_of_all else None
