"""Parity on TensorPlay: the same weights as on torch, and as TensorPlay's own averagers; and what is torch's alone."""

from __future__ import annotations

import importlib
import inspect
import os
import random
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

import averagers.tensorplay
import frameworks
from frameworks import averagers as ours
from frameworks import dist, lib
from ranks_runner import run_ranks

ROOT = Path(__file__).parents[2]


@pytest.fixture
def on_tensorplay() -> Any:
    frameworks.use("tensorplay")
    yield
    frameworks.use("torch")


def _own(name: str) -> Any:
    """Return the framework's own averager of this name."""
    package = f"{frameworks.MODULES[frameworks.current()]['dist']}.algorithms.model_averaging"
    module = {"PeriodicModelAverager": "averagers", "HierarchicalModelAverager": "hierarchical_model_averager"}[name]
    return getattr(importlib.import_module(f"{package}.{module}"), name)


# The same seeds and steps


def _numbers(seed: int, *shape: int) -> Any:
    numbers = random.Random(seed)
    rows = [[numbers.gauss(0.0, 1.0) for _ in range(shape[-1])] for _ in range(shape[0])]
    return lib.tensor(rows, dtype=lib.float32)


def _train(rank: int, who: str, kind: str) -> list[list[float]]:
    """Train a small network on this rank's own data and return its weights after each of 17 steps."""
    model = lib.nn.Sequential(lib.nn.Linear(6, 8), lib.nn.Tanh(), lib.nn.Linear(8, 3))
    with lib.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(_numbers(index, 1, parameter.numel()).view(parameter.shape))
    optimizer = lib.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    world_size = dist.get_world_size()
    levels = OrderedDict([(2, 2), (4, world_size)]) if world_size > 2 else OrderedDict([(2, 1), (4, 2)])
    make = getattr(ours, kind) if who == "ours" else _own(kind)
    averager = make(3 if kind == "PeriodicModelAverager" else levels, warmup_steps=2)
    history = []
    for step in range(17):
        inputs, targets = _numbers(1000 + 100 * rank + step, 5, 6), _numbers(2000 + 100 * rank + step, 5, 3)
        ((model(inputs) - targets) ** 2).mean().backward()
        optimizer.step()
        averager.average_parameters(model.parameters())
        optimizer.zero_grad()
        history.append([value for parameter in model.parameters() for value in parameter.detach().reshape(-1).tolist()])
    return history


def _trained(framework: str, who: str, kind: str, world_size: int) -> list[list[list[float]]]:
    frameworks.use(framework)
    try:
        return run_ranks(_train, world_size, who, kind)
    finally:
        frameworks.use("torch")


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("kind", ["PeriodicModelAverager", "HierarchicalModelAverager"])
def test_the_same_run_ends_with_the_same_weights_on_both_frameworks_with_both_makes(kind: str, world_size: int) -> None:
    expected = _trained("tensorplay", "ours", kind, world_size)
    others = [("tensorplay", "own"), ("torch", "ours"), ("torch", "own")]
    for framework, who in others:
        found = _trained(framework, who, kind, world_size)
        for rank in range(world_size):
            for step, (one, other) in enumerate(zip(expected[rank], found[rank], strict=True)):
                assert one == pytest.approx(other, rel=2e-5, abs=2e-6), (framework, who, rank, step)


# What TensorPlay's users write


def _example(rank: int) -> tuple[bool, int]:
    """The example of the API documentation, word for word but for the data."""
    model = lib.nn.Linear(3, 2)
    optimizer = lib.optim.SGD(model.parameters(), lr=0.1)
    loss_fn = lib.nn.MSELoss()
    averager = ours.PeriodicModelAverager(period=4, warmup_steps=100)
    for step in range(200):
        optimizer.zero_grad()
        output, labels = model(_numbers(rank + step, 4, 3)), _numbers(rank + step, 4, 2)
        loss = loss_fn(output, labels)
        loss.backward()
        optimizer.step()
        # Will average model parameters globally every 4 steps.
        averager.average_parameters(model.parameters())
    averager.finish(model.parameters())
    gathered = [lib.zeros(2, 3) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, model.weight.detach())
    return all(one.tolist() == gathered[0].tolist() for one in gathered), averager.step


def test_the_example_of_the_api_runs_and_ends_as_one_model(on_tensorplay: None) -> None:
    assert run_ranks(_example, 2) == [(True, 200)] * 2


def _wrapped(rank: int) -> tuple[list[float], list[float], int, int]:
    from tensorplay.distributed.optim import PostLocalSGDOptimizer

    def optimizer(start: float) -> tuple[Any, Any]:
        weight = lib.nn.Parameter(lib.full((3,), start))
        averager = ours.PeriodicModelAverager(period=2, warmup_steps=1)
        return weight, PostLocalSGDOptimizer(optim=lib.optim.SGD([weight], lr=1.0), averager=averager)

    weight, wrapper = optimizer(float(rank))
    for _ in range(2):
        wrapper.zero_grad()
        (weight * (rank + 1)).sum().backward()
        wrapper.step()
    other, loaded = optimizer(9.0)
    loaded.load_state_dict(wrapper.state_dict())
    return weight.tolist(), other.tolist(), wrapper.averager.step, loaded.averager.step


def test_tensorplays_post_local_sgd_optimizer_runs_and_saves_our_averager(on_tensorplay: None) -> None:
    # From 0 and 1 two steps of -1 and -2, averaged after the second.
    assert run_ranks(_wrapped, 2) == [([-2.5] * 3, [9.0] * 3, 2, 2)] * 2


def test_the_example_trains_and_ends_as_one_model() -> None:
    launcher = [sys.executable, "-m", "tensorplay.distributed.run", "--nproc-per-node", "4", "--"]
    program = [*launcher, "examples/train_tensorplay.py", "--steps", "102"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    figures = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line and "Averager" not in line)
    before, after = (float(figures[f"validation loss {when} training"].split()[0]) for when in ("before", "after"))
    assert after < 0.6 * before
    assert float(figures["drift before the last round"]) > 0.1
    assert figures["drift after it"] == "0"


@pytest.mark.parametrize("name", ["ModelAverager", "PeriodicModelAverager", "HierarchicalModelAverager"])
def test_positional_arguments_are_tensorplays_in_their_order_with_their_defaults(
    name: str, on_tensorplay: None
) -> None:
    def positional(kind: type) -> list[inspect.Parameter]:
        parameters = inspect.signature(kind).parameters.values()
        return [one for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]

    theirs = importlib.import_module("tensorplay.distributed.algorithms.model_averaging")
    pairs = zip(positional(getattr(ours, name)), positional(getattr(theirs, name)), strict=True)
    for one, other in pairs:
        assert one.name == other.name
        # What must be given there may be left out here, where a keyword takes its place.
        assert one.default == (None if other.default is other.empty and one.name == "period" else other.default)


def _kinds(rank: int) -> list[bool]:
    averager = ours.HierarchicalModelAverager({2: 2})
    group = averager.period_process_group_dict[2]
    return [
        isinstance(averager, ours.ModelAverager),
        isinstance(group, dist.ProcessGroup),
        averager.process_group is dist.GroupMember.WORLD,
        group is not dist.GroupMember.WORLD,
    ]


def test_averagers_are_of_the_base_class_and_hand_out_tensorplays_groups(on_tensorplay: None) -> None:
    assert run_ranks(_kinds, 2) == [[True] * 4] * 2


def _tensors_of_the_other(rank: int) -> list[str]:
    import torch

    messages = []
    averager = ours.PeriodicModelAverager(2)
    for action in (
        lambda: averager.average_parameters([torch.zeros(1)]),
        lambda: ours.PeriodicModelAverager(2, process_group=torch),
        lambda: importlib.import_module("averagers").PeriodicModelAverager(2),
    ):
        with pytest.raises(ours.AveragersError) as caught:
            action()
        messages.append(str(caught.value))
    return messages


def test_what_belongs_to_torch_is_refused_with_a_message_that_says_so(on_tensorplay: None) -> None:
    for tensor, group, world in run_ranks(_tensors_of_the_other, 2):
        assert "params[0] must be a tensor, a (name, tensor) pair or a parameter group" in tensor
        assert "process_group must be a tensorplay.distributed.ProcessGroup or None" in group
        assert "torch.distributed.init_process_group()" in world


# What is there, and what is not


def _imported(code: str, names: set[str]) -> str:
    """Return which of ``names`` are imported after ``code`` ran in a fresh interpreter."""
    check = f"{code}\nimport sys; print(sorted({names!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def test_neither_framework_imports_the_other() -> None:
    one = "import averagers.tensorplay as averagers; averagers.PeriodicModelAverager, averagers.Console"
    assert _imported(one, {"torch", "tensorplay"}) == "['tensorplay']"
    other = "import averagers, averagers.reduction.pytorch, averagers.training.optimizer"
    assert _imported(other, {"torch", "tensorplay"}) == "['torch']"


def test_without_tensorplay_the_error_says_what_to_type() -> None:
    code = "import sys; sys.modules['tensorplay'] = None; import averagers.tensorplay"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "MissingDependencyError" in done.stderr
    assert "pip install 'averagers[tensorplay]'" in done.stderr


@pytest.mark.parametrize("piece", ["distributed_core._ensure_comm", "all_to_all_single"])
def test_a_missing_piece_is_named(piece: str) -> None:
    whole = "tensorplay.distributed"
    code = f"import {whole}.distributed_core; del {whole}.{piece}; import averagers.tensorplay"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "MissingDependencyError: averaging needs tensorplay.distributed." in done.stderr
    assert f"{piece}, which TensorPlay 1.0.0" in done.stderr


def test_gloo_is_used_although_the_flag_says_that_nothing_is_available(on_tensorplay: None) -> None:
    assert lib.distributed.is_available() is False
    assert run_ranks(_kinds, 2) == [[True] * 4] * 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("attach", "wrap the optimizer in tensorplay.distributed.optim.PostLocalSGDOptimizer"),
        ("ModelAveragingOptimizer", "wrap the optimizer in tensorplay.distributed.optim.PostLocalSGDOptimizer"),
        ("post_local_sgd_hook", "it needs DistributedDataParallel.register_comm_hook, which TensorPlay 1.0.0"),
        ("PostLocalSGDState", "it needs DistributedDataParallel.register_comm_hook, which TensorPlay 1.0.0"),
        ("Averager", "has no attribute 'Averager'"),
    ],
)
def test_what_tensorplay_cannot_have_says_why(name: str, words: str) -> None:
    with pytest.raises(AttributeError, match="has no attribute") as caught:
        getattr(averagers.tensorplay, name)
    assert words in str(caught.value)


def test_from_mesh_says_that_it_is_for_torch() -> None:
    with pytest.raises(averagers.tensorplay.InvalidTypeError, match="from_mesh takes a DeviceMesh of torch"):
        averagers.tensorplay.HierarchicalModelAverager.from_mesh(None, {"replicate": 4})


def test_the_hook_is_probed_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithHook:
        register_comm_hook = print

    monkeypatch.setattr(importlib.import_module("tensorplay.nn.parallel"), "DistributedDataParallel", WithHook)
    with pytest.raises(AttributeError, match="it works on torch's DistributedDataParallel"):
        _ = averagers.tensorplay.post_local_sgd_hook


def test_every_public_name_loads_and_what_is_shared_is_the_same() -> None:
    import averagers as of_torch

    for name in averagers.tensorplay.__all__:
        value = getattr(averagers.tensorplay, name)
        own = name in ("ModelAverager", "PeriodicModelAverager", "HierarchicalModelAverager", "average_parameters")
        assert (value is getattr(of_torch, name)) != own


# The parameter of the shared tests


def _pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)


def test_asking_for_a_framework_whose_tests_collect_nothing_fails() -> None:
    done = _pytest("--framework=tensorplay", "tests/unit/test_layout.py")
    assert done.returncode != 0
    assert "--framework=tensorplay: none of the" in done.stdout + done.stderr


@pytest.mark.parametrize("framework", ["torch", "tensorplay"])
def test_asking_for_a_framework_collects_the_shared_tests_on_it_alone(framework: str) -> None:
    done = _pytest(f"--framework={framework}", "tests/semantics")
    assert done.returncode == 0
    tests = [line for line in done.stdout.splitlines() if "::" in line]
    assert len(tests) > 50
    assert all(f"[{framework}" in test for test in tests)
