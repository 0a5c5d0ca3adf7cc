"""Progress of long work: a bar for people, few lines for logs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

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
    every five seconds at most.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        animated: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Shows nothing before the first phase.

        Args:
            console: Output; standard error by default.
            animated: Draw a moving bar; by default if ``console`` is a real terminal.
            clock: A monotonic clock in seconds.
        """
        from rich.console import Console

        quiet = logging.getLogger("mosaic").level >= logging.ERROR
        self._console = console if console is not None else Console(stderr=True, quiet=quiet)
        # FORCE_COLOR makes rich treat a pipe as a terminal; a log file needs no bar.
        watched = self._console.is_interactive and self._console.file.isatty()
        self._bar: Any = _make_bar(self._console) if (watched if animated is None else animated) else None
        self._clock = clock
        self._begun_s = self._phase_begun_s = self._told_s = clock()
        self._task: Any = None
        self._name = self._note = ""
        self._total: int | None = None
        self._done = 0

    def __enter__(self) -> Progress:
        """Starts the clock and, on a terminal, the bar."""
        self._begun_s = self._clock()
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restores the terminal."""
        if self._bar is not None:
            self._bar.stop()

    def phase(self, name: str, total: int | None = None) -> None:
        """Ends the last phase and starts one of ``total`` pieces; None if their number is unknown."""
        self._name, self._note, self._total, self._done = name, "", total, 0
        self._phase_begun_s = self._clock()
        if self._bar is None:
            self._tell()
            return
        if self._task is not None:
            self._finish()
        self._task = self._bar.add_task(name, total=total, note="")

    def advance(self, count: int = 1) -> None:
        """Counts ``count`` more finished pieces of the phase."""
        self._done += count
        if self._bar is None:
            self._tell_sometimes()
        elif self._task is not None:
            self._bar.advance(self._task, count)

    def note(self, text: str) -> None:
        """Shows the current piece beside the phase until the next note."""
        self._note = text
        if self._bar is None:
            self._tell_sometimes()
        elif self._task is not None:
            self._bar.update(self._task, note=text)

    def follow(self, name: str) -> Callable[[str, int, int], None]:
        """Returns a callback ``(what, done, total)`` that shows the caller's progress as a phase."""
        reached = -1

        def follow(what: str, done: int, total: int) -> None:
            nonlocal reached
            if reached < 0:
                self.phase(name, total=total)
                reached = 0
            self.advance(done - reached)
            self.note(what)
            reached = done

        return follow

    def say(self, text: str) -> None:
        """Writes a permanent line above the bar or in the log."""
        line = text if self._bar is not None else f"[{self._seconds()} s] {text}"
        self._print(line)

    def _finish(self) -> None:
        """Fills the bar of the last phase, without a note."""
        total = self._total_of_task()
        self._bar.update(self._task, note="", total=total, completed=total)
        self._bar.stop_task(self._task)

    def _total_of_task(self) -> float:
        task = next(task for task in self._bar.tasks if task.id == self._task)
        return float(task.total if task.total is not None else max(task.completed, 1))

    def _tell_sometimes(self) -> None:
        if self._clock() - self._told_s >= INTERVAL_S:
            self._tell()

    def _tell(self) -> None:
        self._told_s = self._clock()
        parts = [f"[{self._seconds()} s] {self._name}"]
        parts += [self._note] if self._note else []
        line = " ".join(parts) + " ..."
        if self._total is not None:
            line += f" {self._done}/{self._total}"
        elif self._done:
            line += f" {self._done}"
        left = self._seconds_left()
        self._print(line if left is None else f"{line}, {left:.0f} s left")

    def _seconds(self) -> int:
        return round(self._clock() - self._begun_s)

    def _seconds_left(self) -> float | None:
        """Estimate from the pieces done; None if unknown."""
        if not self._total or not 0 < self._done < self._total:
            return None
        return (self._clock() - self._phase_begun_s) / self._done * (self._total - self._done)

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _make_bar(console: Console) -> Any:
    from rich import progress
    from rich.text import Text

    class PhaseColumn(progress.ProgressColumn):
        """Phase and note, without markup in names."""

        def render(self, task: progress.Task) -> Text:
            return Text.assemble((task.description, "bold"), f" {task.fields['note']}".rstrip())

    return progress.Progress(
        PhaseColumn(),
        progress.BarColumn(bar_width=28),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        console=console,
        refresh_per_second=5,
    )
