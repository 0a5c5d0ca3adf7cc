"""``mosaic doctor``: its options and output."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

from mosaic.cli.options import Json, OptionalModel, console_beside, takes_stdout, write_json
from mosaic.errors import UnsupportedModelError

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Report this machine's devices, what works on it, what is missing, and the remedies.

    Exits 0 even without a GPU. --model diagnoses a model instead: modules that can be placed, and those that cannot
    with their line of code and a remedy; exits 1 if the model cannot be colocated. --trace compares the ranks of a run
    and names the slow ones. --retrain checks this machine for unattended runs of a recipe: disk space, clock, locks,
    restarts, the health of its GPUs.
    """

    model: OptionalModel = None
    trace: Annotated[tuple[Path, ...], arg(metavar="FILE...")] = ()
    """Traces of a run's ranks, from handle.write_trace(folder): the files, or the folder."""
    retrain: Annotated[Path | None, arg(metavar="FOLDER")] = None
    """The folder of a recipe for mosaic retrain."""
    json: Json = None

    def execute(self) -> None:
        """Diagnoses, and prints the findings."""
        if self.model is not None:
            self._look_at_model(self.model)
        elif self.trace:
            self._compare_ranks()
        elif self.retrain is not None:
            self._look_at_node(self.retrain)
        else:
            self._look_at_machine()

    def _look_at_machine(self) -> None:
        from mosaic.cli.doctor.machine import collect_report, render

        report = collect_report()
        self._write(dataclasses.asdict(report))
        if not takes_stdout(self.json):
            render(report, _console(self.json))

    def _look_at_model(self, where: str) -> None:
        from mosaic.cli.doctor.model import examine_model, render

        report = examine_model(where)
        self._write(dataclasses.asdict(report))
        if not takes_stdout(self.json):
            render(report, _console(self.json))
        if report.refused:
            raise UnsupportedModelError(f"{where} cannot be colocated; the findings give reasons and remedies")

    def _look_at_node(self, folder: Path) -> None:
        from mosaic.cli.doctor.unattended import examine_node, render

        report = examine_node(folder)
        self._write(dataclasses.asdict(report))
        if not takes_stdout(self.json):
            render(report, _console(self.json))

    def _compare_ranks(self) -> None:
        from mosaic.cli.doctor.ranks import examine_traces, render

        comparison = examine_traces(self.trace)
        self._write({**dataclasses.asdict(comparison), "sentences": comparison.sentences()})
        if not takes_stdout(self.json):
            render(comparison, _console(self.json))

    def _write(self, report: dict[str, object]) -> None:
        write_json(json.dumps(report, indent=2) + "\n", self.json)


def _console(target: Path | None) -> Console:
    """Returns a console that lets the terminal wrap sentences."""
    console = console_beside(target)
    console.soft_wrap = True
    return console
