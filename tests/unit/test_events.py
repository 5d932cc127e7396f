"""Events: what they hold, who hears them, and that a broken observer cannot end a run."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest

import averagers
from averagers.events import Announcer, RoundFailed, RoundFinished, RoundReport, RoundStarted

STARTED = RoundStarted("average_parameters", 8, 1, 4, 2, 3, 100)


def _report(*observers: Any) -> RoundReport:
    return Announcer(observers).report("finish", 12, 1, 4, 2)


def test_every_observer_hears_every_event_in_the_order_given() -> None:
    heard: list[tuple[str, object]] = []
    announcer = Announcer([lambda event: heard.append(("a", event)), lambda event: heard.append(("b", event))])
    announcer.announce(STARTED)
    assert heard == [("a", STARTED), ("b", STARTED)]


def test_a_round_that_ends_well_is_told_as_started_and_finished() -> None:
    heard: list[Any] = []
    report = _report(heard.append)
    report.started(3, 100)
    report.finished(640, 0.5)
    started, finished = heard
    assert started == RoundStarted("finish", 12, 1, 4, 2, 3, 100)
    assert finished == RoundFinished("finish", 12, 1, 4, 2, 3, 100, 640, finished.seconds, 0.5)
    assert finished.seconds >= 0


def test_a_round_that_fails_is_told_with_the_message_and_the_missing_ranks() -> None:
    heard: list[Any] = []
    _report(heard.append).failed(RuntimeError("the link broke"), (3, 5))
    (failed,) = heard
    assert failed == RoundFailed("finish", 12, 1, 4, 2, failed.seconds, "the link broke", (3, 5))
    assert failed.seconds >= 0


@pytest.mark.parametrize("event", [RoundStarted, RoundFinished, RoundFailed])
def test_an_event_cannot_be_changed(event: type) -> None:
    record = event(*range(len(dataclasses.fields(event))))
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.step = 3


def test_an_observer_that_raises_is_dropped_with_a_warning_and_the_others_go_on() -> None:
    heard: list[object] = []
    calls: list[object] = []

    def full_disk(event: object) -> None:
        calls.append(event)
        raise OSError("No space left on device")

    announcer = Announcer([full_disk, heard.append])
    with pytest.warns(UserWarning, match=r"full_disk.* raised OSError: No space left on device"):
        announcer.announce(STARTED)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        announcer.announce(STARTED)
    assert calls == [STARTED]
    assert heard == [STARTED, STARTED]


def test_observers_that_all_raise_at_once_are_all_dropped() -> None:
    def broken(event: object) -> None:
        raise ValueError("first")

    def broken_too(event: object) -> None:
        raise KeyError("second")

    announcer = Announcer([broken, broken_too])
    with pytest.warns(UserWarning, match="it is not called any more") as caught:
        announcer.announce(STARTED)
    assert len(caught) == 2
    assert announcer.observers == ()


def test_an_interrupt_in_an_observer_is_not_swallowed() -> None:
    def interrupted(event: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Announcer([interrupted]).announce(STARTED)


def test_without_observers_no_event_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("an event was built")

    for name in ("RoundStarted", "RoundFinished", "RoundFailed"):
        monkeypatch.setattr(f"averagers.events.{name}", refuse)
    report = _report()
    report.started(1, 1)
    report.finished(1, None)
    report.failed(RuntimeError("x"))


def test_observers_that_are_not_a_list_of_callables_are_refused() -> None:
    with pytest.raises(TypeError, match=r"observers must be a list of callables, got <built-in function print>"):
        Announcer(print)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"each of observers must be callable with an event, got 3"):
        Announcer([print, 3])  # type: ignore[list-item]


def test_a_generator_of_observers_is_read_once() -> None:
    heard: list[object] = []
    announcer = Announcer(append for append in [heard.append])
    announcer.announce(STARTED)
    announcer.announce(STARTED)
    assert len(heard) == 2


def test_the_public_names_are_these_classes() -> None:
    assert averagers.RoundStarted is RoundStarted
    assert averagers.RoundFinished is RoundFinished
    assert averagers.RoundFailed is RoundFailed
