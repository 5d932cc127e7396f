"""A sink that prints one line a round."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from averagers.errors import MissingDependencyError
from averagers.events import Event, RoundFailed, RoundFinished, RoundStarted

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.text import Text


@final
class Console:
    """Prints a line for each round that finished or failed, of one rank.

    Args:
        rank: The global rank whose rounds are printed; the other ranks' instances print nothing.
        console: Where to print, a `rich.console.Console`; None means the standard error stream.

    Raises:
        MissingDependencyError: rich is not installed.

    Example:
        >>> averager = averagers.PeriodicModelAverager(4, observers=[averagers.Console()])
    """

    def __init__(self, *, rank: int = 0, console: RichConsole | None = None) -> None:
        if console is None:
            try:
                from rich.console import Console as RichConsole
            except ImportError as error:
                raise MissingDependencyError("rich is not installed: pip install rich") from error
            console = RichConsole(stderr=True)
        self._rank = rank
        self._console = console

    def __call__(self, event: Event) -> None:
        """Print ``event``, unless it is a round's start or another rank's."""
        if event.rank == self._rank and not isinstance(event, RoundStarted):
            self._console.print(_line(event), soft_wrap=True)


def _line(event: RoundFinished | RoundFailed) -> Text:
    from rich.text import Text

    head = f"step {event.step:>6}  level {event.level}  {event.group_size:>4} ranks  {_time(event.seconds):>9}"
    line = Text(head, style="default")
    if isinstance(event, RoundFinished):
        line.append(f"  {_size(event.wire_bytes):>9} sent")
        if event.drift is not None:
            line.append(f"  drift {event.drift:.4g}")
        if event.call != "average_parameters":
            line.append(f"  {event.call}")
        return line
    line.append("  FAILED: ", style="bold red")
    # The message may span lines; a round has one.
    line.append(" ".join(event.error.split()))
    if event.missing_ranks:
        line.append(f" (missing ranks: {', '.join(map(str, event.missing_ranks))})")
    return line


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
