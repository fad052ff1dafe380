"""A progress bar on the terminal's error stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(name: str, total: int, shown: bool = True) -> Iterator[Callable[[], None]]:
    """Show a progress bar while the block runs, where standard error is a terminal.

    Args:
        name: the bar's label.
        total: number of steps.
        shown: False hides the bar, as on all devices but the first.

    Yields:
        A function that advances the bar by one step.
    """
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not (shown and console.is_terminal), transient=True) as progress:
        task = progress.add_task(name, total=total)
        yield lambda: progress.advance(task)
