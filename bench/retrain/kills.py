"""Days that are killed all the time beside undisturbed days: do they end with the same bits?

``python -m bench.retrain [--quick] [--json FILE]``
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path

from bench.record import Figure
from bench.retrain.chain import TARGETS, Kill, Running, chain, program
from bench.retrain.small_folder import bits_of, write_day, write_folder
from mosaic.artifact import load
from mosaic.lines import lines_of
from mosaic.retrain.folder import Folder
from mosaic.retrain.report import DayReport

WORKERS = 2
"""Processes that load data in killed days; the undisturbed days have none."""
PAUSE_S = 0.02
"""Time of a micro-batch; two of them are a step."""
LONGEST_S = 2.5
"""Latest kill after a worker's first sign; a day's training and scoring take as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KilledDay:
    """A day, after its kills."""

    day: str
    kills: tuple[Kill, ...]
    differs: tuple[str, ...]
    """Names of values that differ from an undisturbed run's; empty if all is well."""
    again: int
    """Steps that were made more than once."""
    again_differently: int
    """Those of them that had another loss the second time."""
    outcome: str | None
    report: DayReport


def killed_days(
    top: Path,
    start: Callable[[Folder], Running],
    *,
    count: int,
    seed: int,
    longest_s: float = LONGEST_S,
    pause_s: float = PAUSE_S,
    until: float = float("inf"),
) -> Iterator[KilledDay]:
    """Runs days, each from the model of the day before, until ``count`` kills have fallen.

    No day begins after ``until``, on the clock of ``time.monotonic()``.
    """
    quiet, killed = write_folder(top / "quiet"), write_folder(top / "killed", budget={"workers": WORKERS})
    fallen = 0
    for index in range(count):
        if fallen >= count or time.monotonic() > until:
            return
        day = (date(2026, 11, 20) + timedelta(days=index)).isoformat()
        write_day(quiet.path, day)
        write_day(killed.path, day, pause_s=pause_s)
        if (code := start(quiet).wait()) != 0:
            raise RuntimeError(f"{day}, undisturbed, ended with {code}: {quiet.day(day).state}")
        kills = tuple(chain(killed, start, seed=seed + index, longest_s=longest_s))
        fallen += len(kills)
        yield _compared(day, quiet, killed, kills)


def kill_figures(left_s: float, *, count: int, seed: int = 0) -> Iterator[Figure]:
    """Kills days that ``mosaic retrain run`` runs; ends a little after the given seconds."""
    with tempfile.TemporaryDirectory() as top:
        until = time.monotonic() + left_s
        days = tuple(killed_days(Path(top), program, count=count, seed=seed, until=until))
    kills = [kill for day in days for kill in day.kills]
    for name, value in (
        ("kills of a daily run", len(kills)),
        *((TARGETS[target], fallen) for target, fallen in sorted(Counter(kill.target for kill in kills).items())),
        ("days that they fell in", len(days)),
        ("days that ended with other bits than undisturbed", sum(bool(day.differs) for day in days)),
        ("days that were not promoted", sum(day.outcome != "promoted" for day in days)),
        ("steps made again", sum(day.again for day in days)),
        ("steps made again with another loss", sum(day.again_differently for day in days)),
        ("processes left behind", sum(kill.left for kill in kills)),
    ):
        yield Figure(name=name, source="measured", value=float(value))


def _compared(day: str, quiet: Folder, killed: Folder, kills: tuple[Kill, ...]) -> KilledDay:
    expected, bits = bits_of(quiet.day(day)), bits_of(killed.day(day))
    losses: dict[int, list[float]] = {}
    for row in lines_of(killed.day(day).metrics):
        losses.setdefault(row["step"], []).append(row["loss"])
    again = [each for each in losses.values() if len(each) > 1]
    return KilledDay(
        day=day,
        kills=kills,
        differs=tuple(name for name in expected if expected[name] != bits[name]),
        again=len(again),
        again_differently=sum(len(set(each)) > 1 for each in again),
        outcome=killed.day(day).state.outcome,
        report=load(DayReport, killed.day(day).report),
    )
