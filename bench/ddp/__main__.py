"""The study of ``mosaic.colocate`` on several ranks, against the fastest setting of torch's DistributedDataParallel.

``python -m bench.ddp [--quick] [--json FILE]``

Two gloo processes as under torchrun, with one core and thread each; several launches per model. The first launch
selects the fastest of a few settings of DistributedDataParallel. This setting, ``mosaic.colocate(model, sample=batch)``
with its defaults, and Mosaic's data-parallel step then take turns at the same steps of the same model. Each launch
profiles, plans and tries again. A step is forward, backward, AdamW and ``zero_grad``; its time is that of the slower
rank.
"""

from __future__ import annotations

import os

# OpenMP reads this once, when torch is loaded; spinning idle threads would take a rank's core
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import time
from collections import defaultdict
from collections.abc import Iterator
from functools import partial

from bench.ddp.models import MODELS
from bench.ddp.turns import Scale, launch
from bench.harness import PartedStudy, StudyPart
from bench.ranks.launch import on_ranks
from bench.record import Figure, median_figure

RANKS = 2
LAUNCHES = 3
QUICK = Scale(rounds=2, steps=2, settings=2)


def of_model(seconds: float, *, name: str, scale: Scale, launches: int) -> Iterator[Figure]:
    """Yields a model's figures over the launches within the time limit.

    Raises:
        PartFailedError: There is no time for a launch.
    """
    ends, longest = time.monotonic() + seconds, 0.0
    figures: defaultdict[str, list[Figure]] = defaultdict(list)
    while not figures["ddp"] or (len(figures["ddp"]) < launches and longest < ends - time.monotonic()):
        began = time.monotonic()
        best = figures["ddp"][0].labels["setting"] if figures["ddp"] else None
        for figure in on_ranks(partial(launch, name=name, scale=scale, best=best), RANKS, ends - began):
            figures[figure.name].append(figure)
        longest = max(longest, time.monotonic() - began)
    yield from figures_of(name, figures)


def figures_of(name: str, figures: dict[str, list[Figure]]) -> Iterator[Figure]:
    """Yields the figures of a model from those of its launches."""

    def pooled(what: str, key: str, **labels: str) -> Figure:
        samples = [sample for figure in figures[key] for sample in figure.samples]
        return median_figure(f"{name}: {what}", samples, labels={"samples": str(len(samples)), **labels})

    best = _distinct(figure.labels["setting"] for figure in figures["ddp"])
    yield pooled("gradients, MB", "MB")
    yield pooled("step of DistributedDataParallel at its best, ms", "ddp", setting=best)
    yield pooled("step of mosaic.colocate, ms", "ours")
    yield pooled("step of DistributedDataParallel at its best over mosaic.colocate's, ratio", "gain")
    yield pooled("data-parallel step of Mosaic over DistributedDataParallel's at its best, ratio", "alike over ddp")
    plans = _distinct(figure.labels["plan"] for figure in figures["picked"])
    picked = [figure.samples[0] for figure in figures["picked"]]
    yield Figure(
        name=f"{name}: launches in which the trial picked a plan",
        source="measured",
        value=sum(picked),
        samples=tuple(picked),
        labels={"samples": str(len(picked)), "plan": plans},
    )
    differences = tuple(figure.samples[0] for figure in figures["parameters"])
    yield Figure(
        name=f"{name}: length of the difference of all parameters over theirs, ratio",
        source="measured",
        value=max(differences),
        samples=differences,
        labels={"samples": str(len(differences))},
    )


def _distinct(names: Iterator[str]) -> str:
    return "; ".join(sorted(set(names)))


def _parts(scale: Scale, launches: int, seconds: float) -> tuple[StudyPart, ...]:
    return tuple(
        StudyPart(
            name=name, make=partial(of_model, name=name, scale=scale, launches=launches), seconds=launches * seconds
        )
        for name in MODELS
    )


STUDY = PartedStudy(
    name="bench_ddp",
    quick=lambda: _parts(QUICK, 1, 60.0),
    quick_seconds=180.0,
    full=lambda: _parts(Scale(), LAUNCHES, 60.0),
    full_seconds=480.0,
)


def main() -> None:
    """Runs the study."""
    STUDY.main(__doc__, "one launch of each model, few steps, two settings")


if __name__ == "__main__":
    main()
