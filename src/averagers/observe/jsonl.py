"""A sink that appends each event to a file, as one JSON object a line."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, final

from averagers.errors import InvalidTypeError
from averagers.events import Event


@final
class JsonLines:
    """Appends each event to ``path`` as a line ``{"event": "round_finished", "time": 1767225600.0, "step": 8, ...}``.

    ``time`` is in seconds since 1970, the other fields are the record's; a number that JSON cannot hold
    (NaN, infinity) is null. Each line is written at once and whole, so that a run that dies loses none.
    Ranks may share a file on one node's disk; on a network file system give each its own.

    Args:
        path: The file; it is made if it does not exist, and appended to if it does.

    Raises:
        InvalidTypeError: ``path`` is no path.
        OSError: the file cannot be opened.

    Example:
        >>> with averagers.JsonLines("rounds.jsonl") as sink:
        ...     averager = averagers.PeriodicModelAverager(4, observers=[sink])
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        given: object = path
        if not isinstance(given, str | os.PathLike) or not os.fspath(given):
            raise InvalidTypeError(f"path must be the path of a file, such as 'rounds.jsonl', got {path!r}")
        self.path = Path(path)
        # Unbuffered: nothing is left in a buffer for a full disk to lose, or for close() to fail on.
        self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115 - close() closes it
        self._is_torn = self._ends_within_a_line()

    def __call__(self, event: Event) -> None:
        """Append ``event``."""
        self.write(_kind(event), {field.name: getattr(event, field.name) for field in dataclasses.fields(event)})

    def write(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Append a line of your own between the events.

        Args:
            kind: What the line tells of, its ``"event"``.
            fields: The other fields, as JSON can hold them.

        Raises:
            OSError: the disk is full.
            ValueError: the file is closed.
        """
        record = {"event": kind, "time": time.time(), **fields}
        record = {name: None if _is_unwritable(value) else value for name, value in record.items()}
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        if self._is_torn:
            line = b"\n" + line
        try:
            written = self._file.write(line)
        except OSError as error:
            error.filename = str(self.path)
            raise
        self._is_torn = written != len(line)
        if self._is_torn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def close(self) -> None:
        """Close the file; closing it again does nothing."""
        self._file.close()

    def _ends_within_a_line(self) -> bool:
        """Return whether a run before this one died, or met a full disk, in the middle of a line."""
        try:
            self._file.seek(-1, os.SEEK_END)
        except OSError:  # empty, or not a file: a pipe, a terminal
            return False
        return self._file.read(1) != b"\n"

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"JsonLines({str(self.path)!r})"


def _is_unwritable(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _kind(event: Event) -> str:
    """Return the name of the event's class in snake case."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(event).__name__).lower()
