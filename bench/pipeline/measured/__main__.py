"""The study of measured pipelines: steps and memory on gloo ranks with one core each.

``python -m bench.pipeline.measured [--quick] [--json FILE]``

Models are Hugging Face's, with parts of 5 to 50 ms. Our plan, 1F1B on a mixed partition, interleaved 1F1B and GPipe
take turns on one executor, step by step. Simulations were fitted to another step. Every part runs in its own processes
with a time limit. ``--quick``: one small model, within a minute on two quiet cores; the full study takes eight.
"""

from __future__ import annotations

import os

# OpenMP reads this once, when torch is loaded; spinning idle threads would take a rank's core
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from collections.abc import Callable, Iterator
from functools import partial

from bench.harness import PartedStudy, StudyPart
from bench.pipeline.measured.models import MODELS
from bench.pipeline.measured.steps import Sizes, memory, steps
from bench.ranks.launch import on_ranks
from bench.record import Figure

SMALL = Sizes(width=128, layers=4, microbatches=4, steps=1, rounds=2, plan_s=0.2)


def _part(name: str, seconds: float, work: Callable[..., Iterator[Figure]], model: str, sizes: Sizes) -> StudyPart:
    return StudyPart(
        name=f"{name}, {model}",
        make=lambda left: on_ranks(partial(work, name=model, sizes=sizes), 2, left),
        seconds=seconds,
    )


STUDY = PartedStudy(
    name="bench_pipeline_measured",
    quick=lambda: (_part("steps", 40, steps, "llama", SMALL), _part("memory", 20, memory, "llama", SMALL)),
    quick_seconds=56.0,
    full=lambda: [
        _part(name, seconds, work, model, Sizes())
        for model in MODELS
        for name, seconds, work in (("steps", 150, steps), ("memory", 60, memory))
    ],
    full_seconds=480.0,
)

if __name__ == "__main__":
    STUDY.main(__doc__, "one small model; within a minute on two cores")
