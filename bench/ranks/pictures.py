"""Pictures of the study of ranks, drawn from its figures alone; what we measured and simulated never share one."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.record import Figure, Study


def draw(study: Study, folder: Path) -> list[Path]:
    """Draws what there are numbers for; returns the files."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, (size, paint) in _PICTURES.items():
        canvas, axes = pyplot.subplots(figsize=size, layout="constrained")
        if paint(axes, study.figures):
            path = folder / f"ranks-{name}.png"
            canvas.savefig(path, dpi=120)
            written.append(path)
        pyplot.close(canvas)
    return written


def _found(figures: Sequence[Figure], pattern: str) -> list[tuple[re.Match[str], Figure]]:
    matches = [(re.fullmatch(pattern, figure.name), figure) for figure in figures]
    return [(match, figure) for match, figure in matches if match and figure.value is not None]


def _scale(axes: Any, figures: Sequence[Figure]) -> bool:
    """Others' simulated steps over the plan of ``auto`` by number of GPUs; the paper's beside, dashed."""
    ours: dict[str, list[tuple[int, float]]] = defaultdict(list)
    paper: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for match, figure in _found(figures, r"(?P<method>[\w-]+): step over auto's, ofasys, (?P<gpus>\d+) GPUs, ratio"):
        assert figure.value is not None
        ours[match["method"]].append((int(match["gpus"]), figure.value))
        if "paper" in figure.labels:
            paper[match["method"]].append((int(match["gpus"]), float(figure.labels["paper"])))
    for index, (method, points) in enumerate(ours.items()):
        axes.plot(*zip(*sorted(points), strict=True), marker="o", color=f"C{index}", label=method)
        if method in paper:
            label = f"{method}, the paper's (measured)"
            axes.plot(*zip(*sorted(paper[method]), strict=True), "--", marker="x", color=f"C{index}", label=label)
    axes.set(xlabel="GPUs", ylabel="step over that of auto (simulated)", title="OFASys as GPUs are added (Fig. 14a)")
    axes.set_xticks(sorted({gpus for points in ours.values() for gpus, _ in points}))
    if ours:
        axes.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return bool(ours)


def _measured(axes: Any, figures: Sequence[Figure]) -> bool:
    """Each planner's measured step over DDP's on two ranks, round by round."""
    rows = _found(figures, r"(?P<method>[\w-]+): step over DDP's on the same ranks, (?P<of>.+), ratio")
    for place, (_, figure) in enumerate(rows):
        axes.plot(figure.samples, [place] * len(figure.samples), "o", color="C0", alpha=0.5)
        axes.plot([figure.value], [place], "|", color="black", markersize=18)
    axes.set_yticks(range(len(rows)), [f"{match['method']}, {match['of']}" for match, _ in rows], fontsize=7)
    axes.axvline(1.0, color="grey", linewidth=0.5)
    axes.set(xlabel="step over DDP's on the same ranks (measured; a dot a round, a bar the median)")
    axes.invert_yaxis()
    return bool(rows)


def _memory(axes: Any, figures: Sequence[Figure]) -> bool:
    """What the fullest rank holds, over DDP's."""
    pattern = r"(?P<method>[\w-]+): parameters, .* of the fullest rank over DDP's, (?P<of>.+), ratio"
    rows = _found(figures, pattern)
    axes.barh(range(len(rows)), [figure.value for _, figure in rows], color="C2")
    axes.set_yticks(range(len(rows)), [f"{match['method']}, {match['of']}" for match, _ in rows], fontsize=7)
    axes.axvline(1.0, color="grey", linewidth=0.5)
    axes.set(xlabel="parameters, gradients and optimizer state of the fullest rank over DDP's (measured)")
    axes.invert_yaxis()
    return bool(rows)


_PICTURES: dict[str, tuple[tuple[float, float], Callable[[Any, Sequence[Figure]], bool]]] = {
    "scale": ((9, 4), _scale),
    "measured": ((8, 4), _measured),
    "memory": ((8, 4), _memory),
}
