"""The study of pipelines that run: steps, memory and host time, measured on gloo ranks with a core each.

``python -m bench.pipeline.measured [--quick] [--json FILE]``

Models are Hugging Face's from configurations; their parts take 5 to 50 ms. Our plan, 1F1B on a mixed partition,
interleaved 1F1B and GPipe take turns on one executor, step by step. Simulations were fitted to another step. Every part
runs in processes of its own that are ended in time.
``--quick``: one small model, within a minute on two quiet cores; the full study takes eight.
"""

from __future__ import annotations

import os

# OpenMP reads this once, when torch is loaded; a rank has one thread, and idle ones that spin would take its core.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from functools import partial

from bench.harness import PartedStudy, StudyPart
from bench.pipeline.measured.actions import empty_action_cost
from bench.pipeline.measured.models import MODELS
from bench.pipeline.measured.steps import Sizes, cores, memory, steps
from bench.ranks.launch import Work, on_ranks

SMALL = Sizes(width=128, layers=4, microbatches=4, steps=1, rounds=2, plan_s=0.2)
FULL = Sizes()
MORE_RANKS = 4
"""Run too where each rank has a core."""


def _ranks(name: str, seconds: float, size: int, work: Work) -> StudyPart:
    return StudyPart(name=name, make=lambda left: on_ranks(work, size, left), seconds=seconds)


def _actions() -> StudyPart:
    return StudyPart.alone("actions", 30, empty_action_cost)


def quick() -> tuple[StudyPart, ...]:
    """Returns the parts of the quick form."""
    return (
        _actions(),
        _ranks("steps, llama", 40, 2, partial(steps, name="llama", sizes=SMALL)),
        _ranks("memory, llama", 20, 2, partial(memory, name="llama", sizes=SMALL)),
    )


def full() -> tuple[StudyPart, ...]:
    """Returns all parts."""
    parts = [_actions()]
    for name in MODELS:
        parts.append(_ranks(f"steps, {name}", 150, 2, partial(steps, name=name, sizes=FULL)))
        if cores() >= MORE_RANKS:
            parts.append(_ranks(f"steps, {name}, {MORE_RANKS}", 150, MORE_RANKS, partial(steps, name=name, sizes=FULL)))
        parts.append(_ranks(f"memory, {name}", 60, 2, partial(memory, name=name, sizes=FULL)))
    return tuple(parts)


STUDY = PartedStudy(
    name="bench_pipeline_measured",
    quick=quick,
    quick_seconds=56.0,
    full=full,
    full_seconds=480.0,
)

if __name__ == "__main__":
    STUDY.main(__doc__, "one small model; within a minute on two cores")
