"""The sweep's tables: how many cases of each kind ended how, and which."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from bench import pages
from bench.record import Figure
from bench.sweep.outcomes import AS_TOLD, NO_PLAIN, ON_LANES, OUTCOMES, REFUSED

STUDY = "bench_sweep"
PIPELINE_STUDY = "bench_sweep_pipeline"
OPERATORS_STUDY = "bench_sweep_operators"


def counts_table(results: Path, study: str = STUDY, outcomes: Sequence[str] = OUTCOMES) -> str:
    """Returns how many cases of each kind ended how in the newest sweep."""
    newest = pages.newest_study(study, results)
    if newest is None:
        return pages.NOT_YET
    kinds = dict.fromkeys(one.part for one in newest.figures)
    rows = [(kind, *_counts(newest.of(kind), outcomes)) for kind in kinds]
    versions = "".join(f", {name} {version}" for name, version in newest.versions.items())
    heads = (f"{pages.source_of(newest)}{versions}", "cases", *outcomes)
    return pages.table(heads, [*rows, ("all", *_counts(newest.figures, outcomes))])


def reasons_table(results: Path) -> str:
    """Returns what Mosaic said of models that it would not cut, each way out once."""
    newest = pages.newest_study(PIPELINE_STUDY, results)
    if newest is None:
        return pages.NOT_YET
    said: dict[str, list[Figure]] = {}
    for figure in newest.figures:
        if figure.labels["outcome"] in (REFUSED, AS_TOLD):
            said.setdefault(_way_out(figure.reason), []).append(figure)
    ordered = sorted(said.values(), key=lambda found: -len(found))
    rows = [
        (_shown(found[0].reason), str(len(found)), _some([one.labels["case"] for one in found])) for found in ordered
    ]
    return pages.table(("said, of the first", "cases", "such as"), rows)


def cases_table(results: Path) -> str:
    """Returns which cases of each kind ended how in the newest sweep."""
    newest = pages.newest_study(STUDY, results)
    if newest is None:
        return pages.NOT_YET
    names: dict[tuple[str, str], list[str]] = {}
    for figure in newest.figures:
        names.setdefault((figure.labels["outcome"], figure.part), []).append(f"`{figure.labels['case']}`")
    rows = [(*key, ", ".join(found)) for outcome in OUTCOMES for key, found in names.items() if key[0] == outcome]
    return pages.table(("ended", "kind", "cases"), rows)


def operators_table(results: Path) -> str:
    """Returns how many of torch's operators ended how between modules, and which did not end equal on lanes."""
    newest = pages.newest_study(OPERATORS_STUDY, results)
    if newest is None:
        return pages.NOT_YET
    names: dict[str, list[str]] = {}
    for figure in newest.figures:
        names.setdefault(figure.labels["outcome"], []).append(f"`{figure.labels['operator']}`")
    rows = [
        (outcome, str(len(found)), "" if outcome == ON_LANES else ", ".join(found))
        for outcome in (*OUTCOMES, NO_PLAIN)
        if (found := names.get(outcome))
    ]
    return pages.table((pages.source_of(newest), "operators", "which"), rows)


def _counts(figures: Sequence[Figure], outcomes: Sequence[str]) -> tuple[str, ...]:
    ended = Counter(figure.labels["outcome"] for figure in figures)
    return (str(len(figures)), *(str(ended[outcome] or "") for outcome in outcomes))


def _way_out(reason: str) -> str:
    """Returns the end of a message, which says what to do; numbers and names of it aside."""
    return re.sub(r"[\d.]+|\w*layerdrop", "", re.split(r"[:;] ", reason)[-1])


def _shown(reason: str) -> str:
    """Returns a message for a cell: without the class of its error, and what was changed."""
    return reason.partition("Error: ")[2].replace("|", "\\|")


def _some(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(f"`{name}`" for name in names[:most])
