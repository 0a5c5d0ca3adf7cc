"""Tables of pages except GPU results: figures of studies, and tables of choices in the code."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from bench.gpu.tables import number, table
from bench.record import Figure, Study
from mosaic.artifact import load
from mosaic.backends.table import BACKENDS
from mosaic.context.distribute import CONTEXT_METHODS
from mosaic.hardware import HARDWARE_NAMES
from mosaic.models import MODELS
from mosaic.pipelining.baselines import BASELINES
from mosaic.pipelining.cuts import PARTITION_METHODS
from mosaic.solver.methods import METHODS

SOURCES = ("measured", "simulated", "predicted")
HIGHLIGHTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "bench_colocate": (
            r"placed call of an empty module, sequential plan, over a plain call, us",
            r"placed call of an empty module on a lane, .*",
            r"operation between modules on a lane, us",
        ),
        "bench_cost": (
            r"error on other groups of the fitted modules, all sizes, (unaware|Eq\. 8 as|pairwise \(2).*",
            r"difference of the same groups run twice",
            r"analytic error on other modules, one speed.*",
        ),
        "bench_solver": (
            r"gain of exact over (gahc|megatron|spindle), 10 modules (star|align), 8 GPUs, median",
            r"10 modules, 8 GPUs, 10 %: (proven|search time, median).*",
            r"[69] modules, 8 GPUs, memory held across stages .*: proven .*",
        ),
        "bench_ranks": (
            r"rows of 1024 KiB from 2 ranks to one(, predicted)?, ms",
            r"(megatron|distmm|spindle|exact): step over auto's, ofasys, 32 GPUs, ratio",
        ),
        "bench_pipeline": (
            r"Fig\. 9a: vlm-[sl]: planned: above its bound, %",
            r"Fig\. 9a: vlm-[sl]: (megatron|zb-v): step over the planned one's, ratio",
            r"vlm-xl-16k: planned .*",
        ),
        "bench_context": (
            r"mp, \d+ tokens, 64 ranks: whole distribution .*",
            r"mp, \d+ tokens, one of \d+ ranks: .*, ms",
            r"mp, \d+ tokens, mask 0, 2 gloo ranks: .*: attention .*",
        ),
        "bench_retrain_kills": (r"kills of a daily run", r"days that (?!they).*", r"processes left behind"),
    }
)
"""Figures shown on pages by study, as regular expressions of whole names."""


def study_table(study: Study) -> str:
    """Returns the selected figures of a study."""
    figures = [figure for pattern in HIGHLIGHTS[study.study] for figure in _matching(study, pattern)]
    sources = [source for source in SOURCES if any(figure.source == source for figure in figures)]
    rows = [
        (figure.name, *(shown(figure) if figure.source == source else "" for source in sources)) for figure in figures
    ]
    return table((source_of(study), *sources), rows)


def newest_study(study: str, results: Path) -> Study | None:
    """Returns the newest full result of a study, or else the newest quick one."""
    studies = [load(Study, path) for path in sorted((results / "host").glob(f"*-{study}.json"))]
    return max(studies, key=lambda study: ("--quick" not in study.command, study.created), default=None)


def source_of(study: Study) -> str:
    machine = study.machine.name if study.machine is not None else "an unknown machine"
    kind = "quick study" if "--quick" in study.command else "full study"
    return f"{machine}, torch {study.torch_version}, {study.created[:10]}, commit {study.commit[:12]}, {kind}"


def methods_table() -> str:
    rows = [
        (f"`{name}`", method.description, "yes" if method.gives_bound else "", "yes" if method.is_compared else "")
        for name, method in METHODS.items()
    ]
    return table(("method", "plans", "gives a bound", "in `--compare`"), rows)


def context_methods_table() -> str:
    rows = [(f"`{method.name}`", method.description) for method in CONTEXT_METHODS.values()]
    return table(("method", "assignment of blocks"), rows)


def choices_table() -> str:
    """Returns the tables of choices with their files and entries."""
    rows = [
        ("a planning method", "`mosaic/solver/methods.py`", METHODS),
        ("a backend", "`mosaic/backends/table.py`", BACKENDS),
        ("a model", "`mosaic/models/rows.py`", MODELS),
        ("a device description", "`mosaic/hardware/devices.toml`", HARDWARE_NAMES),
        ("a pipeline partition", "`mosaic/pipelining/cuts.py`", PARTITION_METHODS),
        ("a load balancer for sequences", "`mosaic/context/distribute.py`", CONTEXT_METHODS),
        ("a baseline schedule", "`mosaic/pipelining/baselines.py`", BASELINES),
    ]
    return table(
        ("to add", "write a function, and add it to", "entries"),
        [(what, where, ", ".join(f"`{name}`" for name in names)) for what, where, names in rows],
    )


def _matching(study: Study, pattern: str) -> Iterator[Figure]:
    return (own for own in study.figures if own.value is not None and re.fullmatch(pattern, own.name))


def shown(figure: Figure | None, digits: int = 3) -> str:
    """Formats a figure with its interval."""
    if figure is None or figure.value is None:
        return "-"
    if figure.low is None or figure.high is None or figure.low == figure.high:
        return number(figure.value, digits)
    value, low, high = (number(value, digits) for value in (figure.value, figure.low, figure.high))
    return f"{value} ({low} to {high})"
