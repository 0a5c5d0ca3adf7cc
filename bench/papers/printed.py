"""The papers' figures, from their files, and our newest figures."""

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
    """Figures of a study to compare with a paper's."""

    study: str
    """Name of the study; ``gpu`` is ``bench.gpu``."""
    names: str
    """Regular expression of whole names; its groups are the subject of a value."""
    part: str = ""
    """Part of the study; empty for any."""
    by: tuple[str, ...] = ()
    """Labels of the subject of a value, after the groups."""
    says: str = ""
    """A description of the values, with their unit."""
    percent: bool = False
    """True if shares are shown in percent."""
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
    """Its section."""
    shows: str
    """Its content, with the unit."""
    theirs: Mapping[str, str]
    """Values printed in the text, by subject."""
    ours: tuple[Answer, ...] = ()
    why_not: str = ""
    """Reason for its absence, after ``not yet: `` or ``no longer: ``."""

    def __post_init__(self) -> None:
        if bool(self.ours) == bool(self.why_not):
            raise ValueError(f"{self.at}: use either [[rows.ours]] or why_not")


@dataclass(frozen=True, slots=True, kw_only=True)
class Paper(StrictFile):
    """A paper's figures and tables."""

    title: str
    source: str
    testbed: str
    pictures: str
    """Omitted figures and tables, and the reason."""
    rows: tuple[PaperRow, ...] = field(default=())


@cache
def read_paper(name: str) -> Paper:
    with (FOLDER / f"{name}.toml").open("rb") as file:
        return TypeAdapter(Paper).validate_python(tomllib.load(file))


def printed(paper: str, at: str) -> Mapping[str, str]:
    """Returns the printed values of a paper's figure or table.

    Raises:
        KeyError: The paper's file has no such figure.
    """
    for row in read_paper(paper).rows:
        if row.at == at:
            return MappingProxyType(dict(row.theirs))
    raise KeyError(f"{paper}.toml has no {at!r}")


HEADS = ("figure", "shows", "theirs", "ours", "how", "device", "date, commit")
MAX_VALUES = 9
"""Maximum number of values; more are shown as ranges, by the first word of their subject."""
Newest = Mapping[str, Sequence[Study]]
"""Studies by name, in order of preference."""
Line = tuple[str, ...]
"""Values with their source and command, device, and date."""


def kept_studies(studies: Iterable[Study]) -> Newest:
    """Returns results by study: full ones before quick ones, the newest first; without rehearsals."""
    by_name: dict[str, list[Study]] = {}
    for study in sorted(studies, key=lambda study: ("--quick" not in study.command, study.created), reverse=True):
        if not study.dry_run:
            by_name.setdefault(study.study, []).append(study)
    return by_name


def paper_table(paper: Paper, newest: Newest) -> str:
    head = f"{paper.title} ({paper.source}); theirs on {paper.testbed}. {paper.pictures}.\n\n"
    return head + table(HEADS, [line for row in paper.rows for line in _lines(row, newest)])


def _lines(row: PaperRow, newest: Newest) -> Iterator[Line]:
    """Yields the lines of a figure: our values, then a line per reason for missing ones."""
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
    """Returns a line per source of the first study with values, or the reason for their absence."""
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
        return [], "no result of a GPU" if answer.study == "gpu" else "no result"
    return [], "; ".join(reasons) or "missing in the results"


def _matching(answer: Answer, study: Study) -> Iterator[tuple[Figure, str]]:
    """Yields each matching figure and its subject."""
    for figure in study.of(answer.part) if answer.part else study.figures:
        if match := re.fullmatch(answer.names, figure.name):
            words = [*match.groups(default=""), *(figure.labels.get(label, "") for label in answer.by)]
            yield figure, ", ".join(filter(None, words))


def _shown(answer: Answer, rows: Iterable[tuple[Figure, str]], source: Source) -> str:
    """Returns the values of one source, or their ranges if there are many."""
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
