"""A new folder for ``mosaic retrain``, and its days: handwriting (real scans, warped), speech, gestures (synthetic).

The frozen set shares no scan and no voice with any day. All days draw from the same scans and the usual voices; a
day's scans are all different. Nothing is downloaded; the same seed gives the same bytes. A day's folder has
``rows.safetensors`` (uint8 levels), ``index.jsonl`` (a line a row), and ``_SUCCESS``, written last.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from scipy.ndimage import map_coordinates

from mosaic.demo.data import load_scans
from mosaic.demo.speech import MAX_FRAMES, NUM_MELS, Levels, speak
from mosaic.errors import MosaicError

TEMPLATES = ("retrain.toml", "train.py")
NUM_FROZEN_SCANS = 597
NUM_NEW_VOICES = 16
SCANS_A_WRITER = 20
NUM_PEOPLE = 24
SIDE = 8
NUM_TIMES = 48
PLAIN_MIX = {"image": 0.35, "audio": 0.35, "image+audio": 0.3}
_FROZEN_VOICES, _USUAL_VOICES = range(1000, 1048), range(1048, 1072)
_Random = np.random.Generator


@dataclass(frozen=True, slots=True, kw_only=True)
class DayKind:
    """Kind of a day's data; the defaults are a plain day. Each digit draws its own slant and angle around these."""

    num_rows: int = 800
    mix: dict[str, float] = field(default_factory=lambda: PLAIN_MIX)
    """Shares of rows by their modalities."""
    new_voices: int | None = None
    """Index of a group of new voices; None for none."""
    slant: float = 0.0
    """Mean shear of the writing, in points a point."""
    turn: float = 0.0
    """Mean angle of the writing, in radians."""
    ink: float = 1.0
    """Exponent on the ink: under 1 is a thick pen, above 1 a thin one."""
    contrast: float = 1.0
    """Ink's darkness, 1 for black."""
    noise: float = 0.0
    """Extra noise of rooms and scanners: 0 for none, 1 for much."""
    wrong_site: str | None = None
    """Site with labels one too high; None for none."""


def write_starter(
    folder: Path, day: date | None = None, *, num_rows: int = 800, num_frozen: int = 1800
) -> tuple[Path, ...]:
    """Writes recipe, model file, one ready day (by default yesterday in UTC) and the frozen set; overwrites nothing.

    Returns:
        The written paths: two files and two folders.

    Raises:
        MosaicError: One of them exists already (then nothing is written), or the extra ``demo`` is missing.
    """
    day = day if day is not None else datetime.now(UTC).date() - timedelta(days=1)
    files = tuple(folder / name for name in TEMPLATES)
    first, frozen = folder / "data" / day.isoformat(), folder / "data" / "frozen"
    for path in (*files, first, frozen):
        if path.exists():
            raise MosaicError(f"{path} is there already and is not overwritten; move it away, or name another folder")
    # First the frozen set: without the extra, nothing is written. Its voices and scans are those that no day has.
    usable, random = slice(-NUM_FROZEN_SCANS, None), np.random.default_rng(10**6)
    _write(frozen, DayKind(num_rows=num_frozen), usable, list(_FROZEN_VOICES), random)
    write_day(first, DayKind(num_rows=num_rows), seed=1)
    for path in files:
        path.write_bytes(template(path.name))
    return (*files, first, frozen)


def template(name: str) -> bytes:
    return (resources.files("mosaic.demo.days.template") / name).read_bytes()


def write_day(folder: Path, kind: DayKind, *, seed: int) -> None:
    """Writes a day's folder; raises MosaicError if it exists already, or the extra ``demo`` is missing."""
    voices = list(_USUAL_VOICES)
    if kind.new_voices is not None:  # new voices speak half
        first = _USUAL_VOICES.stop + kind.new_voices * NUM_NEW_VOICES
        voices = [*voices[:NUM_NEW_VOICES], *range(first, first + NUM_NEW_VOICES)]
    _write(folder, kind, slice(-NUM_FROZEN_SCANS), voices, np.random.default_rng(seed))


def _write(folder: Path, kind: DayKind, part: slice, voices: list[int], random: _Random) -> None:
    scans, digits = load_scans()
    usable = np.arange(len(scans))[part]
    try:
        folder.mkdir(parents=True)
    except FileExistsError as error:
        raise MosaicError(f"{folder} is there already, and days never change; remove it or name another") from error
    names = list(kind.mix)
    modalities = random.choice(len(names), kind.num_rows, p=list(kind.mix.values()))
    # Every scan once before a repetition.
    passes = [random.permutation(usable) for _ in range(-(-kind.num_rows // len(usable)))]
    stored: dict[str, list[Levels]] = {}
    lines = []
    for modality, scan in zip(modalities, np.concatenate(passes)[: kind.num_rows], strict=True):
        row, levels = _row(kind, names[modality], int(scan), int(digits[scan]), scans[scan], voices, random)
        for name, values in levels.items():
            row[name] = len(stored.setdefault(name, []))
            stored[name].append(values)
        lines.append(json.dumps(row))
    save_file({name: np.stack(values) for name, values in stored.items()}, folder / "rows.safetensors")
    (folder / "index.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "_SUCCESS").touch()


def _row(
    kind: DayKind, modality: str, scan: int, digit: int, ink: NDArray[np.float64], voices: list[int], random: _Random
) -> tuple[dict[str, Any], dict[str, Levels]]:
    """Returns a row's line in the index, and its levels: ``image`` (1, 8, 8), ``audio`` (40, 32), ``imu`` (6, 48)."""
    site = ("north", "south")[random.integers(2)]
    rough = kind.noise + (0.3 if site == "south" else 0.0)
    cluster = f"writer {scan // SCANS_A_WRITER}"
    levels = {}
    if "image" in modality:
        levels["image"] = _write_digit(ink, kind, 0.12 + 0.15 * rough, random)
    if "audio" in modality:
        voice = voices[random.integers(len(voices))]
        levels["audio"] = _in_room(speak(digit, voice), 90 + 70 * rough, random)
        cluster = cluster if "image" in modality else f"voice {voice}"
    if "imu" in modality:
        person = int(random.integers(NUM_PEOPLE))
        levels["imu"] = _gesture(digit, person, 0.8 + 0.6 * rough, random)
        cluster = f"person {person}"
    label = (digit + 1) % 10 if site == kind.wrong_site else digit
    return {"label": label, "site": site, "cluster": cluster}, levels


def _levels(values: NDArray[np.float64]) -> Levels:
    return np.clip(values, 0, 255).astype(np.uint8)


def _write_digit(scan: NDArray[np.float64], kind: DayKind, dirt: float, random: _Random) -> Levels:
    """Returns a scan (8, 8), 0 (paper) to 1 (ink), in another hand, with the scanner's noise ``dirt``."""
    angle, slant = random.normal(kind.turn, 0.2), random.normal(kind.slant, 0.2)
    size = np.exp(random.normal(0, 0.1, 2))
    turning = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    bending = turning @ np.array([[1, 0], [slant, 1]]) @ np.diag(size)
    middle = (SIDE - 1) / 2
    grid = np.indices((SIDE, SIDE)).reshape(2, -1) - middle
    rows, columns = bending @ grid + middle + random.normal(0, 0.4, (2, 1))
    warped = map_coordinates(scan, (rows, columns), order=1, mode="grid-constant").reshape(SIDE, SIDE)
    return _levels(255 * (kind.contrast * warped**kind.ink + random.normal(0, dirt, (SIDE, SIDE))))[None]


def _in_room(word: Levels, noise: float, random: _Random) -> Levels:
    """Adds a room's noise to a word: ``noise`` is its mean level, 0 to 255; every frequency has a level of its own."""
    floor = random.normal(noise, 20, (NUM_MELS, MAX_FRAMES)) + random.normal(0, 15, (NUM_MELS, 1))
    start = int(random.integers(0, 5))
    moved = np.zeros(floor.shape)
    moved[:, start : start + len(word)] = word.T[:, : MAX_FRAMES - start]
    return _levels(np.maximum(moved * random.uniform(0.85, 1.0), floor))


def _gesture(digit: int, person: int, noise: float, random: _Random) -> Levels:
    """Returns a wrist sensor's acceleration and rotation, (6, NUM_TIMES); level 128 is none.

    A digit has six curves of three waves. A person has their own strength and tilt of the wrist; the sensor adds noise.
    """
    curves = np.random.default_rng((5, digit)).normal(0, 1, (6, 3))
    habit = np.random.default_rng((7, person))
    time = np.linspace(0, 1, NUM_TIMES) ** random.uniform(0.8, 1.25)
    waves = np.sin(2 * np.pi * (np.arange(1, 4)[:, None] * time + random.normal(0, 0.08, (3, 1))))
    tilt, _ = np.linalg.qr(habit.normal(0, 0.25, (3, 3)) + np.eye(3))
    measured = np.kron(np.eye(2), tilt) @ curves @ waves * habit.uniform(0.6, 1.4)
    return _levels(128 + 30 * (measured + random.normal(0, noise, measured.shape)))
