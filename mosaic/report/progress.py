"""Progress of long work: a bar on a terminal, a line per phase in a log."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.console import Console


class Progress:
    """A bar with the phase's name and the remaining time, on ``console`` (by default standard error).

    ::

        with Progress() as progress:
            progress.phase("profiling", total=12)
            for module in modules:
                ...
                progress.advance(note=module)
    """

    def __init__(self, console: Console | None = None) -> None:
        from rich import progress
        from rich.console import Console

        quiet = logging.getLogger("mosaic").level >= logging.ERROR
        self._console = console if console is not None else Console(stderr=True, quiet=quiet)
        text = progress.TextColumn("{task.description} {task.fields[note]}", markup=False)
        counts = (progress.MofNCompleteColumn(), progress.TimeElapsedColumn(), progress.TimeRemainingColumn())
        # FORCE_COLOR makes rich treat a pipe as a terminal; a log file needs no bar.
        has_bar = self._console.is_interactive and self._console.file.isatty()
        self._bar = progress.Progress(text, progress.BarColumn(), *counts, console=self._console, disable=not has_bar)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def phase(self, name: str, total: int | None = None) -> None:
        """Ends the current phase and starts one of ``total`` pieces (None: unknown)."""
        for task in self._bar.tasks[-1:]:
            self._bar.update(task.id, note="", total=1, completed=1)
        self._bar.add_task(name, total=total, note="")
        if self._bar.disable:
            self._console.print(f"{name} ...", markup=False, highlight=False, soft_wrap=True)

    def advance(self, count: int = 1, *, note: str = "") -> None:
        """Adds ``count`` finished pieces; ``note`` is the current piece."""
        self._bar.update(self._bar.tasks[-1].id, advance=count, note=note)

    def follow(self, name: str) -> Callable[[str, int, int], None]:
        """Returns a callback ``(piece, done, total)`` that shows progress as a phase."""

        def follow(piece: str, done: int, total: int) -> None:
            if not self._bar.tasks or self._bar.tasks[-1].description != name:
                self.phase(name, total=total)
            self._bar.update(self._bar.tasks[-1].id, completed=done, note=piece)

        return follow
