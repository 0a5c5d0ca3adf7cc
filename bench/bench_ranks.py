"""The same loop on many ranks: what travels, what overlaps, what it holds, and what other planners make of it.

``python -m bench.bench_ranks [--quick] [--json FILE] [--pictures DIR]``

Measured on gloo ranks of this machine: two for times, four for correctness alone, since there are two cores. Simulated
on 8 to 256 GPUs, from analytic profiles that are kept (``ranks_tables``). What needs a GPU has no number here;
``bench.gpu`` measures it. Every part runs in processes of its own that are ended in time, and the file is written anew
after each part.
``--quick``: within a minute on two quiet cores.
"""

from __future__ import annotations

import os

# OpenMP reads this once, when torch is loaded; a rank has one thread, and idle ones that spin would take its core.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.bounded import PartFailedError, within
from bench.harness import finish, study_of
from bench.ranks_launch import Work, on_ranks
from bench.ranks_measured import equality, moved, peak, planners
from bench.ranks_pictures import draw
from bench.ranks_simulated import METHODS, large_cluster, scaling
from bench.record import Figure, Study, missing_figure
from mosaic.artifact import save
from mosaic.profiler import ForeignLoad
from mosaic.ranks.compare import Rounds

Bounded = Callable[[float], Iterator[Figure]]
"""Makes figures, and ends after the given seconds."""
QUICK_SECONDS = 56.0
"""After this a quick study ends whatever runs: the rest of its minute is for loading and writing."""
NEEDS_GPU = (
    "one GPU: step of one rank under NCCL over the plain colocated step, ratio",
    "one GPU: memory of one rank over the plain colocated loop's, ratio",
    "two GPUs: step over DDP's, ratio",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyPart:
    """One part of the study."""

    name: str
    """What it is about."""
    make: Bounded
    """Makes its figures."""
    seconds: float
    """When it is ended."""


def _ranks(name: str, seconds: float, size: int, work: Work) -> StudyPart:
    return StudyPart(name=name, make=lambda left: on_ranks(work, size, left), seconds=seconds)


def _simulated(name: str, seconds: float, make: Callable[[], Iterator[Figure]]) -> StudyPart:
    return StudyPart(name=name, make=lambda left: within(make, left), seconds=seconds)


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
        _ranks("planners, clip", 30, 2, partial(planners, model="clip", batch=4, rounds=Rounds(rounds=3, steps=3))),
        _ranks("memory, DDP", 15, 2, partial(peak, model="clip", batch=4, with_mosaic=False)),
        _ranks("memory, Mosaic", 15, 2, partial(peak, model="clip", batch=4, with_mosaic=True)),
        _simulated("Fig. 14a", 15, ofasys),
        _simulated("Table 2", 10, partial(large_cluster, name="qwen-val-30b", num_devices=256, seconds=0.7)),
        _simulated("Table 2, 70B", 10, partial(large_cluster, name="qwen-val-70b", num_devices=256, seconds=0.7)),
        _simulated("Fig. 9, clip", 10, partial(scaling, name="clip", num_devices=(16,), seconds=0.7, paper="9")),
        _ranks("four ranks", 20, 4, partial(equality, model="clip", batch=2, steps=3)),
    )


def full() -> tuple[StudyPart, ...]:
    """Returns the parts of the full form."""
    two = [
        part
        for model in ("clip", "imagebind", "ofasys", "qwen3-vl")
        for part in (
            _ranks(f"what travels, {model}", 180, 2, partial(moved, model=model, batch=8, steps=30)),
            _ranks(
                f"planners, {model}",
                400,
                2,
                partial(planners, model=model, batch=8, rounds=Rounds(rounds=10, steps=10)),
            ),
            _ranks(f"memory, DDP, {model}", 60, 2, partial(peak, model=model, batch=8, with_mosaic=False)),
            _ranks(f"memory, Mosaic, {model}", 60, 2, partial(peak, model=model, batch=8, with_mosaic=True)),
            _ranks(f"four ranks, {model}", 120, 4, partial(equality, model=model, batch=2, steps=20)),
        )
    ]
    many = [
        _simulated(
            f"Fig. 9, {name}", 120, partial(scaling, name=name, num_devices=(8, 16, 32), seconds=10.0, paper="9")
        )
        for name in ("clip", "imagebind")
    ]
    large = [
        _simulated(f"Table 2, {name}", 120, partial(large_cluster, name=name, num_devices=256, seconds=10.0))
        for name in ("qwen-val-30b", "qwen-val-70b")
    ]
    paper = partial(scaling, name="ofasys", num_devices=(8, 16, 32), seconds=10.0, paper="14a")
    return (*two, _simulated("Fig. 14a", 900, paper), *many, *large)


def main() -> None:
    """Runs the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one model, few steps; within a minute on two cores")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--pictures", type=Path, help="draw the figures into this folder")
    given = parser.parse_args()
    parts = quick() if given.quick else full()
    longest = min(sum(part.seconds for part in parts), QUICK_SECONDS if given.quick else math.inf)
    print(f"{len(parts)} parts: ended after {longest:.0f} s at the latest", flush=True)
    made = study(parts, path=given.json, seconds=longest)
    if given.pictures is not None:
        draw(made, given.pictures)


def study(parts: Sequence[StudyPart], *, path: Path | None, seconds: float = math.inf) -> Study:
    """Measures and reports; a part that fails becomes a figure with the reason and ends nothing else.

    Args:
        parts: What to measure, what matters most first.
        path: The result file; None writes none.
        seconds: For all parts together; those for which there is no time left are figures with that reason.
    """
    load = ForeignLoad()
    ends = time.perf_counter() + seconds
    figures: list[Figure] = [
        missing_figure(name, "needs a GPU: python -m bench.gpu --only ranks/one") for name in NEEDS_GPU[:2]
    ]
    figures.append(missing_figure(NEEDS_GPU[2], "needs two GPUs, which nobody had"))
    for part in parts:
        began = time.perf_counter()
        try:
            for figure in part.make(min(part.seconds, ends - began)):  # one by one: those before an error stay
                figures.append(figure)
        except PartFailedError as error:
            figures.append(missing_figure(f"{part.name}: what is missing of it", error))
        print(f"[{part.name}: {time.perf_counter() - began:.1f} s]", flush=True)
        if path is not None:
            save(study_of("bench_ranks", figures, load), path)
    return finish("bench_ranks", figures, load, path)


if __name__ == "__main__":
    main()
