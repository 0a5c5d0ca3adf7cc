"""The printed figures of papers, from their files, and the newest kept figures beside them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType

from pydantic import TypeAdapter

from bench.gpu.tables import number, table
from bench.record import Figure, Source, Study
from mosaic.artifact import StrictFile

FOLDER = Path(__file__).resolve().parent
PAPERS = ("mosaic", "spindle", "cornstarch", "pipeweaver")
"""Names of the files, in the page's order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(StrictFile):
    """Figures of a study that stand beside a paper's."""

    study: str
    """Of the kept files; ``gpu`` is ``bench.gpu``."""
    names: str
    """Regular expression of whole names; its groups say what each value is of."""
    part: str = ""
    """Part of the study that they belong to; empty for any."""
    by: tuple[str, ...] = ()
    """Labels that say what each value is of, after the groups."""
    says: str = ""
    """A description of the values, with their unit."""
    percent: bool = False
    """True if shares are shown in per cent."""
    device: str = ""
    """The described device of a prediction or a simulation; empty for the study's machine."""

    @property
    def command(self) -> str:
        if self.study == "gpu":
            return "python -m bench.gpu --out DIR"
        return f"python -m {self.study.replace('_', '.', 1)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperRow(StrictFile):
    """One figure or table of a paper.

    Raises:
        ValueError: It has neither an answer nor a reason for none.
    """

    at: str
    where: str
    """The section that tells of it."""
    shows: str
    """Its content, with the unit."""
    theirs: Mapping[str, str]
    """Values as printed in the text, by what they are of."""
    ours: tuple[Answer, ...] = ()
    why_not: str = ""
    """Why nothing does, after ``not yet: `` or ``no longer: ``."""

    def __post_init__(self) -> None:
        if bool(self.ours) == bool(self.why_not):
            raise ValueError(f"{self.at}: give [[rows.ours]] or why_not, one of both")


@dataclass(frozen=True, slots=True, kw_only=True)
class Paper(StrictFile):
    """A paper's figures and tables."""

    title: str
    source: str
    testbed: str
    pictures: str
    """Figures and tables that are left out, and why."""
    rows: tuple[PaperRow, ...] = field(default=())


@cache
def read_paper(name: str) -> Paper:
    with (FOLDER / f"{name}.toml").open("rb") as file:
        return TypeAdapter(Paper).validate_python(tomllib.load(file))


def printed(paper: str, at: str) -> Mapping[str, str]:
    """Returns what a paper printed in one figure or table, for studies that show it beside theirs.

    Raises:
        KeyError: The paper's file has no such figure.
    """
    for row in read_paper(paper).rows:
        if row.at == at:
            return MappingProxyType(dict(row.theirs))
    raise KeyError(f"{paper}.toml has no {at!r}")


HEADS = ("figure", "shows", "theirs", "ours", "how", "device", "date, commit")
MAX_VALUES = 9
"""More of one answer are given as their range, by the first word that says what they are of."""
Newest = Mapping[str, Sequence[Study]]
"""Kept studies by name, those to be asked first in front."""
Line = tuple[str, ...]
"""Values with their source and command, device, and date."""


def kept_studies(studies: Iterable[Study]) -> Newest:
    """Returns kept results by study: full ones before quick ones, the newest first; rehearsals do not count."""
    by_name: dict[str, list[Study]] = {}
    for study in sorted(studies, key=lambda study: ("--quick" not in study.command, study.created), reverse=True):
        if not study.dry_run:
            by_name.setdefault(study.study, []).append(study)
    return by_name


def paper_table(paper: Paper, newest: Newest) -> str:
    head = f"{paper.title} ({paper.source}); theirs on {paper.testbed}. {paper.pictures}.\n\n"
    return head + table(HEADS, [line for row in paper.rows for line in _lines(row, newest)])


def _lines(row: PaperRow, newest: Newest) -> Iterator[Line]:
    """Yields the lines of a figure: what there is, then what there is not, one line for each reason."""
    lines: list[Line] = [(row.why_not, "", "", "")] if row.why_not else []
    lacking: dict[tuple[str, str], list[str]] = {}
    for answer in row.ours:
        answered, reason = _answers(answer, newest.get(answer.study, ()))
        lines += answered
        if reason:
            lacking.setdefault((f"`{answer.command}`", reason), []).append(answer.says)
    for (how, why), of in lacking.items():
        what = "; ".join(dict.fromkeys(filter(None, of)))
        lines.append((f"not yet: {what + ': ' if what else ''}{why}", how, "", ""))
    head: Line = (f"{row.at} ({row.where})", row.shows, _joined(row.theirs.items()))
    for line in lines:
        yield (*head, *line)
        head = ("", "", "")


def _answers(answer: Answer, studies: Sequence[Study]) -> tuple[list[Line], str]:
    """Returns a line for each source of the first study that has any value; otherwise why there is none."""
    reasons: dict[str, None] = {}
    for study in studies:
        rows = list(_matching(answer, study))
        if sources := dict.fromkeys(figure.source for figure, _ in rows if figure.value is not None):
            machine = answer.device or (study.machine.name if study.machine is not None else "an unknown machine")
            quick = ", quick" if "--quick" in study.command else ""
            origin = f"{study.created[:10]}, {study.commit[:12]}{quick}"
            texts = {source: f"{answer.says}: {_shown(answer, rows, source)}".removeprefix(": ") for source in sources}
            return [(text, f"{source}, `{answer.command}`", machine, origin) for source, text in texts.items()], ""
        reasons |= dict.fromkeys(figure.reason for figure, _ in rows)
    if not studies:
        return [], "no run on a GPU kept" if answer.study == "gpu" else "no result kept"
    return [], "; ".join(reasons) or "the kept results do not have it"


def _matching(answer: Answer, study: Study) -> Iterator[tuple[Figure, str]]:
    """Yields each figure that answers, and what it is of."""
    for figure in study.of(answer.part) if answer.part else study.figures:
        if match := re.fullmatch(answer.names, figure.name):
            words = [*match.groups(default=""), *(figure.labels.get(label, "") for label in answer.by)]
            yield figure, ", ".join(filter(None, words))


def _shown(answer: Answer, rows: Iterable[tuple[Figure, str]], source: Source) -> str:
    """Returns the values of one source, or their ranges where there are many."""
    scale = 100 if answer.percent else 1
    values = [(of, scale * figure.value) for figure, of in rows if figure.value is not None and figure.source == source]
    if len(values) <= MAX_VALUES:
        return _joined((of, number(value)) for of, value in values)
    ranges: dict[str, list[float]] = {}
    for of, value in values:
        ranges.setdefault(of.partition(", ")[0], []).append(value)
    return _joined(
        (of, f"{number(min(some))} to {number(max(some))} ({len(some)})" if len(some) > 1 else number(some[0]))
        for of, some in ranges.items()
    )


def _joined(values: Iterable[tuple[str, str]]) -> str:
    return "; ".join(f"{of}: {value}".removeprefix(": ") for of, value in values)
