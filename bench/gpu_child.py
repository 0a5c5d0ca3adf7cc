"""One measurement in a process of its own: a crash, a hang or a broken CUDA context costs that one and no other.

Processes are forked by a server that has torch loaded and has never touched CUDA, so each starts at once. What a
measurement found goes to a file while it measures, and the parent reads it however the process ended.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from bench.gpu_parts import PRELOADED, Measurement
from bench.processes import die_with_parent, kill_group, last_lines
from bench.record import Figure, Part, Status, one_line
from mosaic.artifact import load, save
from mosaic.device import FORBID_EXTRA, Device
from mosaic.errors import MosaicError

WRITE_EVERY_S = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a process is asked to measure."""

    measurement: Measurement
    """What to run."""
    file: str
    """Where its findings go; the log lies beside it."""
    seconds: float
    """Soft bound: what does not fit is left out."""
    dry_run: bool
    """Whether to run on the host at the smallest sizes."""
    ordinal: int = 0
    """Number of the GPU."""
    known: tuple[Figure, ...] = ()
    """Figures that were measured before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a process found, so far or in all."""

    SCHEMA_VERSION: ClassVar[int] = 1
    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    schema_version: int = 1
    """Version of this file's layout."""
    ended: bool
    """Whether the measurement came to its end."""
    error: str = ""
    """What it raised; empty if nothing."""
    device: Device | None = None
    """What it ran on; None until known."""
    driver_version: str = ""
    """Version of the driver, where the measurement asked for it."""
    figures: tuple[Figure, ...] = ()
    """What it measured."""
    left_out: tuple[str, ...] = ()
    """What it had no time for."""
    notes: tuple[str, ...] = ()
    """What to know about its figures."""


@dataclass(frozen=True)
class Outcome:
    """A part with what it found."""

    part: Part
    """How it ended."""
    findings: Findings
    """What it found until then."""


@dataclass
class Server:
    """Starts processes, one at a time, and ends the one that runs.

    Attributes:
        context: Where processes come from.
    """

    context: multiprocessing.context.ForkServerContext = field(
        default_factory=lambda: multiprocessing.get_context("forkserver")
    )

    def __post_init__(self) -> None:
        self.context.set_forkserver_preload(list(PRELOADED))

    def measure(self, order: Order, *, hard_seconds: float) -> Outcome:
        """Runs a measurement and returns what came of it; raises nothing that the measurement could cause."""
        file = Path(order.file)
        file.unlink(missing_ok=True)
        log = file.with_suffix(".log")
        began = time.monotonic()
        process = self.context.Process(target=work, args=(order, str(log)), name=order.measurement.name)
        process.start()
        try:
            process.join(hard_seconds)
            late = process.is_alive()
        finally:
            if process.is_alive():
                kill_group(process.pid or 0)
                process.kill()
                process.join(10)
        findings, unread = _read(file)
        status, reason = _status(findings, None if late else process.exitcode, hard_seconds)
        if status in ("killed", "failed") and not findings.ended:
            reason = one_line(f"{reason}; the end of its log: {last_lines(log, 4)}", 800)
        return Outcome(
            Part(
                name=order.measurement.name,
                asks=order.measurement.asks,
                status=status,
                seconds=round(time.monotonic() - began, 2),
                reason="; ".join(text for text in (reason, unread) if text),
                left_out=findings.left_out,
                notes=findings.notes,
            ),
            findings,
        )


def _read(file: Path) -> tuple[Findings, str]:
    if not file.exists():
        return Findings(ended=False), ""
    try:
        return load(Findings, file), ""
    except MosaicError as error:
        return Findings(ended=False), one_line(error)


def _status(findings: Findings, code: int | None, hard_seconds: float) -> tuple[Status, str]:
    """Returns how a process ended; ``code`` is None for one that was still running at its limit."""
    if findings.error:
        return "failed", findings.error
    if findings.ended:
        return ("cut short" if findings.left_out else "done"), ""
    if code is None:
        return "timed out", f"still running after {hard_seconds:.0f} s; figures from before that are kept"
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
        return "killed", f"its process was ended by {name}"
    return "failed", f"its process exited with code {code}"


def work(order: Order, log: str) -> None:
    """Measures, in the process that was forked for it."""
    os.setsid()
    die_with_parent()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(order.measurement.environment)  # before CUDA looks

    figures: list[Figure] = []
    bench = None
    error = ""

    def leave(*, ended: bool) -> None:
        save(
            Findings(
                ended=ended,
                error=error,
                device=bench.device if bench is not None else None,
                driver_version=bench.driver_version if bench is not None else "",
                figures=tuple(figures),
                left_out=bench.budget.left_out if bench is not None else (),
                notes=tuple(bench.notes) if bench is not None else (),
            ),
            Path(order.file),
        )

    try:
        from bench.gpu_bench import open_bench

        measure = order.measurement.resolve()
        bench = open_bench(order)
        leave(ended=False)
        left = time.monotonic()
        for figure in measure(bench):
            figures.append(replace(figure, part=order.measurement.name, dry_run=order.dry_run))
            if time.monotonic() - left > WRITE_EVERY_S:
                leave(ended=False)
                left = time.monotonic()
    except BaseException as raised:
        traceback.print_exc()
        error = one_line(raised)
    leave(ended=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # destroying what a failed measurement left behind may crash or hang
