"""Progress of long work: a bar for people, few lines for logs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.console import Console

INTERVAL_S = 5.0
"""Least seconds between two log lines of one phase."""


class Progress:
    """A bar with the phase's name and the time left; plain lines if standard error is not a terminal.

    Use as a context manager, from one thread::

        with Progress() as progress:
            progress.phase("profiling", total=12)
            for module in modules:
                ...
                progress.advance(note=module)

    In a log this gives ``[12 s] profiling image ... 3/12, 36 s left``: one line when a phase starts, then one
    every five seconds at most. Output goes to ``console``, standard error by default.
    """

    def __init__(self, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        from rich import progress
        from rich.console import Console

        quiet = logging.getLogger("mosaic").level >= logging.ERROR
        self._console = console if console is not None else Console(stderr=True, quiet=quiet)
        # FORCE_COLOR makes rich treat a pipe as a terminal; a log file needs no bar.
        self._has_bar = self._console.is_interactive and self._console.file.isatty()
        text = progress.TextColumn("{task.description} {task.fields[note]}", markup=False)
        counts = (progress.MofNCompleteColumn(), progress.TimeElapsedColumn(), progress.TimeRemainingColumn())
        self._bar = progress.Progress(
            *(text, progress.BarColumn(bar_width=28), *counts),
            console=self._console,
            refresh_per_second=5,
            get_time=clock,
            disable=not self._has_bar,
        )
        self._clock = clock
        self._begun_s = self._printed_s = clock()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def phase(self, name: str, total: int | None = None) -> None:
        """Ends the last phase and starts one of ``total`` pieces; None if their number is unknown."""
        for task in self._bar.tasks[-1:]:
            self._bar.update(task.id, note="", total=1, completed=1)
            self._bar.stop_task(task.id)
        self._bar.add_task(name, total=total, note="")
        self._log()

    def advance(self, count: int = 1, *, note: str = "") -> None:
        """Counts ``count`` more finished pieces of the phase; ``note`` is the current piece."""
        self._bar.update(self._bar.tasks[-1].id, advance=count, note=note)
        if self._clock() - self._printed_s >= INTERVAL_S:
            self._log()

    def follow(self, name: str) -> Callable[[str, int, int], None]:
        """Returns a callback ``(piece, done, total)`` that shows the caller's progress as a phase."""

        def follow(piece: str, done: int, total: int) -> None:
            if not self._bar.tasks or self._bar.tasks[-1].description != name:
                self.phase(name, total=total)
            self.advance(done - int(self._bar.tasks[-1].completed), note=piece)

        return follow

    def _log(self) -> None:
        if self._has_bar:
            return
        task, now = self._bar.tasks[-1], self._clock()
        self._printed_s = now
        line = f"[{now - self._begun_s:.0f} s] {' '.join(filter(None, (task.description, task.fields['note'])))} ..."
        if task.total is not None or task.completed:
            line += f" {task.completed:.0f}" + (f"/{task.total:.0f}" if task.total is not None else "")
        if task.time_remaining:
            line += f", {task.time_remaining:.0f} s left"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
