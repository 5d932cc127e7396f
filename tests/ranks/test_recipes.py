"""Every recipe's script runs, and its page shows the script's own lines."""

from __future__ import annotations

import ast
import importlib
import sys
import textwrap
from pathlib import Path

import pytest

from ranks_runner import run_ranks

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path.stem for path in (ROOT / "examples" / "recipes").glob("*.py") if path.stem != "task")


def _run(rank: int, name: str) -> float:
    sys.path.insert(0, str(ROOT / "examples" / "recipes"))
    recipe = importlib.import_module(name).recipe
    return float(importlib.import_module("task").train(recipe, 110))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_recipe_trains(name: str) -> None:
    assert max(run_ranks(_run, 2, name)) < 0.35  # from about 0.6


def test_there_is_a_page_for_every_script_and_it_shows_its_lines() -> None:
    folder = ROOT / "docs" / "recipes"
    assert sorted(path.stem for path in folder.glob("*.md")) == sorted([*SCRIPTS, "README"])
    for name in SCRIPTS:
        source = (ROOT / "examples" / "recipes" / f"{name}.py").read_text()
        recipe = next(node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
        lines = source.splitlines()[recipe.body[0].lineno - 1 : recipe.end_lineno]
        shown = textwrap.dedent("\n".join(lines)).replace("return averagers.", "training = averagers.")
        page = (folder / f"{name}.md").read_text()
        assert shown in page, name
        assert f"({name}.md)" in (folder / "README.md").read_text()
        assert "arxiv.org" in page
