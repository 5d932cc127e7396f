"""The engine: decides, agrees, averages, tells, counts; the averagers fill in when and with whom."""

from __future__ import annotations

import copy
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from averagers.arguments import (
    check_averager_state,
    check_nodes,
    check_seconds,
    check_weight,
    check_whole_number,
)
from averagers.base import ModelAverager
from averagers.content import RoundContent, as_content
from averagers.errors import ClosedError, DisagreementError, InvalidTypeError, InvalidValueError
from averagers.events import Announcer, Observer, RoundReport
from averagers.hierarchy import Hierarchy
from averagers.mixing.anchors import Anchors, Parts
from averagers.mixing.mixers import Elastic, Mixing
from averagers.mixing.overlap import Flight
from averagers.pace import Stopwatch
from averagers.reduction.anchor import Anchor
from averagers.reduction.groups import Group, Route
from averagers.reduction.reducer import Reduced, Selection
from averagers.safety.agreement import NO_FIGURES, Agreement, Figures, Statement, agree, format_ranks
from averagers.safety.failure import explain_failure
from averagers.safety.opening import Level, open_routes
from averagers.schedule import Pace, PacedSchedule, Round, Schedule


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
        nodes: The node of each rank of the process group, in its order; None to tell nodes by their host names.
        parts: What each level does.
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
        nodes: Sequence[Hashable] | None,
        parts: Sequence[Parts],
    ) -> None:
        check_whole_number("bucket_bytes", bucket_bytes, minimum=1)
        self._timeout_s = check_seconds("timeout_s", timeout_s)
        self._announcer = Announcer(observers)
        if not isinstance(measure_drift, bool):
            raise InvalidTypeError(f"measure_drift must be True or False, got {measure_drift!r}")
        super().__init__(process_group)
        # It may note what it decides.
        self._schedule = copy.copy(schedule)
        self._stopwatch = Stopwatch()
        self._hierarchy = hierarchy
        self._descriptions = {
            "codec": [repr(one.method.codec) for one in parts],
            "rule": [repr(one.method.rule) for one in parts],
            "mixer": [repr(one.mixer) for one in parts],
            "overlap": [repr(one.overlap) for one in parts],
        }
        chosen = {name: str(all_) for name, all_ in self._descriptions.items() if set(all_) != {"None"}}
        if any(one.has_residuals for one in parts):  # they are of buckets
            chosen["bucket_bytes"] = str(bucket_bytes)
        self._configuration = {**configuration, **schedule.configuration(), **chosen}
        self._measure_drift = measure_drift
        self._bucket_bytes = bucket_bytes
        self._reducer = self._framework().new_reducer(bucket_bytes)
        self._checked_params = False
        self._once_trainable: set[int] = set()
        self._refusal: str | None = None
        self._is_closed = False
        # This rank raised where the others began a round: their groups are broken, and so are these.
        self._left_a_round = False
        self._number = 0
        # After which step, with which tensors, a round of all ranks left one model.
        self._one_model_at: tuple[int, bytes] | None = None
        self._read_iterator: Any = None
        self._parts = tuple(parts)
        self._anchors = Anchors(parts)
        # Of this rank, since the last round of each level; None where none was given.
        self._weights: list[float | None] = [None] * len(parts)
        self._routes: list[Route] = []
        # Rounds under way, in the order in which they were sent; and what carries them.
        self._flights: list[Flight] = []
        self._reducer_beside = self._framework().new_reducer(bucket_bytes)
        self._routes_beside: list[Route | None] = []
        self._ranks = self._framework().groups.members(self.process_group)
        self._nodes = check_nodes(nodes, self._ranks)
        self._open_groups()

    @property
    def warmup_steps(self) -> int:
        """How many steps come before the first round may be due."""
        return self._schedule.warmup_steps

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
        self._stopwatch.begin_call()
        weights_before = self._weights
        if weight is not None:
            seen = check_weight(weight)
            self._weights = [check_weight(seen + (before or 0.0)) for before in self._weights]
        round_ = self._schedule.due(self._step)
        try:
            selection = self._land_due(params, round_) if self._flights else None
            if round_ is not None:
                self._run_round(as_content(params), selection, round_.level, "average_parameters")
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
        selection = self._select(content)
        for flight in list(self._flights):
            self._land(flight, selection)
        if not self._is_alone:
            is_one_model = self._one_model_at == (self._step, selection.listing.digest)
            self._run_round(content, selection, self._top, "finish", is_wanted=not is_one_model)

    def broadcast(self, tensors: Iterable[tuple[str, Any]]) -> None:
        """Replace tensors of any dtype by those of the process group's first rank, in place.

        Every rank must call this. Does not count as a step.

        Args:
            tensors: ``(name, tensor)`` pairs, such as ``model.state_dict().items()``.
        """
        self._refuse_if_unusable()
        selection = self._reducer.select_all(tensors)
        if not self._is_alone:
            group = self._routes[-1].group
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
            **({"schedule": self._schedule.state_dict()} if isinstance(self._schedule, PacedSchedule) else {}),
            "flights": self._flight_states(),
            **self._anchors.state_dict(),
        }

    def _flight_states(self) -> list[dict[str, Any]]:
        for flight in self._flights:
            self._ended(flight)
        return [flight.state_dict() for flight in self._flights]

    @property
    def has_overlap(self) -> bool:
        """Whether rounds may be under way between calls."""
        return any(parts.delayed is not None for parts in self._parts)

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
        anchors = self._anchors.prepare(selection, self._reducer, self._routes) if self._routes else []
        return selection, [(route.group, anchor) for route, anchor in zip(self._routes, anchors, strict=True)]

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
        step, once_trainable, weights = check_averager_state(state_dict, self._configuration, len(self._parts))
        anchors = self._anchors.loaded(state_dict)
        flights = [Flight.loaded(flight, len(self._parts)) for flight in state_dict.get("flights", ())]
        if isinstance(self._schedule, PacedSchedule):
            self._schedule.load_state_dict(state_dict.get("schedule", {}))
        if self._refusal is not None or self._left_a_round:
            self._abandon_groups()
            self._release_groups()
            self._open_groups()
            self._refusal = None
            self._left_a_round = False
        self._one_model_at = None
        self._anchors = anchors
        self._step = step
        self._once_trainable = once_trainable
        self._weights = weights
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
        twin._reducer = self._framework().new_reducer(self._bucket_bytes)
        twin._once_trainable = set(self._once_trainable)
        twin._anchors = self._anchors.copy()
        twin._weights = list(self._weights)
        twin._schedule = copy.copy(self._schedule)
        twin._stopwatch = Stopwatch()
        twin._routes = list(self._routes)
        for group in twin._opened_groups():
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
        return self._refusal is None and all(groups.is_alive(group) for group in self._opened_groups())

    @property
    def _top(self) -> int:
        return len(self._routes) - 1

    @property
    def _is_alone(self) -> bool:
        """Whether there is nobody to average with: outside the process group, or the only one in it."""
        return not self._routes or self._routes[-1].group.size == 1

    def _select(self, content: RoundContent) -> Selection:
        tensors = content.tensors()
        if isinstance(tensors, Iterator):
            if tensors is self._read_iterator:
                raise InvalidValueError(
                    "params is an iterator that was read to its end at the first call, and is empty now: call "
                    "model.parameters() each time, or give a list"
                )
            self._read_iterator = tensors
        selection = self._reducer.select(tensors, self._once_trainable)
        for parts in self._parts:
            parts.check_selection(selection)
        self._checked_params = True
        return selection

    def _run_round(
        self,
        content: RoundContent,
        selection: Selection | None,
        level: int,
        call: str,
        *,
        is_wanted: bool = True,
    ) -> None:
        """Average ``content`` in the group of ``level``, if one of its ranks wants it."""
        route = self._routes[level] if self._routes else None
        if route is None or route.group.size == 1:
            if not self._checked_params:
                self._select(content)
            return
        try:
            selection = selection or self._select(content)
            self._reducer.check(selection, route.group)
            self._anchors.check_order(selection)
        except Exception:
            self._left_a_round = True
            raise
        # What `averaged` shows is taken back: it is no round that displacements could be counted from.
        is_kept = call != "averaged"
        parts = self._parts[level]
        anchor = self._anchors.of(level, selection) if is_kept else None
        weight = self._weights[level]
        is_later = (
            call == "average_parameters" and parts.delayed is not None and parts.has_anchor == (anchor is not None)
        )
        is_pulled = anchor is not None and isinstance(parts.mixer, Elastic)
        facts = {"weight": "not given" if weight is None else "given"}
        if anchor is not None:
            facts["the anchor's round"] = str(anchor.moved_at)
            if parts.mixer is not None and parts.mixer.needs_lr:
                facts["the learning rate"] = ", ".join(map(str, dict.fromkeys(parts.lrs(selection))))
        figures = Figures(1.0 if weight is None else weight, self._stopwatch.take_step_s(), self._stopwatch.round_s)
        with self._together(route.group, level, call, selection, facts, int(is_wanted), figures) as (report, agreement):
            if agreement.wish:
                report.started(len(selection.tensors), selection.listing.num_elements)
                if is_later:
                    self._send(level, selection, anchor, agreement, report)
                else:
                    began = time.perf_counter()
                    reduced = self._average_now(level, selection, anchor, agreement, is_last=call == "finish")
                    if is_kept:
                        self._anchors.take(
                            level, selection, self._reducer, step=self._step, is_moved=anchor is not None
                        )
                    content.landed()
                    self._stopwatch.round_s = time.perf_counter() - began
                    report.finished(reduced.wire_bytes, reduced.drift)
                if is_kept:
                    self._weights[: level + 1] = [None] * (level + 1)
                if call == "average_parameters":
                    self._after_round(level, selection, agreement, is_one_model=not is_later and not is_pulled)
        if is_later and self._flights[-1].land_at == self._step:
            self._land(self._flights[-1], selection)

    def _average_now(
        self, level: int, selection: Selection, anchor: Anchor | None, agreement: Agreement, *, is_last: bool
    ) -> Reduced:
        """Average, and let the mean, or what the mixer makes of it, take the weights' place."""
        parts, route = self._parts[level], self._routes[level]
        staged = self._reducer.stage(selection, anchor) if anchor is not None and parts.mixer is not None else None
        reduced = self._reducer.average_(
            selection,
            route,
            parts.method,
            measure_drift=self._measure_drift,
            weights=agreement.weights,
            anchor=anchor,
            staged=staged,
        )
        if staged is not None:
            targets = self._anchors.mix_(
                level, selection, self._reducer, staged.values, num_ranks=route.group.size, is_last=is_last
            )
            self._reducer.land_(selection, targets, keep=0.0)
        return reduced

    def _send(
        self, level: int, selection: Selection, anchor: Anchor | None, agreement: Agreement, report: RoundReport
    ) -> None:
        """Begin a round that goes on while this thread does."""
        parts, route = self._parts[level], self._routes_beside[level]
        assert parts.delayed is not None
        assert route is not None
        staged = self._reducer.stage(selection, anchor)
        flight = Flight(
            level,
            sent_at=self._step,
            land_at=self._step + parts.delayed.steps,
            digest=selection.listing.digest_without_names,
            staged=staged,
            sent=self._reducer.snapshot(selection) if parts.delayed.carry else None,
            route=route,
            report=report,
        )

        def work() -> Reduced:
            # Tells who came, should this round fail.
            route.group.open_round("q", flight.sent_at)
            return self._reducer_beside.average_(
                selection,
                route,
                parts.method,
                measure_drift=self._measure_drift,
                weights=agreement.weights,
                anchor=anchor,
                staged=staged,
            )

        flight.begin(work, after=self._flights[-1] if self._flights else None)
        self._flights.append(flight)

    def _land_due(self, params: Iterable[Any], round_: Round | None) -> Selection | None:
        """Land what is due, and what must not be under way while ``round_`` is; return what was selected for it."""
        due = [
            flight
            for flight in self._flights
            if flight.land_at <= self._step or (round_ is not None and flight.level <= round_.level)
        ]
        if not due:
            return None
        selection = self._select(as_content(params))
        for flight in due:
            self._land(flight, selection)
        return selection

    def _land(self, flight: Flight, selection: Selection) -> None:
        """Wait for a round under way, and let its mean into the weights."""
        delayed = self._parts[flight.level].delayed
        assert delayed is not None
        if flight.digest != selection.listing.digest_without_names:
            raise InvalidValueError(
                f"params must be the tensors of the round that was sent at step {flight.sent_at}, which lands now"
            )
        reduced = self._ended(flight)
        self._flights.remove(flight)
        targets: Sequence[Any] = flight.staged.values
        if self._anchors.of(flight.level, selection) is not None:
            size = self._routes[flight.level].group.size
            targets = self._anchors.mix_(flight.level, selection, self._reducer, targets, num_ranks=size, is_last=False)
            self._anchors.moved(flight.level, step=flight.sent_at)
        self._reducer.land_(selection, targets, keep=delayed.keep, sent=flight.sent)
        if flight.report is not None:
            flight.report.finished(reduced.wire_bytes, reduced.drift)

    def _ended(self, flight: Flight) -> Reduced:
        """Wait for a round under way, and return what it cost; a failure is every rank's."""
        try:
            return flight.wait()
        except RuntimeError as error:
            self._refuse_until_loaded()
            assert flight.route is not None
            assert flight.report is not None
            failure = explain_failure(flight.route.group, error, step=flight.sent_at, level=flight.level)
            flight.report.failed(failure, failure.missing_ranks)
            raise failure from error
        except BaseException:
            self._refuse_until_loaded()
            raise

    def _after_round(self, level: int, selection: Selection, agreement: Agreement, *, is_one_model: bool) -> None:
        """Note what a round of the schedule changed beside the weights."""
        if isinstance(self._schedule, PacedSchedule):
            paces = [figures[1:] for figures in agreement.figures]
            self._schedule.decide(self._step, Pace(*map(max, zip(*paces, strict=True))))
        # Two levels of one size share their group.
        is_of_all = self._routes[level].group is self._routes[-1].group
        self._one_model_at = (self._step + 1, selection.listing.digest) if is_one_model and is_of_all else None

    @contextmanager
    def _together(
        self,
        group: Group,
        level: int,
        call: str,
        selection: Selection,
        facts: Mapping[str, Any] | None = None,
        wish: int = 1,
        figures: Figures = NO_FIGURES,
    ) -> Iterator[tuple[RoundReport, Agreement]]:
        """Agree with ``group``, then communicate; the one way to the wire, and out of a failure.

        Yields what tells of it, and what the ranks told each other.
        """
        if not self._framework().groups.is_alive(group):
            raise ClosedError(
                f"the process group of this {type(self).__name__} was destroyed: initialize again and build a new one"
            )
        report = self._announcer.report(call, self._step, level, group.size, group.rank)
        try:
            facts = {**self._configuration, "averager": self._number, "call": call, "step": self._step, **(facts or {})}
            agreement = agree(group, Statement(facts, selection.listing), wish, figures)
            if agreement.wish:
                self._parts[level].method.check_weights(agreement.weights)
            yield report, agreement
        except (DisagreementError, InvalidValueError) as error:
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

    def _abandon_groups(self) -> None:
        # The groups of all levels: the others may have failed at another one, and all must make the same anew.
        for group in self._opened_groups():
            self._framework().groups.abandon(group)

    def _refuse_until_loaded(self) -> None:
        self._abandon_groups()
        self._refusal = (
            f"a round of this {type(self).__name__} failed at step {self._step}, and the weights may be half "
            "averaged: load a checkpoint on every rank, this averager's load_state_dict included"
        )

    def _open_groups(self) -> None:
        """Compare the configuration with the other ranks, then make the groups of each level."""
        if self._ranks is None:
            return
        levels = self._hierarchy.levels if self._hierarchy else ()
        sizes = [level.group_size for level in levels] or [len(self._ranks)]
        for size, parts in zip(sizes, self._parts, strict=True):
            parts.check_group_size(size)
        options = {
            "bucket_bytes": self._bucket_bytes,
            "timeout_s": self._timeout_s,
            "nodes": self._nodes,
            **self._descriptions,
        }
        self._number, routes = open_routes(
            self._framework().groups,
            self.process_group,
            [
                Level(size, parts.method.is_sum, has_beside=parts.delayed is not None)
                for size, parts in zip(sizes, self._parts, strict=True)
            ],
            self._nodes,
            {**self._configuration, **options, "measure_drift": self._measure_drift},
            timeout_s=self._timeout_s,
        )
        self._routes = [route for route, _ in routes]
        self._routes_beside = [beside for _, beside in routes]

    def _opened_groups(self) -> list[Group]:
        beside = [route for route in self._routes_beside if route is not None]
        return [group for route in [*self._routes, *beside] for group in route.groups]

    def _release_groups(self) -> None:
        for flight in self._flights:  # it ends at its timeout at the latest
            flight.join()
        self._flights = []
        for group in self._opened_groups():
            self._framework().groups.release(group)
        self._routes, self._routes_beside = [], []
