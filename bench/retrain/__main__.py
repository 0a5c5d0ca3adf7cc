"""The study of killed days: do they end with the bits of undisturbed days?

``python -m bench.retrain [--quick] [--json FILE]``
"""

from __future__ import annotations

from functools import partial

from bench.harness import PartedStudy, StudyPart
from bench.retrain.kills import kill_figures


def _kills(count: int, seconds: float) -> tuple[StudyPart, ...]:
    return (StudyPart(name="kills", make=partial(kill_figures, count=count), seconds=seconds),)


STUDY = PartedStudy(
    name="bench_retrain_kills",
    quick=lambda: _kills(12, 90.0),
    quick_seconds=90.0,
    full=lambda: _kills(100, 1800.0),
)

if __name__ == "__main__":
    STUDY.main(__doc__, "12 kills, within two minutes")
