"""``mosaic doctor``: what it looks at, and how it answers."""

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
    """Say what this machine has, what works on it, what is missing and what to do.

    Without a GPU it says so and exits 0. With --model it looks at a model instead: what can be placed, and what cannot,
    with the line of its code and what to do; it exits 1 if the model cannot be colocated. With --trace it compares the
    ranks of a run, and names those that are slow. With --retrain it says what this machine lacks for runs of a recipe
    that nobody watches: room, clock, locks, restarts, the health of its GPUs.
    """

    model: OptionalModel = None
    trace: Annotated[tuple[Path, ...], arg(metavar="FILE...")] = ()
    """What the ranks of a run left by handle.write_trace(folder): the files, or the folder."""
    retrain: Annotated[Path | None, arg(metavar="FOLDER")] = None
    """A recipe's folder, which mosaic retrain runs in."""
    json: Json = None

    def execute(self) -> None:
        """Looks, and prints what it saw."""
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
            raise UnsupportedModelError(f"{where} cannot be colocated as it is; the findings say why and what to do")

    def _look_at_node(self, folder: Path) -> None:
        from mosaic.cli.doctor.unattended import examine_node, render

        report = examine_node(folder)
        self._write(dataclasses.asdict(report))
        if not takes_stdout(self.json):
            render(report, _console(self.json))

    def _compare_ranks(self) -> None:
        from mosaic.cli.doctor.ranks import examine_traces, render

        found = examine_traces(self.trace)
        self._write({**dataclasses.asdict(found), "sentences": found.sentences()})
        if not takes_stdout(self.json):
            render(found, _console(self.json))

    def _write(self, report: dict[str, object]) -> None:
        write_json(json.dumps(report, indent=2) + "\n", self.json)


def _console(target: Path | None) -> Console:
    """Returns a console that leaves the wrapping of sentences to the terminal."""
    console = console_beside(target)
    console.soft_wrap = True
    return console
