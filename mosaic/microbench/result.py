"""A question about a device, its result as rows, and the result's file, table and picture.

A question is a function that yields rows. The labels of a row are its subject, its values are numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mosaic.artifact import provenance, save
from mosaic.backends.base import Backend
from mosaic.backends.cuda.driver import describe_driver
from mosaic.device import Device
from mosaic.errors import MosaicError
from mosaic.microbench.settings import BenchSettings, Budget, Spread
from mosaic.profile import note_of_others
from mosaic.profiler import ForeignLoad
from mosaic.report.figure import INK, colors_of, new_figure, save_figure, shorten
from mosaic.report.table import make_table

if TYPE_CHECKING:
    from rich.table import Table

ABSENT = "absent"
"""Kind of a row for an unavailable measurement, with the reason as its note."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement."""

    of: str
    """Kind of the row, such as ``times`` or ``gains``."""
    labels: Mapping[str, str | int]
    """Subject, such as the variant and the quotas."""
    values: Mapping[str, Spread | float | None] = field(default_factory=dict)
    """Numbers by names with units; None if unavailable."""
    note: str = ""

    def number(self, name: str) -> float | None:
        """Returns a number, or the median of a spread."""
        value = self.values.get(name)
        return value.median if isinstance(value, Spread) else value

    def text(self, name: str, digits: int | None = 2) -> str:
        """Returns a label or a value as text; ``-`` if unavailable."""
        value: Any = self.labels.get(name, self.values.get(name))
        if value is None:
            return "-"
        return f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def absent(subject: str, reason: object) -> Row:
    """Returns the row of an unavailable measurement; an error of another library includes its type."""
    text = " ".join(str(reason).split())
    if isinstance(reason, Exception) and not isinstance(reason, MosaicError):
        text = f"{type(reason).__name__}: {text}"
    return Row(of=ABSENT, labels={"subject": subject}, note=text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The backend and the limits of a question."""

    backend: Backend
    settings: BenchSettings
    budget: Budget = field(default_factory=Budget)
    """Time limit; ``left_out`` lists the pieces beyond it."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes about the backend."""
        is_host = self.backend.device.kind == "host"
        host = ("measured on CPU cores, not representative of a GPU",) if is_host else ()
        return (*host, *self.backend.notes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The answer to a question on a device."""

    schema_version: int = 3
    question: str
    backend: str
    """``host`` or ``cuda``."""
    device: Device
    torch_version: str
    driver_version: str
    """The driver's CUDA version; empty on the host."""
    provenance: Mapping[str, str]
    notes: tuple[str, ...]
    """Notes about the backend."""
    foreign_cpu_share: float | None
    """Share of the CPU used by other processes, 0 to 1; None if unknown."""
    seconds: float
    rows: tuple[Row, ...]
    left_out: tuple[str, ...]
    """Pieces beyond the time limit."""

    def of(self, kind: str) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.of == kind)

    def content(self) -> dict[str, Any]:
        """Returns the content of the result's file: the fields, and a list of rows per kind."""
        content: dict[str, Any] = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        for row in content.pop("rows"):
            content.setdefault(row.of, []).append({**row.labels, **row.values, "note": row.note})
        return content


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question about a device."""

    name: str
    """Name for ``mosaic bench``."""
    asks: str
    measure: Callable[[Setup], Iterator[Row]]
    title: str
    """Title of table and picture."""
    of: str
    """Kind of the table's rows."""
    columns: Mapping[str, tuple[str, int | None]]
    """Columns of the table: label or value, heading, and digits of numbers (None for text)."""
    summary: Callable[[Result], Sequence[str]]
    """Lines below the table."""
    picture: Callable[[Result, str, str], Any]
    """Draws a result, with a title and a line about the machine."""

    def rows(self, setup: Setup) -> Iterator[Row]:
        """Yields rows as they are measured; an unavailable subject once."""
        absences: list[Row] = []
        for row in self.measure(setup):
            if row not in absences:
                absences += [row] if row.of == ABSENT else []
                yield row

    def answer(self, setup: Setup) -> Result:
        backend, budget, load = setup.backend, setup.budget, ForeignLoad()
        began_s, num_left_out = budget.used_s, len(budget.left_out)
        rows = tuple(self.rows(setup))
        return Result(
            question=self.name,
            backend=backend.name,
            device=backend.device,
            torch_version=torch.__version__,
            driver_version=describe_driver().version if backend.torch_device.type == "cuda" else "",
            provenance=provenance(),
            notes=setup.notes,
            foreign_cpu_share=load.share,
            seconds=round(budget.used_s - began_s, 3),
            rows=rows,
            left_out=budget.left_out[num_left_out:],
        )

    def table(self, result: Result) -> Table:
        """Returns the table, with lines about missing measurements and the machine."""
        columns = [heading if digits is None else f">{heading}" for heading, digits in self.columns.values()]
        rows = [[row.text(name, digits) for name, (_, digits) in self.columns.items()] for row in result.of(self.of)]
        lines = [
            *self.summary(result),
            *(f"not measured: {row.labels['subject']}: {row.note}" for row in result.of(ABSENT)),
            *(f"no time for {piece}" for piece in result.left_out),
            *(f"note: {note}" for note in result.notes),
            f"medians (quartiles), measured in {result.seconds:.1f} s",
            _machine(result),
        ]
        return make_table(self.title, columns, rows, caption="\n".join(lines))

    def write(self, result: Result, folder: Path) -> tuple[Path, Path]:
        """Writes ``NAME.json`` and ``NAME.png`` into a folder and returns their paths."""
        record, picture = folder / f"{self.name}.json", folder / f"{self.name}.png"
        save(result.content(), record)
        save_figure(self.picture(result, self.title, _machine(result)), picture)
        return record, picture


def _machine(result: Result) -> str:
    driver = f", driver CUDA {result.driver_version}" if result.driver_version else ""
    machine = f"{result.device.name}, torch {result.torch_version}{driver}, {result.provenance['created'][:10]}"
    return "; ".join(filter(None, (machine, note_of_others(result.foreign_cpu_share, result.device))))


def bars_figure(title: str, subtitle: str, x_axis: str, bars: Sequence[tuple[str, str, Spread | float, str]]) -> Any:
    """Draws a bar with quartiles for each (name, colour group, length, text after the bar)."""
    axes = new_figure([0.34 * max(1, len(bars)) + 0.3], title=title, subtitle=subtitle, width=9.0).axes[0]
    colors = colors_of(group for _, group, _, _ in bars)
    axes.set(ylim=(max(1, len(bars)) - 0.5, -0.5), xlabel=x_axis)
    axes.set_yticks(range(len(bars)), [shorten(name, 4.0) for name, *_ in bars])
    for row, (_, group, value, text) in enumerate(bars):
        spread = value if isinstance(value, Spread) else Spread.of([value])
        axes.barh(row, spread.median, height=0.6, color=colors[group])
        axes.plot((spread.first_quartile, spread.third_quartile), (row, row), color=INK, linewidth=1.2)
        axes.text(1.01, row, shorten(text, 6.0), va="center", transform=axes.get_yaxis_transform())
    return axes.figure
