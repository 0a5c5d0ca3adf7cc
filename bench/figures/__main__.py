"""Figures of the Mosaic paper that no other study makes: 4b, 10 and 11.

``python -m bench.figures [--only 4b|10|11] [--quick] [--json FILE]``

Simulated on described GPUs where a cost model can say it, measured on this machine's cores where these can show it, and
without a number where it takes GPUs. Fig. 12 is ``python -m bench.cost``, 13 and 14 ``python -m bench.solver``;
``docs/figures.md`` shows the kept results of all beside the paper's.
"""

from __future__ import annotations

import os

# OpenMP reads this once, when torch is loaded; threads that wait and spin would count as busy cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
from functools import partial
from pathlib import Path

from bench.figures import at_work, on_host
from bench.harness import published
from bench.ranks.launch import on_ranks
from bench.record import Figure, Study, missing_figure
from bench.study_parts import PartedStudy, StudyPart
from mosaic.artifact import save

FOUR_MODELS = ("clip", "qwen3-vl", "imagebind", "ofasys")
"""Those of Fig. 11b."""
NEEDS_GPU: dict[str, Figure] = {
    "4b": missing_figure(
        "Fig. 4b: GPU: step and warps in flight of CLIP on 4 GPUs",
        "needs 4 GPUs; on one, bench.gpu measures steps (part models)",
    ),
    "10": missing_figure(
        "Fig. 10: GPU: warps in flight of six models",
        "needs GPUs; of one, bench.gpu reads the counters (part unknowns/warps)",
    ),
    "11": missing_figure(
        "Fig. 11b: GPU: steps with streams made on demand",
        "needs a GPU; bench.gpu measures what making and lending a stream take (part pool)",
    ),
}
"""What has no number here, by what ``--only`` takes."""


def parts(only: str, *, quick: bool) -> tuple[StudyPart, ...]:
    """Returns the parts of one figure, in a small form or whole."""
    rounds, seconds = (3, 0.7) if quick else (30, 5.0)
    alone = StudyPart.alone
    if only == "4b":
        return (
            alone("4b, simulated", 20, partial(at_work.figure_4b, seconds=seconds)),
            alone("4b, on two cores", 30, partial(on_host.figure_4b, rounds=rounds)),
        )
    if only == "10":
        return (alone("10, simulated", 30 if quick else 120, partial(at_work.figure_10, seconds=seconds)),)
    models = FOUR_MODELS[:1] if quick else FOUR_MODELS
    groups = partial(on_host.group_reuse, repeats=5 if quick else 30)
    return (
        alone("11a, lanes", 10, partial(on_host.figure_11a, repeats=5 if quick else 30)),
        *(alone(f"11b, {name}", 30, partial(on_host.figure_11b, name=name, rounds=rounds)) for name in models),
        StudyPart(name="11b, groups", make=lambda left: on_ranks(groups, 2, left), seconds=30),
    )


def study(only: str | None, *, quick: bool, path: Path | None) -> Study:
    """Makes one figure, or all, and reports."""
    chosen = (only,) if only else tuple(NEEDS_GPU)
    made = PartedStudy(
        name="bench_figures",
        quick=lambda: [part for one in chosen for part in parts(one, quick=True)],
        quick_seconds=90,
        full=lambda: [part for one in chosen for part in parts(one, quick=False)],
        full_seconds=360,
        known=[NEEDS_GPU[one] for one in chosen],
    )
    ready, seconds = (made.quick(), made.quick_seconds) if quick else (made.full(), made.full_seconds)
    found = published(made.run(ready, path=path, seconds=seconds), (path,))
    if path is not None:
        save(found, path)
    return found


def main() -> None:
    """Runs the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(NEEDS_GPU), help="this figure and no other")
    parser.add_argument("--quick", action="store_true", help="few rounds; within a minute and a half on two cores")
    parser.add_argument("--json", type=Path, help="write the result here")
    given = parser.parse_args()
    study(given.only, quick=given.quick, path=given.json)


if __name__ == "__main__":
    main()
