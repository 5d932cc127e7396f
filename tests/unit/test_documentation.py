"""The examples in README and docstrings run: each block in its order, on one rank, with a small model."""

from __future__ import annotations

import doctest
import functools
import importlib
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest

import averagers as package
import frameworks
from frameworks import averagers, dist, lib
from ranks_runner import run_ranks

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
MODULES = sorted(module.name for module in pkgutil.walk_packages(package.__path__, "averagers."))


def names_that_examples_use(folder: str) -> dict[str, Any]:
    """What a reader has at hand: a model, an optimizer, data, a place for files."""
    from torch.distributed.device_mesh import init_device_mesh

    model = lib.nn.Linear(3, 2)
    data = [(lib.randn(4, 3), lib.randn(4, 2)) for _ in range(3)]
    return {
        "functools": functools,
        "torch": lib,
        "dist": dist,
        "averagers": averagers,
        "init_device_mesh": init_device_mesh,
        "model": model,
        "optimizer": lib.optim.SGD(model.parameters(), lr=0.1),
        "loss_fn": lib.nn.MSELoss(),
        "data": data,
        "batch": data[0][0],
        "labels": data[0][1],
        "path": f"{folder}/model.pt",
        "folder": f"{folder}/checkpoint",
    }


def in_one_rank_of_four(source: str) -> str:
    """Examples speak of more ranks than there are here."""
    return source.replace("{4: 2, 32: 4}", "{4: 1, 32: 1}").replace('"rounds.jsonl"', "folder + '.jsonl'")


def run_block(rank: int, block: str, folder: str) -> None:
    names = names_that_examples_use(folder)
    names["averager"] = averagers.PeriodicModelAverager(4)
    exec(compile(in_one_rank_of_four(block), "README.md", "exec"), names)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_every_python_block_of_the_readme_runs(block: str, tmp_path: Path) -> None:
    frameworks.use("tensorplay" if "tensorplay" in block else "torch")
    run_ranks(run_block, 1, block, str(tmp_path))
    frameworks.use("torch")


def run_docstrings(rank: int, module_name: str, folder: str) -> tuple[int, int, str]:
    module = importlib.import_module(module_name)
    output: list[str] = []
    finder = doctest.DocTestFinder()
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in finder.find(module, module_name):
        names = names_that_examples_use(folder)
        test.globs.update(names, averager=averagers.PeriodicModelAverager(4))
        for example in test.examples:
            example.source = in_one_rank_of_four(example.source)
        runner.run(test, out=output.append)
    return runner.tries, runner.failures, "".join(output)


WITH_EXAMPLES = [name for name in MODULES if ">>>" in Path(importlib.import_module(name).__file__ or "").read_text()]


@pytest.mark.parametrize("module_name", WITH_EXAMPLES)
def test_the_examples_in_the_docstrings_run(module_name: str, tmp_path: Path) -> None:
    frameworks.use("tensorplay" if module_name == "averagers.tensorplay" else "torch")
    tries, failures, output = run_ranks(run_docstrings, 1, module_name, str(tmp_path))[0]
    frameworks.use("torch")
    assert tries > 0
    assert failures == 0, output


def test_every_public_name_is_documented_with_an_example_where_it_is_called() -> None:
    for name in package.__all__:
        value = getattr(package, name)
        if isinstance(value, type) and not issubclass(value, Exception):
            assert value.__doc__, name
    for name in ("attach", "average_parameters", "PeriodicModelAverager", "HierarchicalModelAverager"):
        assert ">>>" in getattr(package, name).__doc__
