"""The command: its help, its version, and one clear line for whatever is foreseen to go wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import averagers
from averagers.cli import main
from averagers.cli.demo import run_demo
from averagers.cli.launch import RanksFailedError


def invoke(*arguments: str) -> tuple[int, str, str]:
    """Return the exit code and what was printed on the output and the error stream."""
    result = CliRunner().invoke(main, list(arguments), env={"COLUMNS": "100", "TERM": "dumb"})
    return result.exit_code, result.stdout, result.stderr


def forbid(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Make ``package`` look as if it were not installed."""
    import importlib.util

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == package else find_spec(name, *rest)
    )


def test_help_lists_each_command() -> None:
    exit_code, output, _ = invoke("--help")
    assert exit_code == 0
    commands = [command.name or command.callback.__name__ for command in main.registered_commands if command.callback]
    assert commands == ["demo"]
    assert all(command in output for command in commands)


def test_help_of_a_command_lists_its_options() -> None:
    exit_code, output, _ = invoke("demo", "--help")
    assert exit_code == 0
    for option in ("--seed", "--out", "--steps", "--no-picture"):
        assert option in output


def test_version_is_that_of_the_package() -> None:
    assert invoke("--version") == (0, f"averagers {averagers.__version__}\n", "")


def test_loading_the_command_imports_neither_torch_nor_matplotlib() -> None:
    code = "import sys, averagers.cli; print({'torch', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("package", "remedy"),
    [("torch", "pip install torch"), ("matplotlib", "pip install 'averagers[plot]', or say --no-picture")],
)
def test_a_missing_package_is_one_line_that_says_what_to_type(
    package: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid(monkeypatch, package)
    exit_code, output, errors = invoke("demo", "--out", str(tmp_path / "demo"))
    assert (exit_code, output) == (1, "")
    assert errors == f"averagers: {package} is not installed: {remedy}\n"
    assert not (tmp_path / "demo").exists()


def test_a_folder_that_cannot_be_made_is_one_line_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    exit_code, output, errors = invoke("demo", "--no-picture", "--out", str(tmp_path / "file" / "demo"))
    assert (exit_code, output) == (1, "")
    assert errors == f"averagers: {tmp_path / 'file' / 'demo'}: Not a directory\n"


@pytest.mark.parametrize(
    ("error", "exit_code", "line"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(28, "No space left on device", "demo/ddp.jsonl"), 1, "demo/ddp.jsonl: No space left on device"),
        (OSError("no address"), 1, "no address"),
        (RanksFailedError("rank 2: loss is NaN", "Traceback:\n  where"), 1, "rank 2: loss is NaN"),
    ],
)
def test_what_ends_a_demo_is_told_in_the_last_line(
    error: BaseException, exit_code: int, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("averagers.cli.demo.run_demo", fail)
    code, _, errors = invoke("demo")
    assert code == exit_code
    details = getattr(error, "details", None)
    assert errors == (f"{details}\n" if details else "") + f"averagers: {line}\n"


def test_an_option_of_the_wrong_kind_is_refused_with_its_name() -> None:
    for option, value in (("--seed", "-1"), ("--steps", "0"), ("--steps", "many")):
        exit_code, _, errors = invoke("demo", option, value)
        assert exit_code == 2
        assert option in errors


def test_the_demo_itself_raises_for_callers_who_are_not_a_command(tmp_path: Path) -> None:
    from rich.console import Console

    from averagers.cli.demo_task import Task

    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        run_demo(Task(str(tmp_path / "file" / "demo")), Console(), with_picture=False)
