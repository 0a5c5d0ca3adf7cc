"""Reads the papers' files. They alone hold what a paper printed; nothing in them is guessed from a plot."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType

from pydantic import TypeAdapter

from mosaic.device import StrictFile

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
        module = "bench.papers.spindle" if self.study == "bench_spindle" else self.study.replace("_", ".", 1)
        return f"python -m {module}"


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
    not_yet: str = ""
    """Why nothing does."""

    def __post_init__(self) -> None:
        if bool(self.ours) == bool(self.not_yet):
            raise ValueError(f"{self.at}: give [[rows.ours]] or not_yet, one of both")


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
