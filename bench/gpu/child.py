"""One measurement in a process of its own: a crash, a hang or a broken CUDA context costs that one and no other.

Processes are forked by a server that has torch loaded and has never touched CUDA, so each starts at once. A process
writes each finding to a file as a line of JSON, and the parent reads it however the process ended. Its output, and
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.gpu.parts import PRELOADED, Measurement
from bench.processes import begin_section, die_with_parent, kill_group, last_lines, shorten_section
from bench.record import Figure, Part, Status, one_line
from mosaic.device import Device

TRACE_BEFORE_S = 1.0
"""A process that hangs leaves a traceback in the log so long before its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    measurement: Measurement
    file: str
    """The file of its findings, one JSON object a line."""
    log: str
    seconds: float
    """Soft bound: what does not fit is left out."""
    hard_seconds: float
    """It is killed after this."""
    dry_run: bool
    on_host: bool = False
    ordinal: int = 0
    cudnn: bool = True
    known: tuple[Figure, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    part: Part
    figures: tuple[Figure, ...]
    device: Device | None
    """The device that it ran on; None where it did not come so far."""
    driver_version: str


class Server:
    """Starts processes, one at a time, and ends the one that runs."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(list(PRELOADED))

    def warm_up(self, seconds: float = 120.0) -> None:
        """Waits until the server has loaded torch: on a machine that never did, that takes longer than a rung may."""
        process = self.context.Process(target=_nothing)
        process.start()
        process.join(seconds)

    def measure(self, order: Order) -> Outcome:
        """Runs a measurement and returns what came of it; raises nothing that the measurement could cause."""
        file, log, name = Path(order.file), Path(order.log), order.measurement.name
        file.unlink(missing_ok=True)
        start, began = begin_section(log, name), time.monotonic()
        process = self.context.Process(target=work, args=(order,), name=name)
        process.start()
        try:
            process.join(order.hard_seconds)
            code = None if process.is_alive() else process.exitcode
        finally:
            if process.is_alive():
                kill_group(process.pid or 0)
                process.kill()
                process.join(10)
        report = _read(file)
        file.unlink(missing_ok=True)
        left_out = tuple(report.get("left_out", ()))
        status, reason = _status(report, code, order.hard_seconds)
        if not report.get("ended") and status != "done":
            reason = one_line(f"{reason}; the end of its log: {last_lines(log, 30, since=start)}", 1200)
        shorten_section(log, since=start)
        part = Part(
            name=name,
            asks=order.measurement.asks,
            status=status,
            seconds=round(time.monotonic() - began, 2),
            reason=reason,
            left_out=left_out,
            notes=tuple(report.get("notes", ())),
            verdict=report.get("verdict", ""),
        )
        device = Device(**report["device"]) if "device" in report else None
        return Outcome(
            part=part,
            figures=tuple(report["figures"]),
            device=device,
            driver_version=report.get("driver_version", ""),
        )


def _read(file: Path) -> dict[str, Any]:
    """Reads what a process wrote until it ended; of a line that it could not end, nothing."""
    report: dict[str, Any] = {"figures": []}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        try:
            row: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError:  # it was killed while it wrote
            break
        if "figure" in row:
            report["figures"].append(Figure(**{**row["figure"], "samples": tuple(row["figure"]["samples"])}))
        else:
            report |= row
    return report


def _status(report: dict[str, Any], code: int | None, hard_seconds: float) -> tuple[Status, str]:
    """Returns how a process ended; ``code`` is None for one that was still running at its limit."""
    if report.get("error"):
        return "failed", report["error"]
    if report.get("ended"):
        return ("cut short" if report.get("left_out") else "done"), ""
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
        _measure(order, lambda **row: file.write(json.dumps(row) + "\n"))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # destroying what a failed measurement left behind may crash or hang


def _measure(order: Order, write: Callable[..., object]) -> None:
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
        write(device=asdict(bench.device))
        for figure in measure(bench):
            write(figure=asdict(replace(figure, part=order.measurement.name, dry_run=order.dry_run)))
    except BaseException as raised:
        traceback.print_exc()
        error = one_line(raised)
    report = {} if bench is None else {
        "driver_version": bench.driver_version,
        "left_out": bench.budget.left_out,
        "notes": bench.notes,
        "verdict": bench.verdict,
    }  # fmt: skip
    write(ended=True, error=error, **report)
