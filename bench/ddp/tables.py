"""The table of the study against DistributedDataParallel: a row per model."""

from __future__ import annotations

from bench import pages
from bench.ddp.models import MODELS
from bench.gpu.tables import number
from bench.record import Figure, Study

HEADS = (
    "DistributedDataParallel at its best, ms a step",
    "`mosaic.colocate`, ms a step",
    "DistributedDataParallel's over ours",
    "the trial picked a plan",
    "Mosaic's data-parallel step over DistributedDataParallel's",
    "difference of all parameters over their length",
)
SHORT = 4
"""Columns of the short table, after the model."""


def ddp_table(study: Study, *, is_short: bool = False) -> str:
    """Returns a study's rows; the short table has only step times, ratio and choice."""
    rows = [row for name in MODELS if (row := _row(study, name)) is not None]
    if is_short:
        heads = (f"{pages.source_of(study)}, measured", *HEADS)
        return pages.table(heads[: 1 + SHORT], [row[: 1 + SHORT] for row in rows])
    settings = sorted({figure.labels["setting"] for figure in study.figures if "setting" in figure.labels})
    note = f"\nThe best of several settings in a model's first launch: {'; '.join(settings)}.\n" if settings else ""
    return pages.table((f"{pages.source_of(study)}, measured", *HEADS), rows) + note


def _row(study: Study, name: str) -> tuple[str, ...] | None:
    figures = {
        figure.name.removeprefix(f"{name}: "): figure for figure in study.figures if figure.name.startswith(f"{name}: ")
    }
    picked = figures.get("launches in which the trial picked a plan")
    if picked is None:
        missing = next((figure.reason for figure in figures.values() if figure.reason), None)
        return None if missing is None else (name, f"not measured: {missing}", *[""] * (len(HEADS) - 1))
    megabytes = figures["gradients, MB"].value
    return (
        f"{name}, {number(megabytes)} MB of gradients",
        pages.shown(figures["step of DistributedDataParallel at its best, ms"]),
        pages.shown(figures["step of mosaic.colocate, ms"]),
        pages.shown(figures["step of DistributedDataParallel at its best over mosaic.colocate's, ratio"]),
        f"{number(picked.value)} of {len(picked.samples)} times",
        pages.shown(figures["data-parallel step of Mosaic over DistributedDataParallel's at its best, ratio"]),
        _difference(figures["length of the difference of all parameters over theirs, ratio"]),
    )


def _difference(figure: Figure) -> str:
    return "equal bit for bit" if figure.value == 0 else f"{figure.value:.1e}"
