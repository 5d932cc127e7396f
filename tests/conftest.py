"""Runs a shared test once on each framework: a test or module that uses the fixture ``framework`` is one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import frameworks


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--framework",
        choices=sorted(frameworks.MODULES),
        help="run only the shared tests of the semantics, and these on this framework only",
    )


@pytest.fixture(params=sorted(frameworks.MODULES))
def framework(request: pytest.FixtureRequest) -> Iterator[str]:
    """Let the modules of `frameworks` stand for one framework, here and on the ranks that a test starts."""
    frameworks.use(request.param)
    yield request.param
    frameworks.use("torch")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked = config.getoption("--framework")
    if asked is None:
        return
    kept = [item for item in items if _framework_of(item) == asked]
    if not kept:
        raise pytest.UsageError(f"--framework={asked}: none of the {len(items)} tests here runs on it")
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def _framework_of(item: pytest.Item) -> str | None:
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get("framework")
