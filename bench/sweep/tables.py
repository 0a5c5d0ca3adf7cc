"""The sweep's tables: how many cases of each kind ended how, and which."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from bench import pages
from bench.record import Figure
from bench.sweep.outcomes import OUTCOMES

STUDY = "bench_sweep"
PIPELINE_STUDY = "bench_sweep_pipeline"


def counts_table(results: Path) -> str:
    """Returns how many cases of each kind ended how in the newest sweep."""
    newest = pages.newest_study(STUDY, results)
    if newest is None:
        return pages.NOT_YET
    rows = [(kind, *_counts(newest.of(kind))) for kind in dict.fromkeys(one.part for one in newest.figures)]
    versions = "".join(f", {name} {version}" for name, version in newest.versions.items())
    heads = (f"{pages.source_of(newest)}{versions}", "cases", *OUTCOMES)
    return pages.table(heads, [*rows, ("all", *_counts(newest.figures))])


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


def _counts(figures: Sequence[Figure]) -> tuple[str, ...]:
    ended = Counter(figure.labels["outcome"] for figure in figures)
    return (str(len(figures)), *(str(ended[outcome] or "") for outcome in OUTCOMES))
