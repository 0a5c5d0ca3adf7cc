"""Days of digits at two sites: handwriting (real scans, warped), speech and motion (synthetic).

The frozen set shares no scan and no voice with any day. All days draw from the same scans and the usual voices; a
day's scans are all different. Nothing is downloaded; the same seed gives the same bytes. A day's folder has
``rows.safetensors`` (uint8 levels), ``index.jsonl`` (a line a row), and ``_SUCCESS``, written last.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from scipy.ndimage import map_coordinates

from mosaic.demo.data import load_scans
from mosaic.demo.speech import MAX_FRAMES, NUM_MELS, Levels, speak
from mosaic.errors import MosaicError

SITES = ("north", "south")
NUM_FROZEN_SCANS = 597
NUM_NEW_VOICES = 16
SCANS_A_WRITER = 20
NUM_PEOPLE = 24
SIDE = 8
NUM_TIMES = 48
PLAIN_MIX = {"image": 0.35, "audio": 0.35, "image+audio": 0.3}
_FROZEN_VOICES, _USUAL_VOICES = range(1000, 1048), range(1048, 1072)
_POINTS = (
    ((0.5, 1), (0, 0.7), (0, 0.3), (0.5, 0), (1, 0.3), (1, 0.7), (0.5, 1)),
    ((0.2, 0.7), (0.5, 1), (0.5, 0.5), (0.5, 0)),
    ((0, 0.8), (0.5, 1), (1, 0.7), (0.5, 0.35), (0, 0), (1, 0)),
    ((0, 0.9), (0.7, 1), (0.8, 0.7), (0.4, 0.5), (0.9, 0.3), (0.6, 0), (0, 0.1)),
    ((0.6, 1), (0, 0.4), (1, 0.4), (0.7, 0.7), (0.7, 0)),
    ((1, 1), (0.1, 1), (0, 0.55), (0.7, 0.6), (1, 0.3), (0.5, 0), (0, 0.1)),
    ((0.8, 1), (0.2, 0.7), (0, 0.3), (0.5, 0), (1, 0.25), (0.5, 0.5), (0.1, 0.3)),
    ((0, 1), (1, 1), (0.6, 0.5), (0.3, 0)),
    ((0.8, 0.8), (0.4, 1), (0.2, 0.75), (0.8, 0.3), (0.5, 0), (0.1, 0.25), (0.8, 0.8)),
    ((0.9, 0.8), (0.4, 1), (0.1, 0.7), (0.6, 0.5), (0.9, 0.8), (0.8, 0.4), (0.7, 0)),
)
"""Coordinates (across, up) of each digit in writing order."""
_Random = np.random.Generator


@dataclass(frozen=True, slots=True, kw_only=True)
class Hand:
    """Difference of a day's writing from the scans; each digit draws its own values around these."""

    slant: float = 0.0
    """Mean shear, in points a point."""
    turn: float = 0.0
    """Mean angle, in radians."""
    spread: float = 0.2
    """Standard deviation of slant, angle and size."""
    ink: float = 1.0
    """Exponent on the ink: under 1 is a thick pen, above 1 a thin one."""
    contrast: float = 1.0
    """Ink's darkness, 1 for black."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DayKind:
    """Kind of a day's data; the defaults are a plain day."""

    num_rows: int = 800
    """Rows of the day."""
    mix: dict[str, float] = field(default_factory=lambda: PLAIN_MIX)
    """Shares of rows by their modalities."""
    new_voices: int | None = None
    """Index of a group of new voices; None for none."""
    hand: Hand = field(default_factory=Hand)
    """The writing."""
    noise: float = 0.0
    """Extra noise of rooms and scanners: 0 for none, 1 for much."""
    wrong_site: str | None = None
    """Site with labels one too high; None for none."""


def write_day(folder: Path, kind: DayKind, *, seed: int) -> None:
    """Writes a day's folder; raises MosaicError if it exists already, or the extra ``demo`` is missing."""
    voices = list(_USUAL_VOICES)
    if kind.new_voices is not None:  # new voices speak half
        first = _USUAL_VOICES.stop + kind.new_voices * NUM_NEW_VOICES
        voices = [*voices[:NUM_NEW_VOICES], *range(first, first + NUM_NEW_VOICES)]
    _write(folder, kind, slice(-NUM_FROZEN_SCANS), voices, np.random.default_rng(seed))


def write_frozen(folder: Path, *, num_rows: int = 1800) -> None:
    """Writes the frozen set: the last scans in order of collection, and voices that no day has."""
    random = np.random.default_rng(10**6)
    _write(folder, DayKind(num_rows=num_rows), slice(-NUM_FROZEN_SCANS, None), list(_FROZEN_VOICES), random)


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
    site = SITES[random.integers(len(SITES))]
    rough = kind.noise + (0.3 if site == "south" else 0.0)
    cluster = f"writer {scan // SCANS_A_WRITER}"
    levels = {}
    if "image" in modality:
        levels["image"] = _write_digit(ink, kind.hand, 0.12 + 0.15 * rough, random)
    if "audio" in modality:
        voice = voices[random.integers(len(voices))]
        levels["audio"] = _in_room(speak(digit, voice), 90 + 70 * rough, random)
        cluster = cluster if "image" in modality else f"voice {voice}"
    if "imu" in modality:
        person = int(random.integers(NUM_PEOPLE))
        levels["imu"] = _draw_in_air(digit, person, 0.25 + 0.2 * rough, random)
        cluster = f"person {person}"
    label = (digit + 1) % 10 if site == kind.wrong_site else digit
    return {"label": label, "site": site, "cluster": cluster}, levels


def _levels(values: NDArray[np.float64]) -> Levels:
    return np.clip(values, 0, 255).astype(np.uint8)


def _write_digit(scan: NDArray[np.float64], hand: Hand, dirt: float, random: _Random) -> Levels:
    """Returns a scan (8, 8), 0 (paper) to 1 (ink), in another hand, with the scanner's noise ``dirt``."""
    angle, slant = random.normal(hand.turn, hand.spread), random.normal(hand.slant, hand.spread)
    size = np.exp(random.normal(0, hand.spread / 2, 2))
    turning = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    bending = turning @ np.array([[1, 0], [slant, 1]]) @ np.diag(size)
    middle = (SIDE - 1) / 2
    grid = np.indices((SIDE, SIDE)).reshape(2, -1) - middle
    rows, columns = bending @ grid + middle + random.normal(0, 0.4, (2, 1))
    warped = map_coordinates(scan, (rows, columns), order=1, mode="grid-constant").reshape(SIDE, SIDE)
    return _levels(255 * (hand.contrast * warped**hand.ink + random.normal(0, dirt, (SIDE, SIDE))))[None]


def _in_room(word: Levels, noise: float, random: _Random) -> Levels:
    """Adds a room's noise to a word: ``noise`` is its mean level, 0 to 255; every frequency has a level of its own."""
    floor = random.normal(noise, 20, (NUM_MELS, MAX_FRAMES)) + random.normal(0, 15, (NUM_MELS, 1))
    start = int(random.integers(0, 5))
    moved = np.zeros(floor.shape)
    moved[:, start : start + len(word)] = word.T[:, : MAX_FRAMES - start]
    return _levels(np.maximum(moved * random.uniform(0.85, 1.0), floor))


def _draw_in_air(digit: int, person: int, noise: float, random: _Random) -> Levels:
    """Returns the measurements of a wrist sensor, (6, NUM_TIMES): acceleration and rotation; level 128 is none.

    The pen follows the points' line at a person's speed. Acceleration is the second difference of its path in the frame
    of a tilted wrist, with gravity; rotation follows the direction of the stroke; the sensor adds noise.
    """
    habit = np.random.default_rng((7, person))
    points = np.array(_POINTS[digit]) + random.normal(0, 0.06, (len(_POINTS[digit]), 2))
    points = points @ np.array([[1, 0], [habit.normal(0, 0.25), 1]]) * habit.uniform(0.8, 1.2, 2)
    lengths = np.concatenate([[0], np.cumsum(np.linalg.norm(np.diff(points, axis=0), axis=1))])
    time = np.linspace(0, 1, NUM_TIMES + 2) ** random.uniform(0.8, 1.25)
    along = (time - np.sin(2 * np.pi * time) / (2 * np.pi)) * lengths[-1]
    path = np.stack([np.interp(along, lengths, points[:, axis]) for axis in (0, 1)])
    kernel = np.hanning(9) / np.hanning(9).sum()
    path = np.stack([np.convolve(np.pad(line, 4, mode="edge"), kernel, mode="valid") for line in path])
    depth = 0.1 * path.sum(axis=0) * habit.normal(0, 1)
    acceleration = 250 * np.diff(np.vstack([path, depth]), 2, axis=1)
    speed = 24 * np.diff(np.vstack([path, depth]), axis=1)[:, 1:]
    turns, _ = np.linalg.qr(habit.normal(0, 0.25, (3, 3)) + np.eye(3))
    gravity = turns @ np.array([[0], [-0.5], [0.2]])
    measured = np.vstack([turns @ acceleration + gravity, turns @ speed[[1, 0, 2]]])
    measured += random.normal(0, noise, measured.shape)
    return _levels(128 + 48 * measured)
