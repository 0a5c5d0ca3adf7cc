"""Fig. 8 of the Spindle paper again, drawn from the study's figures alone."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from bench.record import Study

_BAR = re.compile(
    r"Fig\. 8: (?P<method>\S+): speed-up over megatron, (?P<model>\S+) .*, (?P<tasks>\d+) tasks, (?P<gpus>\d+) GPUs"
)


def draw(study: Study, folder: Path) -> list[Path]:
    """Draws the speed-ups of each model; returns the files."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    bars: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for figure in study.figures:
        found = _BAR.fullmatch(figure.name)
        if found is not None and figure.value is not None:
            bars[found["model"]][found["method"]][f"{found['tasks']} tasks\n{found['gpus']} GPUs"] = figure.value
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for model, methods in bars.items():
        canvas, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
        cases = list(dict.fromkeys(case for own in methods.values() for case in own))
        for at, (method, own) in enumerate(methods.items()):
            places = [place + at / (len(methods) + 1) for place in range(len(cases))]
            axes.bar(places, [own.get(case, 0.0) for case in cases], width=1 / (len(methods) + 1), label=method)
        axes.set_xticks([place + 0.4 for place in range(len(cases))], cases, fontsize="small")
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set(ylabel="speed-up over megatron (simulated)", title=f"Fig. 8: {model}")
        axes.legend(fontsize="small")
        path = folder / f"spindle-figure-8-{model}.png"
        canvas.savefig(path, dpi=120)
        pyplot.close(canvas)
        written.append(path)
    return written
