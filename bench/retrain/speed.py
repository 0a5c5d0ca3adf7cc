"""The cost of a day's training over a bare loop's: its start, its steps, its saves, and what they consist of.

On a quiet machine of two cores the full form takes under four minutes, the quick one under one and a half.
"""

from __future__ import annotations

from functools import partial

from bench.ranks.launch import on_ranks
from bench.retrain.pieces import pieces, told
from bench.retrain.saving import saving
from bench.retrain.starts import starts
from bench.retrain.steps import steps
from bench.study_parts import PartedStudy, StudyPart

_RANKS = StudyPart(name="2 ranks", make=lambda left: on_ranks(told, 2, left), seconds=20)


def _quick() -> tuple[StudyPart, ...]:
    return (
        StudyPart.alone("steps, no workers", 30, partial(steps, workers=0, rounds=5, block=6)),
        StudyPart.alone("starts", 60, partial(starts, rounds=1)),
        StudyPart.alone("saves", 30, partial(saving, rounds=2, steps=20)),
        StudyPart.alone("pieces", 10, partial(pieces, calls=50)),
        _RANKS,
    )


def _full() -> tuple[StudyPart, ...]:
    return (
        StudyPart.alone("steps, no workers", 90, partial(steps, workers=0, rounds=19)),
        StudyPart.alone("steps, 2 workers", 90, partial(steps, workers=2, rounds=19)),
        StudyPart.alone("starts", 120, starts),
        StudyPart.alone("saves", 90, partial(saving, rounds=5)),
        StudyPart.alone("pieces", 20, pieces),
        _RANKS,
    )


STUDY = PartedStudy(name="bench_retrain_speed", quick=_quick, quick_seconds=90, full=_full, full_seconds=400)
