"""Waiting for a collective in slices: its end at the end of a slice is no failure, told by a stand-in for torch."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from averagers.reduction.pytorch import _Work


class EndsAsASliceDoes:
    """Ends right after a wait with a timeout has given up."""

    def __init__(self, failure: str | None) -> None:
        self.failure = failure

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout is not None:
            raise RuntimeError("Operation timed out!")
        if self.failure is not None:
            raise RuntimeError(self.failure)
        return True

    def is_completed(self) -> bool:
        return True


def test_a_collective_that_ends_as_a_slice_does_has_not_failed() -> None:
    work: Any = EndsAsASliceDoes(None)
    assert _Work(work, "cpu").ends_within(1.0)


def test_one_that_fails_then_raises_its_own_error() -> None:
    work: Any = EndsAsASliceDoes("Connection closed by peer")
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        _Work(work, "cpu").ends_within(1.0)
