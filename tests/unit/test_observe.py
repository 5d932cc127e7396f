"""The sinks of events: one line a round on the console, one JSON object a line in a file."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console as RichConsole

import averagers
from averagers.errors import MissingDependencyError
from averagers.events import Event, RoundFailed, RoundFinished, RoundStarted

STARTED = RoundStarted("average_parameters", 32, 1, 4, 0, 14, 250_000)
FINISHED = RoundFinished("average_parameters", 32, 1, 4, 0, 14, 250_000, 1_500_000, 0.0123, 1.5)
FAILED = RoundFailed("finish", 40, 1, 4, 0, 30.0, "the round failed:\nconnection closed", (2, 3))


def printed(*events: Event, **options: Any) -> list[str]:
    """Return the lines that a console prints of ``events``; narrow, so that a long line would wrap."""
    output = io.StringIO()
    console = averagers.Console(console=RichConsole(file=output, width=40), **options)
    for event in events:
        console(event)
    return output.getvalue().splitlines()


def test_a_finished_round_is_one_line_with_step_level_ranks_time_bytes_and_drift() -> None:
    (line,) = printed(STARTED, FINISHED)
    assert line.split() == ["step", "32", "level", "1", "4", "ranks", "12.3", "ms", "1.5", "MB", "sent", "drift", "1.5"]


def test_a_round_without_drift_shows_none_and_one_outside_the_schedule_says_who_asked() -> None:
    (line,) = printed(dataclasses.replace(FINISHED, drift=None, call="finish", seconds=2.0, wire_bytes=999))
    assert line.split() == ["step", "32", "level", "1", "4", "ranks", "2.00", "s", "999", "B", "sent", "finish"]


def test_a_failed_round_is_one_line_with_the_error_and_the_missing_ranks() -> None:
    (line,) = printed(FAILED)
    assert line.endswith("FAILED: the round failed: connection closed (missing ranks: 2, 3)")
    (line,) = printed(dataclasses.replace(FAILED, missing_ranks=()))
    assert line.endswith("FAILED: the round failed: connection closed")


def test_only_the_rounds_of_the_chosen_rank_are_printed() -> None:
    others = dataclasses.replace(FINISHED, rank=3)
    assert printed(others) == []
    assert len(printed(others, FINISHED, rank=3)) == 1


def test_an_error_with_square_brackets_is_printed_as_it_is() -> None:
    (line,) = printed(dataclasses.replace(FAILED, error="shape [3, 4] is not [bold]", missing_ranks=()))
    assert line.endswith("shape [3, 4] is not [bold]")


@pytest.mark.parametrize(
    ("wire_bytes", "size"), [(0, "0 B"), (1000, "1.0 kB"), (12_345_678, "12.3 MB"), (5 * 10**12, "5000.0 GB")]
)
def test_sizes_are_in_units_that_can_be_read(wire_bytes: int, size: str) -> None:
    (line,) = printed(dataclasses.replace(FINISHED, wire_bytes=wire_bytes))
    assert f" {size} sent" in line


def test_the_console_prints_on_the_error_stream(capsys: pytest.CaptureFixture[str]) -> None:
    averagers.Console()(FINISHED)
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("step     32")


def test_a_missing_rich_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(MissingDependencyError, match="pip install rich"):
        averagers.Console()


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_event_is_one_line_with_its_kind_and_time_and_fields(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    before = time.time()
    with averagers.JsonLines(path) as sink:
        for event in (STARTED, FINISHED, FAILED):
            sink(event)
    started, finished, failed = read(path)
    assert [line["event"] for line in (started, finished, failed)] == [
        "round_started",
        "round_finished",
        "round_failed",
    ]
    assert all(before <= line.pop("time") <= time.time() for line in (started, finished, failed))
    assert finished == {"event": "round_finished", **dataclasses.asdict(FINISHED)}
    assert failed["missing_ranks"] == [2, 3]


@pytest.mark.parametrize("path", [None, 3, "", True])
def test_what_is_no_path_is_refused_by_name(path: Any) -> None:
    with pytest.raises(averagers.InvalidTypeError, match="path must be the path of a file"):
        averagers.JsonLines(path)


def test_a_line_is_in_the_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    sink = averagers.JsonLines(path)
    sink(FINISHED)
    assert read(path)[0]["step"] == 32
    sink.close()
    sink.close()
    with pytest.raises(ValueError, match="closed"):
        sink(FINISHED)


def test_a_file_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    for step in (1, 2):
        with averagers.JsonLines(str(path)) as sink:
            sink.write("note", {"step": step})
    assert [line["step"] for line in read(path)] == [1, 2]


def test_a_number_that_json_cannot_hold_is_null(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    with averagers.JsonLines(path) as sink:
        sink(dataclasses.replace(FINISHED, drift=math.nan))
        sink(dataclasses.replace(FINISHED, drift=math.inf))
    assert [line["drift"] for line in read(path)] == [None, None]


def test_after_a_line_that_was_cut_short_the_next_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    path.write_text('{"event": "note", "st')
    with averagers.JsonLines(path) as sink:
        sink(FINISHED)
        sink(FAILED)
    lines = path.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines[1:]] == [32, 40]


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")
    sink = averagers.JsonLines("/dev/full")
    with pytest.raises(OSError, match="/dev/full") as caught:
        sink(FINISHED)
    assert caught.value.errno == errno.ENOSPC
    sink.close()


def test_a_line_that_fits_only_in_part_is_an_error_and_the_next_one_starts_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class AlmostFull:
        def __init__(self, room: int) -> None:
            self.room, self.written = room, b""

        def write(self, data: bytes) -> int:
            taken = data[: self.room]
            self.room, self.written = 10**6, self.written + taken
            return len(taken)

    sink = averagers.JsonLines(tmp_path / "rounds.jsonl")
    file, almost_full = sink._file, AlmostFull(room=10)
    monkeypatch.setattr(sink, "_file", almost_full)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        sink(FINISHED)
    sink(FAILED)
    file.close()
    assert json.loads(almost_full.written.splitlines()[1])["step"] == 40


def test_a_folder_that_does_not_exist_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        averagers.JsonLines(tmp_path / "nowhere" / "rounds.jsonl")


def test_a_sink_shows_its_file() -> None:
    with averagers.JsonLines(os.devnull) as sink:
        assert repr(sink) == f"JsonLines({os.devnull!r})"
