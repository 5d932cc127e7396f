"""The demo's task: its warm-up, its learning rate, its text, and what is drawn and told of its runs."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from averagers.cli import demo_report
from averagers.cli.demo_task import GLOBAL_PERIOD, NODE_PERIOD, RUNS, Evaluation, Run, RunResult, Task
from averagers.cli.language_model import ByteTransformer, batches, help_text, next_byte_loss, split
from averagers.cli.traffic import Traffic


@given(st.integers(1, 10**6))
def test_the_warm_up_is_at_most_6_percent_and_ends_where_a_round_of_all_is_due(num_steps: int) -> None:
    task = Task("out", num_steps=num_steps)
    assert task.warmup_steps <= 0.06 * num_steps
    assert task.warmup_steps % GLOBAL_PERIOD == 0


@given(st.integers(1, 10**5))
def test_evaluations_meet_rounds_among_all_ranks(num_steps: int) -> None:
    assert Task("out", num_steps=num_steps).evaluation_period % GLOBAL_PERIOD == 0
    assert GLOBAL_PERIOD % NODE_PERIOD == 0


def test_the_default_task_sends_ten_times_fewer_bytes_between_nodes_than_data_parallel() -> None:
    task = Task("out")
    rounds = (task.num_steps - task.warmup_steps) / GLOBAL_PERIOD + 1
    assert task.num_steps / (task.warmup_steps + rounds) >= 10.5


def test_the_learning_rate_rises_then_falls() -> None:
    factors = [Task("out").learning_rate_factor(step) for step in range(Task("out").num_steps)]
    peak = factors.index(max(factors))
    assert 0 < factors[0] < 0.1
    assert factors[:peak] == sorted(factors[:peak])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
    assert factors[-1] > 0


def test_the_text_is_split_by_position_without_overlap() -> None:
    text = help_text()
    training, validation = split(text, 64)
    assert len(text) > 300_000
    assert bytes(training.tolist()) == text[: len(text) * 9 // 10]
    assert validation[0].tolist() == list(text[len(training) : len(training) + 65])
    assert torch.equal(validation[1:, 0], validation[:-1, -1])


def test_a_seed_fixes_the_batches_and_targets_follow_inputs() -> None:
    training, _ = split(help_text(), 64)
    first, again, other = (next(batches(training, 3, 64, seed)) for seed in (1, 1, 2))
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], other[0])
    assert torch.equal(first[0][:, 1:], first[1][:, :-1])


def test_the_model_is_of_the_promised_size_and_cannot_see_the_future() -> None:
    torch.manual_seed(0)
    task = Task("out")
    model = ByteTransformer(task.width, task.num_layers, task.num_heads, task.context)
    assert 2e5 < sum(parameter.numel() for parameter in model.parameters()) < 2e6
    windows = torch.randint(256, (2, 16))
    changed = windows.clone()
    changed[:, 10:] = 0
    assert torch.allclose(model(windows)[:, :10], model(changed)[:, :10], atol=1e-5)
    assert next_byte_loss(model, windows[:, :-1], windows[:, 1:]).item() == pytest.approx(5.6, abs=0.8)


def results(losses: dict[Run, float]) -> dict[Run, RunResult]:
    traffic = {"ddp": Traffic(3000 * 10**6, 3000 * 10**6), "hierarchical": Traffic(900 * 10**6, 250 * 10**6)}
    rounds: dict[Run, dict[int, int]] = {"ddp": {}, "hierarchical": {2: 227, 4: 33}, "periodic": {4: 33}}
    return {
        run: RunResult(
            run,
            (Evaluation(97, 2.5, 10**6), Evaluation(1100, losses[run], 10**8)),
            41.5,
            traffic.get(run, Traffic(250 * 10**6, 250 * 10**6)),
            rounds[run],
            None if run == "ddp" else 0.5,
        )
        for run in RUNS
    }


def test_the_report_has_a_row_a_run_the_formula_and_what_follows() -> None:
    output = io.StringIO()
    runs = results({"ddp": 1.36, "hierarchical": 1.41, "periodic": 1.45})
    Console(width=80, file=output).print(demo_report.report(Task("out"), runs))
    text = output.getvalue()
    rows = [line.split() for line in text.splitlines()]
    assert ["DDP", "1.3600", "41.5", "3,000", "3,000", "-", "-", "-"] in rows
    assert ["hierarchical", "1.4100", "41.5", "900", "250", "227", "33", "0.500"] in rows
    assert ["periodic", "1.4500", "41.5", "250", "250", "-", "33", "0.500"] in rows
    assert "2(P-1)/P" in text
    assert "hierarchical / DDP validation loss: 1.037" in text
    assert "hierarchical / periodic validation loss: 0.972" in text
    assert "bytes between nodes, DDP / hierarchical: 12.0 times fewer" in text


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    demo_report.draw(results({"ddp": 1.36, "hierarchical": 1.41, "periodic": 1.45}), tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
