"""On CUDA, what another thread does goes through a stream of its own: in which order, told by stand-ins for torch's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from averagers.reduction import pytorch

CUDA = torch.device("cuda", 0)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the stand-ins were told."""
    told: list[str] = []

    class Stream:
        def __init__(self, name: Any) -> None:
            self.name = f"the caller's on {name}" if isinstance(name, str) else f"another on {name}"

        def record_event(self) -> str:
            told.append(f"record on {self.name}")
            return f"what {self.name} has queued"

        def wait_event(self, event: str) -> None:
            told.append(f"{self.name} waits for {event}")

        def synchronize(self) -> None:
            told.append(f"wait for {self.name}")

    @contextmanager
    def current(stream: Stream) -> Iterator[None]:
        told.append(f"on {stream.name}")
        yield
        told.append(f"off {stream.name}")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(str(device)))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", current)
    pytorch._stream_beside.cache_clear()
    yield told
    pytorch._stream_beside.cache_clear()


def test_it_waits_for_what_the_caller_queued_before_and_ends_before_it_is_left(log: list[str]) -> None:
    beside = pytorch.PYTORCH.operations.beside({CUDA, torch.device("cpu")})
    assert log == ["record on the caller's on cuda:0"]
    with beside:
        log.append("work")
    assert log[1:] == [
        "on another on cuda:0",
        "another on cuda:0 waits for what the caller's on cuda:0 has queued",
        "work",
        "wait for another on cuda:0",
        "off another on cuda:0",
    ]


def test_every_round_of_a_device_takes_the_same_stream(log: list[str]) -> None:
    assert pytorch._stream_beside(CUDA) is pytorch._stream_beside(torch.device("cuda", 0))
    assert pytorch._stream_beside(CUDA) is not pytorch._stream_beside(torch.device("cuda", 1))


def test_on_the_cpu_nothing_is_asked_of_cuda(log: list[str]) -> None:
    with pytorch.PYTORCH.operations.beside({torch.device("cpu")}):
        pass
    assert log == []
