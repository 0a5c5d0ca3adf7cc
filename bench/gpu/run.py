"""The run of ``bench.gpu``: build, ladder, GPU tests, measurements, table.

No part can abort it, and the file is complete after each.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.gpu import preflight
from bench.gpu.child import Order, Outcome, Server
from bench.gpu.ladder import RUNGS
from bench.gpu.parts import MEASUREMENTS, Measurement
from bench.gpu.tables import models_table, overlap_table, text_table
from bench.processes import begin_section, last_lines
from bench.record import Figure, Part, Status, Study, one_line
from mosaic.artifact import provenance, save, write_text

TELLING = ("CUDA_", "CUBLAS", "NCCL_", "NVIDIA_TF32", "OMP_", "MKL_", "PYTORCH_", "TORCH_", "MOSAIC_")
"""Prefixes of environment variables that affect measurements; paths are omitted."""
MIN_S = 4.0
"""Minimum remaining time to start a measurement."""
DRY_SECONDS = 20.0
"""Minimum soft limit of a measurement in a rehearsal."""
RUNG_S = 20.0
"""Time limit of a rung: the first call of cuDNN reads a gigabyte of libraries."""


class Record:
    """The result file, its table and its log, complete after every part."""

    def __init__(self, options: argparse.Namespace) -> None:
        origin = provenance()
        commit = options.commit or origin["commit"]
        name = f"{origin['created'][:16].replace(':', '')}-{re.sub(r'[^0-9A-Za-z]', '', commit) or 'unknown'}"
        self.path = options.out / f"{name}{'-dry-run' if is_rehearsal(options) else ''}.json"
        self.log = self.path.with_suffix(".log")
        self.log.unlink(missing_ok=True)
        versions = preflight.versions()
        self.study = Study(
            study="gpu",
            command=command_text(sys.argv[1:]),
            created=origin["created"],
            commit=commit,
            python_version=origin["python_version"],
            torch_version=versions.get("torch", ""),
            machine=None,
            foreign_cpu_share=None,
            figures=(),
            dry_run=is_rehearsal(options),
            versions=versions,
            environment={
                name: value
                for name, value in sorted(os.environ.items())
                if name.startswith(TELLING) and "/" not in value
            },
        )
        self.write()

    def add(self, part: Part, figures: Sequence[Figure] = (), **more: Any) -> bool:
        """Adds a part with its figures, prints a line, and writes the file; returns True if it succeeded."""
        part = replace(part, reason=without_folders(part.reason), verdict=without_folders(part.verdict))
        figures = tuple(replace(figure, reason=without_folders(figure.reason)) for figure in figures)
        self.study = replace(
            self.study, parts=(*self.study.parts, part), figures=(*self.study.figures, *figures), **more
        )
        self.write()
        tail = "; ".join(filter(None, [part.verdict, part.reason]))
        print(f"{part.name:24} {part.status:10} {part.seconds:6.1f} s  {tail or f'{len(figures)} figures'}", flush=True)
        return part.status in ("done", "cut short")

    def add_outcome(self, outcome: Outcome) -> bool:
        machine = self.study.machine or outcome.device
        driver = self.study.driver_version or outcome.driver_version
        return self.add(outcome.part, outcome.figures, machine=machine, driver_version=driver)

    def write(self) -> None:
        save(self.study, self.path)
        write_text(text_table(self.study), self.path.with_suffix(".txt"))


def command_text(arguments: Sequence[str]) -> str:
    """Returns the command line without folders, for publication."""
    return shlex.join(["python", "-m", "bench.gpu", *(Path(word).name if "/" in word else word for word in arguments)])


def without_folders(text: str) -> str:
    """Returns a message without folders, for publication."""
    folders = (str(preflight.BUILT / "lib"), str(preflight.TOP), sys.prefix, tempfile.gettempdir())
    for folder in sorted(folders, key=len, reverse=True):
        text = text.replace(f"{folder}{os.sep}", "")
    return text


def list_parts() -> None:
    """Prints all parts in order."""
    for rung in RUNGS.values():
        print(f"{rung.name:24} {'':4}    {rung.asks}")
    for measurement in MEASUREMENTS.values():
        print(f"{measurement.name:24} {measurement.seconds:4.0f} s  {measurement.asks}")


def unknown_names(only: Sequence[str]) -> list[str]:
    """Returns unknown names of parts or groups."""
    names = (*RUNGS, *MEASUREMENTS)
    return [selected for selected in only if not any(_is_below(name, selected) for name in names)]


def run(options: argparse.Namespace) -> int:
    deadline = time.monotonic() + 60 * options.minutes
    record = Record(options)
    print(f"writing {record.path}", flush=True)
    good = True
    if not options.no_build:  # 1. the build
        good = _build(record)
        if good:
            sys.path.insert(0, str(preflight.BUILT / "lib"))  # path of measuring processes,
            os.environ.update(preflight.environment_of_build())  # and of their children
    server = Server()
    server.warm_up()
    good = _climb(record, server, options) and good  # 2. the ladder
    good = _measure(record, server, options, deadline) and good  # 3. measurements and GPU tests, by importance
    for part, table in (("overlap", overlap_table), ("models", models_table)):
        if record.study.of(part):
            print(table(record.study))
    print(f"wrote {record.path}, with its table in .txt and all output in .log", flush=True)
    return 0 if good else 1


def _build(record: Record) -> bool:
    """Builds the package; an error is the reason in its part."""
    began, start = time.monotonic(), begin_section(record.log, "build")
    status: Status = "done"
    reason = ""
    try:
        preflight.build(record.log, seconds=180)
    except Exception as error:  # a compiler or a disk may raise anything
        status = "failed"
        reason = f"{one_line(error, 300)}; the end of its output: {last_lines(record.log, since=start)}"
    seconds = round(time.monotonic() - began, 2)
    part = Part(name="build", asks="does the package build here?", status=status, seconds=seconds)
    return record.add(replace(part, reason=one_line(reason, 2000)))


def _climb(record: Record, server: Server, options: argparse.Namespace) -> bool:
    """Runs the rungs of the ladder, each in its own process."""
    good = True
    for rung in RUNGS.values():
        if is_chosen(options, rung.name):
            order = _order(record, options, rung, seconds=RUNG_S, hard_seconds=RUNG_S)
            good = record.add_outcome(server.measure(order)) and good
    return good


def _measure(record: Record, server: Server, options: argparse.Namespace, deadline: float) -> bool:
    """Runs the measurements within their shares of the remaining time; returns True if the GPU tests passed."""
    good = True
    measurements = [m for m in MEASUREMENTS.values() if is_chosen(options, m.name)]
    measurements = [m for m in measurements if m.in_dry_run or not is_rehearsal(options)]
    for number, measurement in enumerate(measurements):
        left = deadline - time.monotonic()
        share = measurement.seconds / sum(later.seconds for later in measurements[number:])
        least = DRY_SECONDS if is_rehearsal(options) else measurement.seconds
        soft = min(left, measurement.most_seconds or max(left * share, least))
        if left < MIN_S:
            reason = "no time was left"
            record.add(Part(name=measurement.name, asks=measurement.asks, status="left out", reason=reason))
            continue
        hard = min(1.5 * soft + 20, left + 30)
        order = _order(record, options, measurement, seconds=soft, hard_seconds=hard)
        is_done = record.add_outcome(server.measure(order))
        good = good and (is_done or not measurement.name.startswith("tests/"))
    return good


def _order(
    record: Record, options: argparse.Namespace, measurement: Measurement, *, seconds: float, hard_seconds: float
) -> Order:
    return Order(
        measurement=measurement,
        log=str(record.log),
        seconds=seconds,
        hard_seconds=hard_seconds,
        dry_run=is_rehearsal(options),
        on_host=options.dry_run,
        ordinal=options.device,
        known=tuple(figure for figure in record.study.figures if figure.part == "ceilings"),
    )


def is_rehearsal(options: argparse.Namespace) -> bool:
    """Returns True if the numbers are meaningless."""
    return options.small or options.dry_run


def is_chosen(options: argparse.Namespace, name: str) -> bool:
    """Returns True if a part is selected; models need the ceilings for their bounds."""
    needed = name == "ceilings" and any(selected.startswith("models") for selected in options.only)
    return needed or not options.only or any(_is_below(name, selected) for selected in options.only)


def _is_below(name: str, group: str) -> bool:
    return name == group or name.startswith(f"{group}/")
