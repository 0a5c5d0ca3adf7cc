"""The same loop on many ranks: what travels, what overlaps, what it holds, and what other planners make of it.

``python -m bench.ranks [--quick] [--json FILE] [--pictures DIR]``

Measured on two gloo ranks of this machine, since there are two cores. Simulated on 8 to 256 GPUs, from analytic
profiles (``layer_tables``). What needs a GPU has no number here; ``bench.gpu`` measures it. Every part
runs in processes of its own that are ended in time, and the file is written anew after each part.
``--quick``: within a minute on two quiet cores.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

# OpenMP reads this once, when torch is loaded; a rank has one thread, and idle ones that spin would take its core.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from functools import partial

from bench.ranks.launch import Work, on_ranks
from bench.ranks.measured import links, moved, peak, planners
from bench.ranks.pictures import draw
from bench.ranks.simulated import METHODS, large_cluster, scaling
from bench.record import missing_figure
from bench.study_parts import PartedStudy, StudyPart
from mosaic.ranks.compare import Rounds

QUICK_SECONDS = 56.0
"""After this a quick study ends whatever runs: the rest of its minute is for loading and writing."""
ONE_GPU = "needs a GPU: python -m bench.gpu --only ranks/one"
FULL_SECONDS = 900.0
"""The same for the full study: a quarter of an hour."""
TOO_LARGE = ("qwen3-vl", "unified-io-2", "ctvlm")
"""Models of Fig. 9 that no device of 80 GB holds at the tables' batch on 8 GPUs; compared without that limit."""
FIGURE_9: Mapping[str, tuple[str, ...]] = {
    "clip": ("",),
    "imagebind": ("", "-table1"),
    "ofasys": ("-table1",),
    "qwen3-vl": ("", "-table1"),
    "unified-io-2": ("", "-table1"),
    "ctvlm": ("",),
}
"""Tables of each model: as published, which OFASys has under Fig. 14a, and with the ratios of the paper's Table 1."""
NEEDS_GPU = {
    "one GPU: step of one rank under NCCL over the plain colocated step, ratio": ONE_GPU,
    "one GPU: memory of one rank over the plain colocated loop's, ratio": ONE_GPU,
    "two GPUs: step over DDP's, ratio": "needs two GPUs, which nobody had",
}


def _ranks(name: str, seconds: float, size: int, work: Work) -> StudyPart:
    return StudyPart(name=name, make=lambda left: on_ranks(work, size, left), seconds=seconds)


def quick() -> tuple[StudyPart, ...]:
    """Returns the parts of the quick form; Algorithm 1's CP-SAT takes too long on 32 GPUs for it."""
    ofasys = partial(
        scaling,
        name="ofasys",
        num_devices=(8, 16, 32),
        seconds=0.7,
        paper="14a",
        methods=[method for method in METHODS if method != "gahc"],
    )
    return (
        _ranks("what travels, clip", 20, 2, partial(moved, model="clip", batch=4, steps=6)),
        _ranks("links", 10, 2, links),
        _ranks("planners, clip", 30, 2, partial(planners, model="clip", batch=4, rounds=Rounds(rounds=3, steps=3))),
        _ranks("memory, DDP", 15, 2, partial(peak, model="clip", batch=4, with_mosaic=False)),
        _ranks("memory, Mosaic", 15, 2, partial(peak, model="clip", batch=4, with_mosaic=True)),
        StudyPart.alone("Fig. 14a", 15, ofasys),
        StudyPart.alone("Table 2", 10, partial(large_cluster, name="qwen-val-30b", num_devices=256, seconds=0.7)),
        StudyPart.alone("Table 2, 70B", 10, partial(large_cluster, name="qwen-val-70b", num_devices=256, seconds=0.7)),
        StudyPart.alone("Fig. 9, clip", 10, partial(scaling, name="clip", num_devices=(16,), seconds=0.7, paper="9")),
    )


def full() -> tuple[StudyPart, ...]:
    """Returns the parts of the full form, what is simulated first; Algorithm 1's CP-SAT takes minutes on 32 GPUs."""
    quickly = [method for method in METHODS if method != "gahc"]
    scale = partial(scaling, num_devices=(8, 16, 32), seconds=5.0, methods=quickly)
    many = [
        StudyPart.alone(
            f"Fig. 9, {name}{size}",
            60,
            partial(scale, name=f"{name}{size}", paper="9", with_memory=name not in TOO_LARGE),
        )
        for name, sizes in FIGURE_9.items()
        for size in sizes
    ]
    large = [
        StudyPart.alone(f"Table 2, {name}", 30, partial(large_cluster, name=name, num_devices=256, seconds=5.0))
        for name in ("qwen-val-30b", "qwen-val-70b")
    ]
    rounds = Rounds(rounds=5, steps=5)
    two = [
        part
        for model in ("clip", "imagebind", "ofasys", "qwen3-vl")
        for part in (
            _ranks(f"what travels, {model}", 60, 2, partial(moved, model=model, batch=8, steps=10)),
            _ranks(f"planners, {model}", 75, 2, partial(planners, model=model, batch=8, rounds=rounds)),
            _ranks(f"memory, DDP, {model}", 15, 2, partial(peak, model=model, batch=8, with_mosaic=False)),
            _ranks(f"memory, Mosaic, {model}", 15, 2, partial(peak, model=model, batch=8, with_mosaic=True)),
        )
    ]
    return (
        StudyPart.alone("Fig. 14a", 60, partial(scale, name="ofasys", paper="14a")),
        *many,
        *large,
        _ranks("links", 20, 2, links),
        *two,
    )


STUDY = PartedStudy(
    name="bench_ranks",
    quick=quick,
    quick_seconds=QUICK_SECONDS,
    full=full,
    full_seconds=FULL_SECONDS,
    known=[missing_figure(name, reason) for name, reason in NEEDS_GPU.items()],
)


def main() -> None:
    """Runs the study."""
    STUDY.main(__doc__, "one model, few steps; within a minute on two cores", draw)


if __name__ == "__main__":
    main()
