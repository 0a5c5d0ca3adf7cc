"""Runs each measurement in a child process, which contains crashes, hangs and broken CUDA contexts.

Processes are forked by a server that has loaded torch but not initialized CUDA, so they start immediately. A process
sends each figure as a line of JSON, which the parent keeps in any case. Its output and tracebacks of hangs and crashes
go to the run's log.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.gpu.parts import PRELOADED, Measurement
from bench.processes import PartFailedError, begin_section, last_lines, shorten_section, within
from bench.record import Figure, Part, Status, one_line
from mosaic.device import Device

TRACE_BEFORE_S = 1.0
"""Time before its end at which a hanging process writes a traceback to the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    measurement: Measurement
    log: str
    seconds: float
    """Soft limit: pieces beyond it are omitted."""
    hard_seconds: float
    """Hard limit: the process is killed."""
    dry_run: bool
    on_host: bool = False
    ordinal: int = 0
    known: tuple[Figure, ...] = ()

    def __call__(self) -> Iterator[str]:
        """Runs in the forked process; yields rows of JSON."""
        os.setsid()
        descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        faulthandler.enable()
        faulthandler.dump_traceback_later(max(0.5, self.hard_seconds - TRACE_BEFORE_S))
        os.environ.update(self.measurement.environment)  # before CUDA looks
        try:
            yield from map(json.dumps, self._rows())
        except BaseException:
            traceback.print_exc()
            raise

    def _rows(self) -> Iterator[dict[str, Any]]:
        from bench.gpu.bench import open_bench

        measure = self.measurement.resolve()
        bench = open_bench(self)
        yield {"device": asdict(bench.device)}
        try:
            for figure in measure(bench):
                yield {"figure": asdict(replace(figure, part=self.measurement.name, dry_run=self.dry_run))}
        finally:
            yield {
                "driver_version": bench.driver_version,
                "left_out": bench.budget.left_out,
                "notes": bench.notes,
                "verdict": bench.verdict,
            }


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    part: Part
    figures: tuple[Figure, ...]
    device: Device | None
    """Its device; None if it failed earlier."""
    driver_version: str


class Server:
    """Starts and ends processes, one at a time."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(PRELOADED))

    def warm_up(self, seconds: float = 120.0) -> None:
        """Waits until the server has loaded torch, which may take longer than a rung on a new machine."""
        process = self._context.Process(target=os.getpid)
        process.start()
        process.join(seconds)

    def measure(self, order: Order) -> Outcome:
        """Runs a measurement and returns its outcome; its errors are not raised."""
        log, name = Path(order.log), order.measurement.name
        start, began = begin_section(log, name), time.monotonic()
        figures: list[Figure] = []
        report: dict[str, Any] = {}
        status: Status = "done"
        reason = ""
        running = log.with_suffix(".running.jsonl")  # keeps the figures of a killed run
        try:
            for line in within(order, order.hard_seconds, self._context):
                with running.open("a", encoding="utf-8") as file:
                    file.write(f"{line}\n")
                row = json.loads(line)
                if "figure" in row:
                    figures.append(Figure(**{**row["figure"], "samples": tuple(row["figure"]["samples"])}))
                else:
                    report |= row
        except PartFailedError as error:
            status, reason = error.status, str(error).removeprefix("its process: ")
            if "notes" not in report:  # it was ended from outside
                reason = one_line(f"{reason}; the end of its log: {last_lines(log, 30, since=start)}", 1200)
        running.unlink(missing_ok=True)
        left_out = tuple(report.get("left_out", ()))
        shorten_section(log, since=start)
        part = Part(
            name=name,
            asks=order.measurement.asks,
            status="cut short" if status == "done" and left_out else status,
            seconds=round(time.monotonic() - began, 2),
            reason=reason,
            left_out=left_out,
            notes=tuple(report.get("notes", ())),
            verdict=report.get("verdict", ""),
        )
        return Outcome(
            part=part,
            figures=tuple(figures),
            device=Device(**report["device"]) if "device" in report else None,
            driver_version=report.get("driver_version", ""),
        )
