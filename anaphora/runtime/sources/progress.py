"""Shows how far a long preparation is, on stderr. Knows rich; knows nothing of models."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

Advance = Callable[[int], None]
"""Says how much of the total is done now; not how much came since."""


class Progress:
    """A bar for each stage, gone when the stage ends; one line a stage where stderr is no terminal.

    show: None shows it only on a terminal. bars: whether it is shown, and on a terminal.
    """

    def __init__(self, show: bool | None = None) -> None:
        terminal = sys.stderr is not None and sys.stderr.isatty()
        self.show = terminal if show is None else show
        self.bars = self.show and terminal

    @contextmanager
    def stage(self, description: str, total: int | None = None, *, brief: bool = False) -> Iterator[Advance]:
        """Yields an Advance. total: in any unit; None shows that something goes on, and no share.

        brief: too short to be worth a line where stderr is no terminal.
        """
        if not self.show or (brief and not self.bars):
            yield lambda _: None
            return
        console = Console(stderr=True, markup=False, emoji=False, highlight=False)
        if not console.is_terminal:
            console.print(f"{description} ...")
            yield lambda _: None
            return
        name = TextColumn("{task.description}", markup=False)
        columns = (name, BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        with RichProgress(*columns, console=console, transient=True) as bars:
            task = bars.add_task(description, total=total)
            yield lambda done: bars.update(task, completed=done)
