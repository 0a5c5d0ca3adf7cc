"""A question about a device, the rows that answer it, and the file, table and picture of the answer.

A question is a function that yields rows: what a row is of stands in its labels, its numbers in its values. All
questions have the same rows, so one table, one file format and one reader serve all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from mosaic.artifact import save
from mosaic.backends.base import Backend
from mosaic.backends.cuda.driver import describe_driver
from mosaic.device import Device
from mosaic.errors import MosaicError
from mosaic.microbench.settings import BenchSettings, Budget, Spread
from mosaic.profile import note_of_others
from mosaic.profiler import ForeignLoad, Subject
from mosaic.provenance import Provenance
from mosaic.report.figure import save_figure
from mosaic.report.table import make_table

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement."""

    of: str
    """Kind of the row, such as ``times`` or ``gains``."""
    labels: Mapping[str, str | int]
    """The measured subject, such as the variant and the quotas."""
    values: Mapping[str, Spread | float | None]
    """Its numbers, by names with units; None for one that is unavailable."""
    note: str = ""
    """Remark about it."""

    def number(self, name: str) -> float | None:
        """Returns a number, or the median of a spread."""
        value = self.values.get(name)
        return value.median if isinstance(value, Spread) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class NotMeasured:
    """A measurement that is unavailable here, with the reason."""

    what: str
    reason: str


Item = Row | NotMeasured


def not_measured(what: str, reason: object) -> NotMeasured:
    """Returns an unavailable measurement; an error of another library is named with its type."""
    text = " ".join(str(reason).split())
    if isinstance(reason, Exception) and not isinstance(reason, MosaicError):
        text = f"{type(reason).__name__}: {text}"
    return NotMeasured(what=what, reason=text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The backend of a question, and its bounds."""

    backend: Backend
    settings: BenchSettings
    budget: Budget = field(default_factory=Budget)
    """Time; ``left_out`` names the pieces beyond it."""
    subjects: Sequence[Subject] = ()
    """Modules of a user's model; empty for kernels and modules of Mosaic's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The answer to a question on a device."""

    SCHEMA_VERSION: ClassVar[int] = 2
    schema_version: int = 2
    question: str
    backend: str
    """``host`` or ``cuda``."""
    device: Device
    torch_version: str
    driver_version: str
    """CUDA version that the driver serves; empty on the host."""
    provenance: Provenance
    """Command, date, commit."""
    notes: tuple[str, ...]
    """Remarks about the backend."""
    foreign_cpu_share: float | None
    """Share of the CPU of other processes meanwhile, 0 to 1; None if unknown."""
    seconds: float
    """Duration."""
    rows: tuple[Row, ...]
    absent: tuple[NotMeasured, ...]
    left_out: tuple[str, ...]
    """Pieces beyond the time budget."""

    def of(self, kind: str) -> tuple[Row, ...]:
        """Returns the rows of one kind."""
        return tuple(row for row in self.rows if row.of == kind)

    def content(self) -> dict[str, Any]:
        """Returns the content of the result's file: the fields, and a list of rows for each kind."""
        facts = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "rows"}
        kinds = dict.fromkeys(row.of for row in self.rows)
        return facts | {
            kind: [{**row.labels, **row.values, "note": row.note} for row in self.of(kind)] for kind in kinds
        }


class Measurement:
    """One run of a question: yields each row when it is ready, and keeps all for the result."""

    def __init__(self, question: Question, setup: Setup) -> None:
        self._question, self._setup = question, setup
        self._load, self._items = ForeignLoad(), list[Item]()
        self._began_s, self._left_out = setup.budget.used_s, len(setup.budget.left_out)

    def items(self) -> Iterator[Item]:
        """Measures; an absence that was named before is not repeated."""
        for item in self._question.measure(self._setup):
            if isinstance(item, Row) or item not in self._items:
                self._items.append(item)
                yield item

    def result(self) -> Result:
        """Returns the rows so far."""
        backend, budget = self._setup.backend, self._setup.budget
        notes = backend.notes
        if backend.device.kind == "host":
            notes = ("measured on the CPU's cores: these times say nothing about a GPU", *notes)
        return Result(
            question=self._question.name,
            backend=backend.name,
            device=backend.device,
            torch_version=torch.__version__,
            driver_version=describe_driver().version if backend.torch_device.type == "cuda" else "",
            provenance=Provenance.here(),
            notes=tuple(notes),
            foreign_cpu_share=self._load.share,
            seconds=round(budget.used_s - self._began_s, 3),
            rows=tuple(item for item in self._items if isinstance(item, Row)),
            absent=tuple(item for item in self._items if isinstance(item, NotMeasured)),
            left_out=budget.left_out[self._left_out :],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question about a device."""

    name: str
    """The sub-command of ``mosaic bench``."""
    asks: str
    """The question in words."""
    measure: Callable[[Setup], Iterator[Item]]
    """Measures, and yields the rows."""
    title: str
    """Title of the table."""
    of: str
    """Kind of the table's rows."""
    columns: Mapping[str, tuple[str, int | None]]
    """The table's columns: a heading by label or value, and the digits of its numbers; None for text."""
    merged: bool = False
    """The table shows the first column once for equal neighbours."""
    summary: Callable[[Result], Sequence[str]]
    """Lines below the table."""
    picture: Callable[[Result, str], Any]
    """The figure of a result, with a line about the machine."""
    takes_subjects: bool = False
    """It measures a user's modules."""

    def answer(self, setup: Setup) -> Result:
        """Measures everything."""
        measurement = Measurement(self, setup)
        for _ in measurement.items():
            pass
        return measurement.result()

    def table(self, result: Result) -> Table:
        """Returns the table, with lines on absent and left-out measurements and on the machine."""
        columns = [heading if digits is None else f">{heading}" for heading, digits in self.columns.values()]
        rows, above = [], ""
        for row in result.of(self.of):
            first, *others = (_cell(row, name, digits) for name, (_, digits) in self.columns.items())
            rows.append(["" if self.merged and first == above else first, *others])
            above = first
        caption = "\n".join([*self.summary(result), *_caption(result)])
        return make_table(f"{self.title}: {result.device.name}", columns, rows, caption=caption)

    def write(self, result: Result, folder: Path) -> tuple[Path, Path]:
        """Writes ``NAME.json`` and ``NAME.png`` into a folder and returns their paths."""
        record, picture = folder / f"{self.name}.json", folder / f"{self.name}.png"
        save(result.content(), record)
        save_figure(self.picture(result, _where(result)), picture)
        return record, picture


def _cell(row: Row, name: str, digits: int | None) -> str:
    value: Any = row.labels.get(name, row.values.get(name))
    if isinstance(value, Spread):
        return value.text()
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def number_text(value: float | None, digits: int = 2) -> str:
    """Returns a number, ``-`` for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def _where(result: Result) -> str:
    driver = f", driver CUDA {result.driver_version}" if result.driver_version else ""
    slots = "host" if result.device.kind == "host" else f"{result.device.num_slots} slots"
    where = f"{result.device.name} ({slots}), torch {result.torch_version}{driver}, {result.provenance.created[:10]}"
    return "; ".join(filter(None, (where, note_of_others(result.foreign_cpu_share, result.device))))


def _caption(result: Result) -> list[str]:
    share = "unknown" if result.foreign_cpu_share is None else f"{result.foreign_cpu_share:.0%}"
    lines = [f"not measured: {absent.what}: {absent.reason}" for absent in result.absent]
    lines += [f"no time left for {piece}" for piece in result.left_out[:5]]
    if len(result.left_out) > 5:
        lines.append(f"no time left for {len(result.left_out) - 5} more, which the JSON file names")
    lines += [f"note: {note}" for note in result.notes]
    driver = f" and CUDA driver {result.driver_version}" if result.driver_version else ""
    lines.append(
        f"medians (quartiles), measured in {result.seconds:.1f} s with torch {result.torch_version}{driver}; other "
        f"processes took {share} of the CPU"
    )
    return lines
