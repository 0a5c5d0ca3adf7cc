"""The study of planned pipelines: simulated steps on the papers' devices, and planning times.

``python -m bench.pipeline [--quick] [--json FILE]``

Microbatches are random, like the papers' data sets, and partitions are made for other steps than those simulated. A
baseline recomputes all layers if keeping all activations does not fit. Planning times are measured on this machine;
``bench.pipeline.measured`` measures steps. Every part runs in its own process with a time limit. ``--quick``: small
steps, within a minute on two idle cores.
"""

from __future__ import annotations

import os
from itertools import chain

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded: spinning idle threads take cores

from bench.harness import PartedStudy, StudyPart
from bench.pipeline import simulated

QUICK = (
    StudyPart.alone("Fig. 12", 30, lambda: simulated.figure_12("vlm-s", (0,), (0.2, 0.5), 2)),
    StudyPart.alone("Fig. 9a", 40, lambda: simulated.figure_9a(("vlm-s",), (0,), 1)),
)
FULL = (
    StudyPart.alone("Fig. 12", 300, lambda: simulated.figure_12("vlm-l", (0, 1, 2), (1, 2, 5, 10), 2)),
    StudyPart.alone(
        "Fig. 9a", 600, lambda: simulated.figure_9a(("vlm-s", "vlm-m", "vlm-l", "t2v-s", "t2v-l"), (0, 1, 2), 5)
    ),
    StudyPart.alone(
        "Fig. 14", 300, lambda: simulated.figure_14(("vlm-xl-8k", "vlm-xl-16k", "t2v-xl-3k", "t2v-xl-6k"), 20)
    ),
    StudyPart.alone("speed", 200, lambda: simulated.large_step("vlm-xl-16k", 64, 20)),
    StudyPart.alone("Cornstarch, frozen", 120, lambda: chain(*(simulated.cornstarch_frozen(text) for text in "sml"))),
)
STUDY = PartedStudy(name="bench_pipeline", quick=lambda: QUICK, quick_seconds=60.0, full=lambda: FULL)

if __name__ == "__main__":
    STUDY.main(__doc__, "small steps; within a minute on two cores")
