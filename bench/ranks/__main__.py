"""The study of planners on many described GPUs, and of row routing between two ranks of this machine.

``python -m bench.ranks [--quick] [--json FILE]``

Steps on 8 to 256 GPUs are simulated from counted operators. ``python -m bench.ddp`` compares measured steps of two
ranks with DistributedDataParallel. ``--quick``: within a minute on two quiet cores.
"""

from __future__ import annotations

import os

# OpenMP reads this once, when torch is loaded; spinning idle threads would take a rank's core
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from functools import partial

from bench.harness import PartedStudy, StudyPart
from bench.ranks.launch import on_ranks
from bench.ranks.links import links
from bench.ranks.simulated import large_cluster, scaling

TOO_LARGE = ("qwen3-vl", "unified-io-2", "ctvlm")
"""Models of Fig. 9 that do not fit into 80 GB at this batch on 8 GPUs; compared without a memory limit."""
FIGURE_9 = (
    *(f"{name}-paper" for name in ("clip", "imagebind", "qwen3-vl", "unified-io-2", "ctvlm")),
    *(f"{name}-table1" for name in ("imagebind", "ofasys", "qwen3-vl", "unified-io-2")),
)
"""As published, which OFASys has under Fig. 14a, and with the ratios of the paper's Table 1."""
_LINKS = StudyPart(name="links", make=lambda left: on_ranks(links, 2, left), seconds=20)


def _scaling(model: str, figure: str, num_devices: tuple[int, ...], seconds: float) -> StudyPart:
    fits = not model.startswith(TOO_LARGE)
    make = partial(scaling, model=model, figure=figure, num_devices=num_devices, seconds=seconds, with_memory=fits)
    return StudyPart.alone(f"{figure}, {model}", 90, make)


STUDY = PartedStudy(
    name="bench_ranks",
    quick=lambda: (_LINKS, _scaling("clip-paper", "Fig. 9", (8,), 0.7)),
    quick_seconds=60.0,
    full=lambda: (
        _scaling("ofasys-paper", "Fig. 14a", (8, 16, 32), 5.0),
        *(_scaling(model, "Fig. 9", (8, 16, 32), 5.0) for model in FIGURE_9),
        *(
            StudyPart.alone(f"Table 2, {size}", 90, partial(large_cluster, size=size, seconds=5.0))
            for size in ("30b", "70b")
        ),
        _LINKS,
    ),
    full_seconds=900.0,
)

if __name__ == "__main__":
    STUDY.main(__doc__, "one model on 8 GPUs; within a minute on two cores")
