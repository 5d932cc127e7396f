"""Rounds: their groups, agreement, averaging at once or beside the caller, and the way out of a failure."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from averagers.arguments import (
    check_nodes,
    check_seconds,
    check_whole_number,
)
from averagers.base import ModelAverager
from averagers.content import RoundContent
from averagers.errors import ClosedError, DisagreementError, InvalidTypeError, InvalidValueError
from averagers.events import Announcer, Observer, RoundReport
from averagers.hierarchy import Hierarchy
from averagers.mixing.anchors import Anchors, Parts
from averagers.mixing.fragments import WHOLE
from averagers.mixing.mixers import Elastic
from averagers.mixing.overlap import Flight
from averagers.pace import Stopwatch
from averagers.reduction.anchor import Anchor
from averagers.reduction.groups import Group
from averagers.reduction.reducer import Reduced
from averagers.reduction.selection import Selection
from averagers.safety.agreement import NO_FIGURES, Agreement, Figures, Statement, agree
from averagers.safety.failure import explain_failure
from averagers.safety.opening import Level, Routes, open_routes


@dataclass(frozen=True)
class _Due:
    """A round that is about to begin.

    Attributes:
        call: The method that asks for it.
        level: Whose group averages.
        fragment: Which part of the model; None for all of it, whatever the level's fragments.
        unit: The level's fragment, as the averager counts them.
        whole: All that is averaged.
        selection: What of it this round averages.
        anchor: What is counted from; None where values go as they are.
        parts: What the level does.
    """

    call: str
    level: int
    fragment: int | None
    unit: int
    whole: Selection
    selection: Selection
    anchor: Anchor | None
    parts: Parts

    @property
    def is_whole(self) -> bool:
        """Whether the whole model is averaged."""
        return self.selection is self.whole

    @property
    def is_kept(self) -> bool:
        """Whether the weights stay what they become."""
        return self.call != "averaged"

    @property
    def is_later(self) -> bool:
        """Whether it lands some steps later: one of the schedule, once there is the anchor that it needs."""
        is_ready = self.parts.has_anchor == (self.anchor is not None)
        return self.call == "average_parameters" and self.parts.delayed is not None and is_ready

    @property
    def leaves_one_model(self) -> bool:
        """Whether the ranks have the same weights right after it."""
        is_pulled = self.anchor is not None and isinstance(self.parts.mixer, Elastic)
        return self.is_whole and not self.is_later and not is_pulled


class RoundAverager(ModelAverager):
    """Runs rounds; when, its subclass decides.

    Args:
        process_group: The ranks that average; None means all of them.
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
        self._stopwatch = Stopwatch()
        self._hierarchy = hierarchy
        self._descriptions = {
            "codec": [repr(one.method.codec) for one in parts],
            "rule": [repr(one.method.rule) for one in parts],
            "mixer": [repr(one.mixer) for one in parts],
            "overlap": [repr(one.overlap) for one in parts],
            "fragments": [repr(one.fragments.names or one.fragments.count) for one in parts],
        }
        defaults = {"None", repr(WHOLE.count)}
        chosen = {name: str(all_) for name, all_ in self._descriptions.items() if not set(all_) <= defaults}
        if any(one.has_residuals for one in parts):  # they are of buckets
            chosen["bucket_bytes"] = str(bucket_bytes)
        self._configuration = {**configuration, **chosen}
        self._measure_drift = measure_drift
        self._bucket_bytes = bucket_bytes
        self._reducer = self._framework.new_reducer(bucket_bytes)
        self._checked_params = False
        self._once_trainable: set[int] = set()
        self._refusal: str | None = None
        self._is_closed = False
        # This rank raised where the others began a round: their groups are broken, and so are these.
        self._left_a_round = False
        # After which step, with which tensors, a round of all ranks left one model.
        self._one_model_at: tuple[int, bytes] | None = None
        self._read_iterator: Any = None
        self._parts = tuple(parts)
        # Each fragment of each level has an anchor of its own.
        self._units = [(level, fragment) for level, one in enumerate(parts) for fragment in range(one.fragments.count)]
        self._anchors = Anchors([parts[level] for level, _ in self._units])
        # Of this rank, since the last round of each unit; None where none was given.
        self._weights: list[float | None] = [None] * len(self._units)
        # How many calls there were, and had been at the last round of each unit.
        self._num_calls = 0
        self._calls_at_round = [0] * len(self._units)
        # Out of data: it only receives.
        self._has_joined = False
        # Rounds under way, in the order in which they were sent; and what carries them.
        self._flights: list[Flight] = []
        self._reducer_beside = self._framework.new_reducer(bucket_bytes)
        self._routes = Routes(self._framework.groups)
        self._ranks = self._framework.groups.members(self.process_group)
        self._nodes = check_nodes(nodes, self._ranks)
        self._open_groups()

    @property
    def is_usable(self) -> bool:
        """Whether rounds are possible: not closed, no round failed, no process group destroyed."""
        return self._refusal is None and self._routes.are_alive

    def check_asides(self) -> None:
        """Raise unless buffers and optimizer state can go along with the parameters, at every level."""
        for parts in self._parts:
            parts.check_asides()

    @property
    def has_overlap(self) -> bool:
        """Whether rounds may be under way between calls."""
        return any(parts.delayed is not None for parts in self._parts)

    @property
    def has_fragments(self) -> bool:
        """Whether parts of the model are averaged each on its own."""
        return len(self._units) > len(self._parts)

    @property
    def _top(self) -> int:
        return len(self._routes.levels) - 1

    @property
    def _is_alone(self) -> bool:
        """Whether there is nobody to average with: outside the process group, or the only one in it."""
        return not self._routes.levels or self._routes.levels[-1].group.size == 1

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
            if parts.mixer is not None and not self._checked_params:
                parts.mixer.check_start(self._reducer.stand_ins(selection, with_float64=parts.with_float64))
        self._checked_params = True
        return selection

    def _run_round(
        self,
        content: RoundContent,
        selection: Selection | None,
        level: int,
        call: str,
        fragment: int | None = None,
        *,
        is_wanted: bool = True,
    ) -> bool:
        """Average ``content``, or a fragment, in the group of ``level``, if one of its ranks wants it; return if so."""
        if not self._routes.levels or self._routes.levels[level].group.size == 1:
            if not self._checked_params:
                self._select(content)
            return is_wanted
        due = self._due(content, selection, level, call, fragment)
        group, facts, figures = self._routes.levels[level].group, self._facts(due), self._figures(due)
        with self._together(group, level, call, due.selection, facts, int(is_wanted), figures) as (report, agreement):
            if agreement.wish:
                self._carry_out(due, content, agreement, report)
        if agreement.wish and due.is_later and self._flights[-1].land_at == self._step:
            self._land(self._flights[-1], due.whole)
        return bool(agreement.wish)

    def _due(
        self, content: RoundContent, selection: Selection | None, level: int, call: str, fragment: int | None
    ) -> _Due:
        """Return the round that ``call`` asks for, once its tensors are checked."""
        try:
            whole = selection or self._select(content)
            self._reducer.check(whole, self._routes.levels[level].group)
            self._anchors.check_order(whole)
            selection = whole if fragment is None else self._fragment_of(whole, level, fragment)
        except Exception:
            self._left_a_round = True
            raise
        unit = self._units.index((level, fragment or 0))
        # What `averaged` shows is taken back: it is no round that displacements could be counted from.
        anchor = self._anchors.of(unit, selection, self._reducer) if call != "averaged" else None
        return _Due(call, level, fragment, unit, whole, selection, anchor, self._parts[level])

    def _facts(self, due: _Due) -> dict[str, Any]:
        """Return what of the round must be equal on all ranks, beside the tensors and the step."""
        facts = {"fragment": str(due.fragment)}
        mixer = due.parts.mixer
        if due.anchor is not None:
            facts["the anchor's round"] = str(due.anchor.moved_at)
            if mixer is not None:
                facts["the mixer's settings"] = self._anchors.settings(due.unit, due.selection, self._reducer)
            if mixer is not None and mixer.needs_lr:
                facts["the learning rate"] = ", ".join(map(str, dict.fromkeys(due.parts.lrs(due.selection))))
        return facts

    def _figures(self, due: _Due) -> Figures:
        """Return what this rank has to tell the others of itself."""
        weight = self._weights[due.unit]
        if due.call == "averaged" and due.is_whole and due.parts.fragments.count > 1:
            weight = None  # fragments have weights of their own
        if self._has_joined and self._num_calls == self._calls_at_round[due.unit]:
            weight = 0.0
        return Figures(-1.0 if weight is None else weight, self._stopwatch.take_step_s(), self._stopwatch.round_s)

    def _carry_out(self, due: _Due, content: RoundContent, agreement: Agreement, report: RoundReport) -> None:
        """Average, or begin to, now that all agree; and note that it was done."""
        if due.call == "finish" and not any(agreement.weights):
            # Nobody did anything since, but replicas may differ: all count the same.
            agreement = agreement._replace(figures=(NO_FIGURES,) * self._routes.levels[due.level].group.size)
        due.parts.method.check_weights(agreement.weights)
        report.started(len(due.selection.tensors), due.selection.listing.num_elements)
        if due.is_later:
            self._send(due, agreement, report)
        else:
            began = time.perf_counter()
            reduced = self._average_now(due, agreement)
            content.landed(is_kept=due.is_kept)
            self._stopwatch.round_s = time.perf_counter() - began
            report.finished(reduced.wire_bytes, reduced.drift)
        if due.is_kept:
            self._anchors.know(due.whole)
            for done in (due.unit, *self._units_below(due.level)) if due.leaves_one_model else (due.unit,):
                self._weights[done] = None
                self._calls_at_round[done] = self._num_calls
        if due.call == "average_parameters":
            self._note_round(due.level, due.selection, agreement, is_one_model=due.leaves_one_model)

    def _fragment_of(self, whole: Selection, level: int, fragment: int) -> Selection:
        fragments = self._parts[level].fragments
        return whole if fragments.count == 1 else whole.part(fragments.positions(whole.listing)[fragment])

    def _units_below(self, level: int) -> list[int]:
        return [unit for unit, (below, _) in enumerate(self._units) if below < level]

    def _average_now(self, due: _Due, agreement: Agreement) -> Reduced:
        """Average, and let the mean, or what the mixer makes of it, take the weights' place."""
        selection, anchor, route = due.selection, due.anchor, self._routes.levels[due.level]
        is_mixed = anchor is not None and due.parts.mixer is not None
        staged = self._reducer.stage(selection, anchor) if is_mixed else None
        reduced = self._reducer.average_(
            selection,
            route,
            due.parts.method,
            measure_drift=self._measure_drift,
            weights=agreement.weights,
            anchor=anchor,
            staged=staged,
        )
        if staged is not None:
            targets = self._anchors.mix_(
                due.unit,
                selection,
                self._reducer,
                staged.values,
                num_ranks=route.group.size,
                lrs=due.parts.lrs(selection),
                is_last=due.call == "finish",
            )
            self._reducer.land_(selection, targets, keep=0.0)
        if due.is_kept:
            self._anchors.take(
                due.unit,
                selection,
                self._reducer,
                # Counting from weights takes weights that the ranks of a group have in common.
                within=self._units_below(due.level) if due.leaves_one_model else [],
                step=self._step,
                is_moved=anchor is not None,
            )
        return reduced

    def _send(self, due: _Due, agreement: Agreement, report: RoundReport) -> None:
        """Begin a round that goes on while this thread does."""
        selection, anchor, parts, route = due.selection, due.anchor, due.parts, self._routes.beside[due.level]
        assert parts.delayed is not None
        assert route is not None
        staged = self._reducer.stage(selection, anchor)
        flight = Flight(
            due.unit,
            sent_at=self._step,
            land_at=self._step + parts.delayed.steps,
            digest=selection.listing.digest_without_names,
            staged=staged,
            sent=self._reducer.snapshot(selection) if parts.delayed.carry else None,
            lrs=parts.lrs(selection),
            route=route,
            report=report,
        )

        beside = self._reducer.operations.beside({tensor.device for tensor in selection.tensors})

        def work() -> Reduced:
            # Tells who came, should this round fail.
            route.group.open_round("q", flight.sent_at)
            with beside:
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

    def _land(self, flight: Flight, selection: Selection) -> None:
        """Wait for a round under way, and let its mean into the weights."""
        level, fragment = self._units[flight.unit]
        delayed = self._parts[level].delayed
        assert delayed is not None
        selection = self._fragment_of(selection, level, fragment)
        if flight.digest != selection.listing.digest_without_names:
            raise InvalidValueError(
                f"params must be the tensors of the round that was sent at step {flight.sent_at}, which lands now, in "
                "number, shape and dtype: change them after finish(), or before a round is sent"
            )
        with self._ending(flight):
            reduced = flight.wait()
            self._flights.remove(flight)
            targets: Sequence[Any] = flight.staged.values
            if self._anchors.of(flight.unit, selection, self._reducer) is not None:
                size = self._routes.levels[level].group.size
                targets = self._anchors.mix_(
                    flight.unit, selection, self._reducer, targets, num_ranks=size, lrs=flight.lrs, is_last=False
                )
                self._anchors.moved(flight.unit, step=flight.sent_at)
            self._reducer.land_(selection, targets, keep=delayed.keep, sent=flight.sent)
        if flight.report is not None:
            flight.report.finished(reduced.wire_bytes, reduced.drift)

    @contextmanager
    def _ending(self, flight: Flight) -> Iterator[None]:
        """Wait for a round under way, or land it; a failure is every rank's."""
        try:
            yield
        except RuntimeError as error:
            self._refuse_until_loaded()
            level, _ = self._units[flight.unit]
            route = flight.route or self._routes.levels[level]
            failure = explain_failure(route.group, error, step=flight.sent_at, level=level)
            if flight.report is not None:
                flight.report.failed(failure, failure.missing_ranks)
            raise failure from error
        except BaseException:
            self._refuse_until_loaded()
            raise

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
        if not self._framework.groups.is_alive(group):
            raise ClosedError(
                f"the process group of this {type(self).__name__} was destroyed: initialize again and build a new one"
            )
        report = self._announcer.report(call, self._step, level, group.size, group.rank)
        try:
            facts = {
                **self._configuration,
                "averager": self._routes.number,
                "call": call,
                "step": self._step,
                **(facts or {}),
            }
            agreement = agree(group, Statement(facts, selection.listing), wish, figures)
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

    def _refuse_until_loaded(self) -> None:
        self._routes.abandon()
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
            "offload": [one.offload for one in self._parts],
            **self._descriptions,
        }
        self._routes = open_routes(
            self._framework.groups,
            self.process_group,
            [
                Level(size, parts.method.is_sum, has_beside=parts.delayed is not None)
                for size, parts in zip(sizes, self._parts, strict=True)
            ],
            self._nodes,
            {**self._configuration, **options, "measure_drift": self._measure_drift},
            timeout_s=self._timeout_s,
        )

    def _release_groups(self) -> None:
        for flight in self._flights:  # it ends at its timeout at the latest
            flight.join()
        self._flights = []
        self._routes.release()

    @abstractmethod
    def _note_round(self, level: int, selection: Selection, agreement: Agreement, *, is_one_model: bool) -> None:
        """Note what a round of the schedule changed beside the weights."""
