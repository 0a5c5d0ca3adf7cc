"""Progress of long work: a bar for people, few lines for logs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

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
                progress.note(module)
                ...
                progress.advance()

    In a log this gives ``[12 s] profiling image ... 3/12, 36 s left``: one line when a phase starts, then one
    every five seconds at most. Output goes to ``console``, standard error by default.
    """

    def __init__(self, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.console import Console

        quiet = logging.getLogger("mosaic").level >= logging.ERROR
        self._console = console if console is not None else Console(stderr=True, quiet=quiet)
        # FORCE_COLOR makes rich treat a pipe as a terminal; a log file needs no bar.
        is_terminal = self._console.is_interactive and self._console.file.isatty()
        self._bar: Any = _make_bar(self._console) if is_terminal else None
        self._clock = clock
        self._begun_s = self._phase_begun_s = self._printed_s = clock()
        self._task: Any = None
        self._name = self._note = ""
        self._total: int | None = None
        self._done = 0

    def __enter__(self) -> Self:
        self._begun_s = self._clock()
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def phase(self, name: str, total: int | None = None) -> None:
        """Ends the last phase and starts one of ``total`` pieces; None if their number is unknown."""
        self._name, self._note, self._total, self._done = name, "", total, 0
        self._phase_begun_s = self._clock()
        if self._bar is None:
            self._print()
            return
        if self._task is not None:
            self._bar.update(self._task, note="", total=1, completed=1)
            self._bar.stop_task(self._task)
        self._task = self._bar.add_task(name, total=total, note="")

    def advance(self, count: int = 1) -> None:
        """Counts ``count`` more finished pieces of the phase."""
        self._done += count
        self._update(advance=count)

    def note(self, text: str) -> None:
        """Shows the current piece beside the phase until the next note."""
        self._note = text
        self._update(note=text)

    def follow(self, name: str) -> Callable[[str, int, int], None]:
        """Returns a callback ``(piece, done, total)`` that shows the caller's progress as a phase."""

        def follow(piece: str, done: int, total: int) -> None:
            if self._name != name:
                self.phase(name, total=total)
            self.advance(done - self._done)
            self.note(piece)

        return follow

    def _update(self, **changes: Any) -> None:
        if self._bar is None:
            if self._clock() - self._printed_s >= INTERVAL_S:
                self._print()
        elif self._task is not None:
            self._bar.update(self._task, **changes)

    def _print(self) -> None:
        self._printed_s = now = self._clock()
        line = f"[{now - self._begun_s:.0f} s] {' '.join(filter(None, (self._name, self._note)))} ..."
        if self._total is not None or self._done:
            line += f" {self._done}" + (f"/{self._total}" if self._total is not None else "")
        if self._total and 0 < self._done < self._total:
            left_s = (now - self._phase_begun_s) / self._done * (self._total - self._done)
            line += f", {left_s:.0f} s left"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _make_bar(console: Console) -> Any:
    from rich import progress

    return progress.Progress(
        progress.TextColumn("{task.description} {task.fields[note]}", markup=False),
        progress.BarColumn(bar_width=28),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        console=console,
        refresh_per_second=5,
    )
