"""Tables of pages that are no GPU result: figures of kept studies, and the tables of choices as the code has them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from bench.gpu.tables import number
from bench.record import Figure, Study
from mosaic.artifact import load
from mosaic.backends.table import BACKENDS
from mosaic.context.distribute import CONTEXT_METHODS
from mosaic.cost.interference import FORMS
from mosaic.hardware import HARDWARE_NAMES
from mosaic.models import MODELS
from mosaic.pipelining.baselines import BASELINES
from mosaic.pipelining.partition.methods import PARTITION_METHODS
from mosaic.solver.methods import METHODS

NOT_YET = "not measured yet\n"
SOURCES = ("measured", "simulated", "predicted")
HIGHLIGHTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "bench_colocate": (
            r"placed call of an empty module, sequential plan, over a plain call, us",
            r"placed call of an empty module on a lane, .*",
            r"operation between modules on a lane, us",
            r".*: step under the sequential plan over the plain step, ratio",
        ),
        "bench_cost": (
            r"slowdown in other groups of the fitted modules, all sizes",
            r"error on other groups of the fitted modules, all sizes, (unaware|assumed).*",
            r"error on other groups of the fitted modules, all sizes, (Eq\. 8 (as|fit)|pairwise \(2).*",
            r"difference of the same (groups run|points measured) twice",
            r"surface error at a held-out degree(, interpolated .*)?",
            r"analytic error on other modules, (as described|one speed).*",
        ),
        "bench_solver": (
            r"gain of exact over [\w-]+, \d+ modules .*, median",
            r"10 modules, 8 GPUs, 10 %.*",
            r"20 modules, \d+ GPUs.*: proven gap within 5 s, (median|worst), %",
            r"\d+ modules, 8 GPUs, memory held across stages .*: (proven|step over) .*",
        ),
        "bench_ranks": (
            r"rows of (64|1024|16384) KiB from 2 ranks to one(, predicted)?, ms",
            r"(megatron|distmm|spindle|exact): step over auto's, ofasys, \d+ GPUs, ratio",
            r"(auto|exact|distmm|spindle): speed-up over megatron, qwen-val-\d+b, \d+ GPUs",
        ),
        "bench_spindle": (
            r"Fig\. 8: (spindle|distmm|exact|auto): highest speed-up over megatron, .*, any GPUs",
            r"Fig\. 12: (spindle|exact|auto): .*, 10 tasks, 32 GPUs, s",
        ),
        "bench_pipeline": (
            r"Fig\. 12: .*: (tree|shifts), 2 s: above the bound, %",
            r"Fig\. 9a: .*: planned: (step, s|above its bound, %)",
            r"Fig\. 9a: .*: (any partition.*|megatron|zb-v): step over the planned one's, ratio",
            r"roll-out of .*",
            r"layer tuning of .*: (one rank, ms|step over .*)",
            r"vlm-xl-16k: .*",
            r"vlm-\w: (separated|mixed-v|1f1b) over lanes, ratio",
        ),
        "bench_pipeline_measured": (r"an action that computes nothing, .*",),
        "bench_context": (
            r"\w+, \d+ tokens: runs and work of all blocks, ms",
            r"\w+, \d+ tokens, 64 ranks: whole distribution .*",
            r"\w+, \d+ tokens, one of \d+ ranks: .*, ms",
            r"mp, \d+ tokens, mask \d+, 2 gloo ranks: (zigzag over [^i]*|.*: attention .*)",
        ),
        "bench_retrain_kills": (r"kills .*", r"days that .*", r"steps made again.*", r"processes left behind"),
    }
)
"""For each study the figures that its page shows, as regular expressions of whole names."""


def study_table(study: str, results: Path) -> str:
    """Returns the highlights of the newest full file of a study; of the newest quick one where there is no other."""
    newest = newest_study(study, results)
    if newest is None:
        return NOT_YET
    rows = [_row(figure) for pattern in HIGHLIGHTS[study] for figure in _matching(newest, pattern)]
    return table((source_of(newest), *SOURCES), rows)


def newest_study(study: str, results: Path) -> Study | None:
    """Returns the newest full result of a study; the newest quick one where there is no other."""
    found = [load(Study, path) for path in sorted((results / "host").glob(f"*-{study}.json"))]
    return max(found, key=lambda one: ("--quick" not in one.command, one.created), default=None)


def source_of(study: Study) -> str:
    """Returns where and when a result comes from."""
    machine = study.machine.name if study.machine is not None else "an unknown machine"
    kind = "quick study" if "--quick" in study.command else "full study"
    return f"{machine}, torch {study.torch_version}, {study.created[:10]}, commit {study.commit[:12]}, {kind}"


def methods_table() -> str:
    """Returns the methods of planning."""
    rows = [
        (f"`{one.name}`", one.description, "yes" if one.gives_bound else "", "yes" if one.is_compared else "")
        for one in METHODS.values()
    ]
    return table(("method", "plans", "gives a bound", "in `--compare`"), rows)


def context_methods_table() -> str:
    """Returns the ways to share a sequence out."""
    rows = [(f"`{method.name}`", method.description) for method in CONTEXT_METHODS.values()]
    return table(("method", "shares blocks out"), rows)


def choices_table() -> str:
    """Returns the tables of choices: where each is, and what is in it."""
    rows = [
        ("a method of planning", "`mosaic/solver/methods.py`", METHODS),
        ("a backend", "`mosaic/backends/table.py`", BACKENDS),
        ("a model", "`mosaic/models/rows.py`", MODELS),
        ("a device description", "`mosaic/hardware/devices.toml`", HARDWARE_NAMES),
        ("a form of interference", "`mosaic/cost/interference.py`", FORMS),
        ("a way to cut a pipeline", "`mosaic/pipelining/partition/methods.py`", PARTITION_METHODS),
        ("a way to share a sequence out", "`mosaic/context/distribute.py`", CONTEXT_METHODS),
        ("a schedule to compare with", "`mosaic/pipelining/baselines.py`", BASELINES),
    ]
    return table(
        ("to add", "write a file, and a line in", "there are"),
        [(what, where, ", ".join(f"`{name}`" for name in names)) for what, where, names in rows],
    )


def _matching(study: Study, pattern: str) -> Iterator[Figure]:
    return (one for one in study.figures if one.value is not None and re.fullmatch(pattern, one.name))


def _row(figure: Figure) -> tuple[str, ...]:
    value = number(figure.value)
    if figure.low is not None and figure.high is not None and figure.low < figure.high:
        value += f" ({number(figure.low)} to {number(figure.high)})"
    return (figure.name, *(value if source == figure.source else "" for source in SOURCES))


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table of a page."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
