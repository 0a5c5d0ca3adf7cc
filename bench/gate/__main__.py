"""How often the gate of ``mosaic retrain`` is wrong: simulated days, models whose true accuracy is known.

``python -m bench.gate [--quick] [--json FILE]``

Right versions that are refused, wrong ones that are promoted, by rows, groups and margins; many days with a small loss
each; frozen rows that wear out; spoiled slices; wrong labels. Under three minutes on two quiet cores, ``--quick`` under
one.
"""

from __future__ import annotations

from bench.gate.parts import losses, margins, poison, slices, wear
from bench.study_parts import PartedStudy, StudyPart

SHAPES = (
    (500, 1, 0.01),
    (1000, 1, 0.01),
    (2000, 1, 0.01),
    (500, 1, 0.02),
    (1000, 1, 0.02),
    (2000, 20, 0.01),
    (2000, 20, 0.02),
    (2000, 100, 0.02),
    (2000, 200, 0.02),
)
QUICK = (
    StudyPart.alone("margins", 30, lambda: margins(SHAPES[:1] + SHAPES[-1:], trials=40)),
    StudyPart.alone("slices", 20, lambda: slices(trials=10)),
    StudyPart.alone("losses", 30, lambda: losses(runs=1, days=20)),
    StudyPart.alone("wear", 30, lambda: wear(runs=1, days=20)),
    StudyPart.alone("poison", 20, lambda: poison(trials=10)),
)
FULL = (
    StudyPart.alone("margins", 600, lambda: margins(SHAPES, trials=250)),
    StudyPart.alone("slices", 300, lambda: slices(trials=150)),
    StudyPart.alone("losses", 300, lambda: losses(runs=8)),
    StudyPart.alone("wear", 300, lambda: wear(runs=8)),
    StudyPart.alone("poison", 300, lambda: poison(trials=100)),
)
STUDY = PartedStudy(name="bench_gate", quick=lambda: QUICK, quick_seconds=60, full=lambda: FULL)

if __name__ == "__main__":
    STUDY.main(__doc__, "few trials", lambda study, folder: None)
