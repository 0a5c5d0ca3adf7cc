"""Pictures of the solver study, drawn from its figures alone."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.record import Figure, Study

Point = tuple[float, float]


def draw(study: Study, folder: Path) -> list[Path]:
    """Draws gains and the paper's Fig. 13a to 14b; returns the files."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, paint in _PICTURES.items():
        canvas, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
        paint(axes, study.figures)
        path = folder / f"solver-{name}.png"
        canvas.savefig(path, dpi=120)
        pyplot.close(canvas)
        written.append(path)
    return written


def _lines(figures: Sequence[Figure], pattern: str) -> dict[str, list[Point]]:
    """Collects (x, value) by line; the pattern names ``line`` and ``x``. Figures without a number are left out."""
    found: dict[str, list[Point]] = defaultdict(list)
    for figure in figures:
        match = re.fullmatch(pattern, figure.name)
        if match and figure.value is not None:
            found[match["line"]].append((float(match["x"]), figure.value))
    return found


def _plot(axes: Any, lines: dict[str, list[Point]], x: str, y: str, title: str) -> None:
    for name, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
    axes.set(xlabel=x, ylabel=y, title=title)
    axes.set_xticks(sorted({at for points in lines.values() for at, _ in points}))
    if lines:
        axes.legend(fontsize="small")


def _search_time(axes: Any, figures: Sequence[Figure]) -> None:
    lines = _lines(figures, r"Fig\. 13a: (?P<line>.+), (?P<x>\d+) modules, median, s")
    few = _lines(figures, r"Fig\. 13a: (?P<line>brute force), (?P<x>\d+) modules on 2 GPUs, s")
    lines |= {f"{name} (2 GPUs only)": points for name, points in few.items()}
    _plot(axes, lines, "modules of OFASys", "search time, s (measured)", "Fig. 13a: search time")
    axes.set_yscale("log")


def _optimality(axes: Any, figures: Sequence[Figure]) -> None:
    lines = _lines(figures, r"Fig\. 13b: (?P<line>.+), (?P<x>\d+) modules, median, %")
    _plot(axes, lines, "modules of OFASys", "% (simulated)", "Fig. 13b: quality of Algorithm 1")


def _scale(axes: Any, figures: Sequence[Figure]) -> None:
    lines = _lines(figures, r"Fig\. 14a: (?P<line>.+), OFASys, (?P<x>\d+) GPUs, median")
    _plot(axes, lines, "GPUs", "ratio (simulated)", "Fig. 14a: exact plan against others")


def _granularity(axes: Any, figures: Sequence[Figure]) -> None:
    lines = _lines(figures, r"Fig\. 14b: (?P<line>\w+), .*steps of (?P<x>\d+) %: best known over plan, median, %")
    _plot(axes, lines, "steps of quotas, %", "best known over plan, % (simulated)", "Fig. 14b: granularity")


def _gains(axes: Any, figures: Sequence[Figure]) -> None:
    own = [figure for figure in figures if figure.name.startswith("gain of exact") and figure.source == "simulated"]
    shown = [figure for figure in own if figure.value is not None]
    names = [figure.name.removeprefix("gain of exact over ").removesuffix(", 8 GPUs, median") for figure in shown]
    if shown:
        axes.boxplot([figure.samples for figure in shown], orientation="horizontal", tick_labels=names)
    axes.tick_params(axis="y", labelsize=5)
    axes.axvline(1.0, color="grey", linewidth=0.5)
    axes.set(xlabel="rival's step over exact's (simulated)", title="Gain of the exact plan")


def _worth(axes: Any, figures: Sequence[Figure]) -> None:
    shown = [figure for figure in figures if re.match("(lost|gained) ", figure.name) and figure.samples]
    names = [figure.name.removesuffix(", mean, %") for figure in shown]
    if shown:
        axes.boxplot([figure.samples for figure in shown], orientation="horizontal", tick_labels=names)
    axes.tick_params(axis="y", labelsize=4)
    axes.axvline(0.0, color="grey", linewidth=0.5)
    axes.set(xlabel="% of the step (simulated)", title="What parts of the formulation are worth")


_PICTURES: dict[str, Callable[[Any, Sequence[Figure]], None]] = {
    "search-time": _search_time,
    "optimality": _optimality,
    "scale": _scale,
    "granularity": _granularity,
    "gains": _gains,
    "worth": _worth,
}
