"""One measurement in a process of its own: a crash, a hang or a broken CUDA context costs that one and no other.

Processes are forked by a server that has torch loaded and has never touched CUDA, so each starts at once. What a
measurement finds goes to a file line by line, and the parent reads it however the process ended. What it prints, and
where it hung or crashed, goes to the run's log.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.gpu.parts import PRELOADED, Measurement
from bench.processes import begin_section, die_with_parent, kill_group, last_lines, shorten_section
from bench.record import Figure, Part, Status, one_line
from mosaic.device import Device

TRACE_BEFORE_S = 1.0
"""How long before its end a process that hangs leaves a traceback in the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a process is asked to measure."""

    measurement: Measurement
    """What to run."""
    file: str
    """Where its findings go, one JSON object a line."""
    log: str
    """Where its output goes."""
    seconds: float
    """Soft bound: what does not fit is left out."""
    hard_seconds: float
    """It is killed after this."""
    dry_run: bool
    """Whether to run at the smallest sizes."""
    on_host: bool = False
    """Whether to run on the host."""
    ordinal: int = 0
    """Number of the GPU."""
    cudnn: bool = True
    """Whether lanes use cuDNN."""
    known: tuple[Figure, ...] = ()
    """Figures that were measured before."""


@dataclass(slots=True, kw_only=True)
class Findings:
    """What a process found, so far or in all."""

    ended: bool = False
    """Whether the measurement came to its end."""
    error: str = ""
    """What it raised; empty if nothing."""
    device: Device | None = None
    """What it ran on; None until known."""
    driver_version: str = ""
    """Version of the driver, where the measurement asked for it."""
    figures: list[Figure] = field(default_factory=list)
    """What it measured."""
    left_out: tuple[str, ...] = ()
    """What it had no time for."""
    notes: tuple[str, ...] = ()
    """What to know about its figures."""
    verdict: str = ""
    """What came of it, in plain words."""


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

    def warm_up(self, seconds: float = 120.0) -> None:
        """Waits until the server has loaded torch: on a machine that never did, that takes longer than a rung may."""
        process = self.context.Process(target=_nothing)
        process.start()
        process.join(seconds)

    def measure(self, order: Order) -> Outcome:
        """Runs a measurement and returns what came of it; raises nothing that the measurement could cause."""
        file, log = Path(order.file), Path(order.log)
        file.unlink(missing_ok=True)
        start = begin_section(log, order.measurement.name)
        began = time.monotonic()
        process = self.context.Process(target=work, args=(order,), name=order.measurement.name)
        process.start()
        try:
            process.join(order.hard_seconds)
            late = process.is_alive()
        finally:
            if process.is_alive():
                kill_group(process.pid or 0)
                process.kill()
                process.join(10)
        findings = read_findings(file)
        file.unlink(missing_ok=True)
        status, reason = _status(findings, None if late else process.exitcode, order.hard_seconds)
        if status in ("killed", "failed", "timed out") and not findings.ended:
            reason = one_line(f"{reason}; the end of its log: {last_lines(log, 30, since=start)}", 1200)
        shorten_section(log, since=start)
        return Outcome(
            Part(
                name=order.measurement.name,
                asks=order.measurement.asks,
                status=status,
                seconds=round(time.monotonic() - began, 2),
                reason=reason,
                left_out=findings.left_out,
                notes=findings.notes,
                verdict=findings.verdict,
            ),
            findings,
        )


def read_findings(file: Path) -> Findings:
    """Reads what a process wrote until it ended; of a line that it could not end, nothing."""
    found = Findings()
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    for line in lines:
        try:
            row: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError:  # it was killed while it wrote
            break
        if "figure" in row:
            found.figures.append(Figure(**{**row["figure"], "samples": tuple(row["figure"]["samples"])}))
        if "device" in row:
            found.device = Device(**row["device"])
        found.ended = row.get("ended", found.ended)
        found.error = row.get("error", found.error)
        found.driver_version = row.get("driver_version", found.driver_version)
        found.left_out = tuple(row.get("left_out", found.left_out))
        found.notes = tuple(row.get("notes", found.notes))
        found.verdict = row.get("verdict", found.verdict)
    return found


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


def _nothing() -> None:
    """Ends at once."""


def work(order: Order) -> None:
    """Measures, in the process that was forked for it."""
    os.setsid()
    die_with_parent()
    descriptor = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(0.5, order.hard_seconds - TRACE_BEFORE_S))
    os.environ.update(order.measurement.environment)  # before CUDA looks
    with open(order.file, "a", encoding="utf-8", buffering=1) as file:  # noqa: PTH123  # by lines, whole ones

        def tell(**row: Any) -> None:
            file.write(json.dumps(row) + "\n")

        _measure(order, tell)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # destroying what a failed measurement left behind may crash or hang


def _measure(order: Order, tell: Callable[..., None]) -> None:
    bench, error = None, ""
    try:
        from bench.gpu.bench import open_bench

        measure = order.measurement.resolve()
        bench = open_bench(
            seconds=order.seconds,
            dry_run=order.dry_run,
            on_host=order.on_host,
            ordinal=order.ordinal,
            cudnn=order.cudnn,
            known=order.known,
        )
        tell(device=asdict(bench.device))
        for figure in measure(bench):
            tell(figure=asdict(replace(figure, part=order.measurement.name, dry_run=order.dry_run)))
    except BaseException as raised:
        traceback.print_exc()
        error = one_line(raised)
    found = {} if bench is None else {
        "driver_version": bench.driver_version,
        "left_out": bench.budget.left_out,
        "notes": bench.notes,
        "verdict": bench.verdict,
    }  # fmt: skip
    tell(ended=True, error=error, **found)
