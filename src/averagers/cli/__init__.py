"""The command ``averagers``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from averagers.errors import AveragersError

main = typer.Typer(
    name="averagers",
    help="Train one model on many machines by averaging models now and then.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_INTERRUPTED = 130  # what shells report for a program that Ctrl-C ended


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        import averagers

        typer.echo(f"averagers {averagers.__version__}")
        raise typer.Exit


@main.callback()
def _averagers(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@main.command()
def demo(
    seed: Annotated[int, typer.Option(min=0, help="Of the first weights and of the order of the data.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the picture and the JSON lines.")] = Path("averagers-demo"),
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of each run; fewer end sooner and prove less.")
    ] = None,
    picture: Annotated[bool, typer.Option(help="Draw demo.png, which needs matplotlib.")] = True,
) -> None:
    """Train a small language model three ways on 4 processes, and compare loss and bytes sent.

    Data parallel at every step (DDP), hierarchical averaging, periodic averaging; about 2 minutes on 2 cores.
    """
    with _errors_in_one_line():
        from rich.console import Console

        from averagers.cli.demo import run_demo
        from averagers.cli.demo_task import Task

        task = Task(str(out), seed) if steps is None else Task(str(out), seed, steps)
        run_demo(task, Console(), with_picture=picture)


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    """End the command with one line on the standard error stream, whatever is foreseen to go wrong."""
    try:
        yield
    except KeyboardInterrupt:
        _fail("interrupted", exit_code=_INTERRUPTED)
    except AveragersError as error:
        details = getattr(error, "details", None)
        if details:
            typer.echo(details, err=True)
        _fail(str(error))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}")


def _fail(message: str, *, exit_code: int = 1) -> None:
    typer.echo(f"averagers: {message}", err=True)
    raise typer.Exit(exit_code)
