"""Draws a plot of each study's newest result, for ``bench/README.md``: ``python -m bench.plots``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import matplotlib
import matplotlib.pyplot as plt

from bench.pages import newest_study

RESULTS = Path(__file__).resolve().parent / "results"
PLOTS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "bench_colocate": (r"(placed call .*, (?:launched|waited for)|operation between .*), us", "microseconds"),
        "bench_never_slower": (r"(.*): plain step over the step with Mosaic.*", "plain step over ours"),
        "bench_cost": (r"error on other groups of the fitted modules, all sizes, (.*)", "relative error"),
        "bench_solver": (r"gain of exact over (.*, 10 modules \w+), 8 GPUs, median", "step over the exact plan's"),
        "bench_ddp": (
            r"(.*): step of DistributedDataParallel .* over mosaic\.colocate's, ratio",
            "DDP's over ours",
        ),
        "bench_pipeline": (r"Fig\. 9a: (vlm-.*): step over the planned one's, ratio", "step over the planned one's"),
        "bench_context": (r"(\w+, \d+ tokens, mask \d+, .*): attention forward and backward, ms", "milliseconds"),
        "bench_ranks": (r"(\w+): step over auto's, (ofasys, \d+ GPUs), ratio", "step over auto's"),
    }
)
"""Figures of one unit by study, whose groups become labels, and the axis."""


def plot_of(study: str) -> Path:
    return RESULTS / "host" / f"{study}.svg"


def draw(study: str) -> None:
    newest = newest_study(study, RESULTS)
    if newest is None:
        return
    pattern, axis = PLOTS[study]
    rows = [
        (", ".join(match.groups()), figure)
        for figure in newest.figures
        if figure.value is not None and (match := re.fullmatch(pattern, figure.name))
    ]
    height = 0.6 + 0.22 * len(rows)
    drawn, axes = plt.subplots(figsize=(7, height), layout="constrained")
    for place, (_, figure) in enumerate(rows):
        low, high = figure.low or figure.value, figure.high or figure.value
        axes.plot([low, high], [place, place], color="tab:blue", linewidth=1.5)
        axes.plot([figure.value], [place], "o", color="tab:blue", markersize=4)
    if "over" in axis:
        axes.axvline(1, color="gray", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [label for label, _ in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(f"{axis} ({rows[0][1].source})", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    drawn.savefig(plot_of(study), metadata={"Date": None})
    plt.close(drawn)


if __name__ == "__main__":
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "mosaic", "svg.fonttype": "none"})
    for name in PLOTS:
        draw(name)
