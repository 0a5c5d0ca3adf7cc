"""The run of ``bench.gpu``: build, gpu tests, measurements, table. No step can end it, and each leaves a whole file."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import preflight
from bench.gpu_child import Order, Server
from bench.gpu_parts import MEASUREMENTS
from bench.gpu_tables import text_table
from bench.processes import last_lines, run_logged
from bench.record import Figure, Part, Status, Study, one_line
from mosaic.artifact import save, write_text
from mosaic.provenance import Provenance

TELLING = ("CUDA_", "CUBLAS", "NCCL_", "NVIDIA_TF32", "OMP_", "MKL_", "PYTORCH_", "TORCH_", "MOSAIC_")
"""Prefixes of environment variables that can change what is measured; values that are paths are left out."""
SMALLEST_S = 4.0
"""Time left under which no measurement is started."""
DRY_SECONDS = 20.0
"""Soft bound of a measurement in a dry run: wide, since others may run, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line."""

    out: Path
    """Folder for everything that is left."""
    minutes: float = 8.0
    """For all of it."""
    dry_run: bool = False
    """Whether to rehearse on the host."""
    only: tuple[str, ...] = ()
    """Measurements or groups; empty for all."""
    build: bool = True
    """Whether to build the package."""
    tests: bool = True
    """Whether to run the gpu tests."""
    commit: str = ""
    """Commit to record where this is no clone."""
    ordinal: int = 0
    """Number of the GPU."""


class Record:
    """The result file: rewritten whole after every step, so that a kill at any instant leaves a valid one."""

    def __init__(self, options: Options) -> None:
        provenance = Provenance.here()
        commit = options.commit or provenance.commit
        name = f"{provenance.created[:10]}-{re.sub(r'[^0-9A-Za-z]', '', commit) or 'unknown'}"
        self.path = options.out / f"{name}{'-dry-run' if options.dry_run else ''}.json"
        self.log = self.path.with_suffix(".log")
        self.log.unlink(missing_ok=True)
        versions = preflight.versions()
        self.study = Study(
            study="gpu",
            command=command_text(sys.argv[1:]),
            created=provenance.created,
            commit=commit,
            python_version=provenance.python_version,
            torch_version=versions.get("torch", ""),
            machine=None,
            foreign_cpu_share=None,
            figures=(),
            dry_run=options.dry_run,
            versions=versions,
            environment={
                name: value
                for name, value in sorted(os.environ.items())
                if name.startswith(TELLING) and "/" not in value
            },
        )
        self.write()

    def add(self, part: Part, figures: tuple[Figure, ...] = (), **found: Any) -> None:
        """Adds a part with its figures and whatever else it found out, says so in a line, and writes the file."""
        part = replace(part, reason=without_folders(part.reason))
        figures = tuple(replace(figure, reason=without_folders(figure.reason)) for figure in figures)
        self.study = replace(
            self.study, parts=(*self.study.parts, part), figures=(*self.study.figures, *figures), **found
        )
        self.write()
        tail = f": {part.reason}" if part.reason else ""
        print(f"{part.name:24} {part.status:10} {part.seconds:6.1f} s  {len(figures)} figures{tail}", flush=True)

    def keep_log(self, name: str, log: Path) -> None:
        """Appends a step's output to the run's log."""
        with self.log.open("a", encoding="utf-8") as file:
            file.write(f"==== {name}\n{last_lines(log, 2000)}\n")

    def write(self) -> None:
        """Writes the file, whole."""
        save(self.study, self.path)


def command_text(arguments: Sequence[str]) -> str:
    """Returns the command line as it may be published: of a path, its last part."""
    return shlex.join(["python", "-m", "bench.gpu", *(Path(word).name if "/" in word else word for word in arguments)])


def without_folders(text: str) -> str:
    """Returns a message without the folders of this machine, since results are published."""
    folders = (str(preflight.BUILT / "lib"), str(preflight.TOP), sys.prefix, tempfile.gettempdir())
    for folder in sorted(folders, key=len, reverse=True):
        text = text.replace(f"{folder}{os.sep}", "")
    return text


def list_measurements() -> None:
    """Names every measurement, in order."""
    for measurement in MEASUREMENTS.values():
        print(f"{measurement.name:24} {measurement.seconds:4.0f} s  {measurement.asks}")


def unknown_names(only: Sequence[str]) -> list[str]:
    """Returns the names that are neither a measurement's nor a group's."""
    return [wanted for wanted in only if not any(_is_below(name, wanted) for name in MEASUREMENTS)]


def run(options: Options) -> int:
    """Runs everything; returns the exit code."""
    with tempfile.TemporaryDirectory(prefix="mosaic-bench-") as folder:
        return _run(options, Path(folder))


def _run(options: Options, folder: Path) -> int:
    deadline = time.monotonic() + 60 * options.minutes
    record = Record(options)
    print(f"writing {record.path}", flush=True)
    good = True
    if options.build:  # 1. the extension, where it runs
        good = _step(record, "build", "does the package build here?", _build, folder)
        if good:
            sys.path.insert(0, str(preflight.BUILT / "lib"))  # processes that measure start with this path,
            os.environ.update(preflight.environment_of_build())  # and those that they start, with this one
    if options.tests:  # 2. what must hold before a number means anything
        good = (
            _step(record, "tests", "do the gpu tests pass here?", lambda log: _test(log, options, deadline), folder)
            and good
        )
    _measure(record, options, deadline, folder)  # 3. in order of worth, each in a process of its own
    write_text(text_table(record.study), record.path.with_suffix(".txt"))  # 4. the table
    print(text_table(record.study))
    print(f"wrote {record.path} and {record.path.with_suffix('.txt').name}", flush=True)
    return 0 if good else 1


def _step(record: Record, name: str, asks: str, do: Callable[[Path], str], folder: Path) -> bool:
    """Runs one step; whatever goes wrong becomes the reason in its part."""
    began = time.monotonic()
    status: Status = "done"
    reason, note = "", ""
    try:
        note = do(folder / f"{name}.log")
    except subprocess.TimeoutExpired as error:
        status, reason = "timed out", f"still running after {error.timeout:.0f} s"
    except Exception as error:
        status, reason = "failed", one_line(error, 2000)
    seconds = round(time.monotonic() - began, 2)
    record.add(Part(name=name, asks=asks, status=status, seconds=seconds, reason=reason, notes=(note,) if note else ()))
    return status == "done"


def _build(log: Path) -> str:
    try:
        preflight.build(log, seconds=180)
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"exit code {error.returncode}; the end of its output: {last_lines(log)}") from error
    return ""


def _test(log: Path, options: Options, deadline: float) -> str:
    """Runs the gpu tests; returns what pytest summed up."""
    environment = dict(os.environ)
    if not options.dry_run:
        environment["MOSAIC_REQUIRE_GPU"] = "1"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/gpu",
        "tests/contract",
        "-m",
        "gpu",
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    seconds = max(20.0, min(150.0, 0.35 * (deadline - time.monotonic())))
    try:
        run_logged(command, log, folder=preflight.TOP, seconds=seconds, environment=environment)
    except subprocess.CalledProcessError as error:
        nothing_found = error.returncode == 5
        if not (nothing_found and options.dry_run):
            raise RuntimeError(
                f"{'no gpu tests were found' if nothing_found else 'they fail'} (exit code {error.returncode}); "
                f"the end of its output: {last_lines(log)}"
            ) from error
    return one_line(last_lines(log, 1))


def _measure(record: Record, options: Options, deadline: float, folder: Path) -> None:
    server = Server()
    chosen = [m for m in MEASUREMENTS.values() if _is_chosen(m.name, options)]
    chosen = [m for m in chosen if m.in_dry_run or not options.dry_run]
    for number, measurement in enumerate(chosen):
        left = deadline - time.monotonic()
        share = measurement.seconds / sum(later.seconds for later in chosen[number:])
        soft = DRY_SECONDS if options.dry_run else min(left, max(left * share, measurement.seconds))
        if left < SMALLEST_S:
            record.add(_left_out(measurement.name, measurement.asks, "no time was left"))
            continue
        file = folder / f"{measurement.name.replace('/', '-')}.json"
        outcome = server.measure(
            Order(
                measurement=measurement,
                file=str(file),
                seconds=soft,
                dry_run=options.dry_run,
                ordinal=options.ordinal,
                known=tuple(figure for figure in record.study.figures if figure.part == "ceilings"),
            ),
            hard_seconds=min(1.5 * soft + 20, left + 30),
        )
        record.keep_log(measurement.name, file.with_suffix(".log"))
        found = outcome.findings
        machine = record.study.machine or found.device
        driver = record.study.driver_version or found.driver_version
        record.add(outcome.part, found.figures, machine=machine, driver_version=driver)


def _is_chosen(name: str, options: Options) -> bool:
    """Tells whether to take a measurement; models need the ceilings for their bounds."""
    wanted_too = name == "ceilings" and any(wanted.startswith("models") for wanted in options.only)
    return not options.only or wanted_too or any(_is_below(name, wanted) for wanted in options.only)


def _is_below(name: str, wanted: str) -> bool:
    return name == wanted or name.startswith(f"{wanted}/")


def _left_out(name: str, asks: str, reason: str) -> Part:
    return Part(name=name, asks=asks, status="left out", reason=reason)
