"""What training that is left alone costs, and whether kills change it; a study for each question.

``python -m bench.retrain --only STUDY [--quick] [--json FILE]``
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

from bench.retrain import speed
from bench.retrain.kills import kill_figures
from bench.study_parts import PartedStudy, StudyPart

FULL_KILLS_S, QUICK_KILLS_S = 1800.0, 90.0


def _kills(count: int, seconds: float) -> tuple[StudyPart, ...]:
    return (StudyPart(name="kills", make=partial(kill_figures, count=count), seconds=seconds),)


STUDIES: Mapping[str, PartedStudy] = MappingProxyType(
    {
        "kills": PartedStudy(
            name="bench_retrain_kills",
            quick=lambda: _kills(12, QUICK_KILLS_S),
            quick_seconds=QUICK_KILLS_S,
            full=lambda: _kills(100, FULL_KILLS_S),
            full_seconds=FULL_KILLS_S,
        ),
        "speed": speed.STUDY,
    }
)
"""By the name that ``--only`` takes; each writes a result file of its own."""


def main() -> None:
    """Runs a study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(STUDIES), required=True, help="which study")
    parser.add_argument("--quick", action="store_true", help="a small form of it, within two minutes")
    parser.add_argument("--json", type=Path, help="write the result here")
    given = parser.parse_args()
    study = STUDIES[given.only]
    parts, seconds = (study.quick(), study.quick_seconds) if given.quick else (study.full(), study.full_seconds)
    study.run(parts, path=given.json, seconds=seconds)


if __name__ == "__main__":
    main()
