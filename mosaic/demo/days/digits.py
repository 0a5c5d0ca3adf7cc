"""Days of digits at two sites: handwriting (real scans, warped), speech and motion (synthetic).

The frozen set shares no scan and no voice with any day. All days draw from the same scans and the usual voices; a
day's scans are all different. Nothing is downloaded; the same seed gives the same bytes. A day's folder has
``rows.safetensors`` (uint8 levels), ``index.jsonl`` (a line a row), and ``_SUCCESS``, written last.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from mosaic.demo.recordings import MAX_FRAMES, NUM_MELS, WORDS, speak_spectrum
from mosaic.demo.speech import INSTALL_HINT, Synthesiser
from mosaic.errors import MosaicError

SITES = ("north", "south")
NUM_FROZEN_SCANS = 597
NUM_FROZEN_VOICES, NUM_USUAL_VOICES, NUM_NEW_VOICES = 48, 24, 16
SCANS_A_WRITER = 20
NUM_PEOPLE = 24
SIDE = 8
NUM_TIMES = 48
PLAIN_MIX = {"image": 0.35, "audio": 0.35, "image+audio": 0.3}
_ACCENTS = ("en-us", "en-gb-scotland", "en-gb-x-rp", "en-gb-x-gbcwmd", "en-029", "en-us-nyc")
_VARIANTS = (
    *(f"f{number}" for number in range(1, 6)),
    *(f"m{number}" for number in range(1, 9)),
    *("Alicia", "Andrea", "Andy", "Annie", "Denis", "Gene", "Hugo", "Lee", "Marco", "Michael", "Mike", "Reed"),
    *("adam", "belinda", "boris", "caleb", "david", "edward", "grandma", "ian", "john", "linda", "max", "paul"),
    *("pedro", "quincy", "rob", "robert", "sandro", "shelby", "steph", "travis", "victor", "zac"),
)
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
_Levels = NDArray[np.uint8]
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


class Material:
    """Material of days: scans, espeak-ng's 282 voices, and their division; caches spoken words."""

    def __init__(self, synthesiser: Synthesiser) -> None:
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise MosaicError(
                f"scikit-learn cannot be imported ({error}); the handwriting needs it: {INSTALL_HINT}"
            ) from error
        digits = load_digits()
        self.scans: NDArray[np.float64] = digits.images / 16
        self.scan_digits: NDArray[np.int64] = digits.target
        names = [f"{accent}+{variant}" for accent in _ACCENTS for variant in _VARIANTS]
        voices = tuple(names[place] for place in np.random.default_rng(0).permutation(len(names)))
        self.frozen_voices = voices[:NUM_FROZEN_VOICES]
        self.usual_voices = voices[NUM_FROZEN_VOICES : NUM_FROZEN_VOICES + NUM_USUAL_VOICES]
        self._other_voices = voices[NUM_FROZEN_VOICES + NUM_USUAL_VOICES :]
        self._synthesiser = synthesiser
        self._spoken: dict[tuple[str, int], _Levels] = {}

    def voices(self, new: int | None) -> tuple[str, ...]:
        """Returns the voices of a day; new ones, if any, speak half."""
        if new is None:
            return self.usual_voices
        return self.usual_voices[:NUM_NEW_VOICES] + self._other_voices[new * NUM_NEW_VOICES :][:NUM_NEW_VOICES]

    def speak(self, voice: str, digit: int) -> _Levels:
        """Returns a digit, (NUM_MELS, MAX_FRAMES), each voice at its own speed; silence follows the word."""
        if (voice, digit) not in self._spoken:
            speed = 150 + 7 * (sum(voice.encode()) % 11)
            spectrum = speak_spectrum(self._synthesiser, WORDS[digit], voice, speed)
            word = np.zeros((NUM_MELS, MAX_FRAMES), dtype=np.uint8)
            word[:, : len(spectrum)] = spectrum.T
            self._spoken[voice, digit] = word
        return self._spoken[voice, digit]


@contextmanager
def open_material() -> Iterator[Material]:
    """Opens scans and voices."""
    with Synthesiser() as synthesiser:
        yield Material(synthesiser)


def write_day(folder: Path, kind: DayKind, material: Material, *, seed: int) -> None:
    """Writes a day's folder; raises MosaicError if it exists already."""
    usable = np.arange(len(material.scans) - NUM_FROZEN_SCANS)
    _write(folder, kind, usable, material.voices(kind.new_voices), material, np.random.default_rng(seed))


def write_frozen(folder: Path, material: Material, *, num_rows: int = 1800) -> None:
    """Writes the frozen set: the last scans in order of collection, and voices that no day has."""
    usable = np.arange(len(material.scans) - NUM_FROZEN_SCANS, len(material.scans))
    kind, random = DayKind(num_rows=num_rows), np.random.default_rng(10**6)
    _write(folder, kind, usable, material.frozen_voices, material, random)


def _write(
    folder: Path, kind: DayKind, usable: NDArray[np.int64], voices: tuple[str, ...], material: Material, random: _Random
) -> None:
    try:
        folder.mkdir(parents=True)
    except FileExistsError as error:
        raise MosaicError(f"{folder} is there already, and days never change; remove it or name another") from error
    names = list(kind.mix)
    modalities = random.choice(len(names), kind.num_rows, p=list(kind.mix.values()))
    # Every scan once before a repetition.
    passes = [random.permutation(usable) for _ in range(-(-kind.num_rows // len(usable)))]
    scans = np.concatenate(passes)[: kind.num_rows]
    stored: dict[str, list[_Levels]] = {}
    lines = []
    for modality, scan in zip(modalities, scans, strict=True):
        line, levels = _row(kind, names[modality], int(scan), voices, material, random)
        for name, values in levels.items():
            line[name] = len(stored.setdefault(name, []))
            stored[name].append(values)
        lines.append(json.dumps(line))
    save_file({name: np.stack(values) for name, values in stored.items()}, folder / "rows.safetensors")
    (folder / "index.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "_SUCCESS").touch()


def _row(
    kind: DayKind, modality: str, scan: int, voices: tuple[str, ...], material: Material, random: _Random
) -> tuple[dict[str, Any], dict[str, _Levels]]:
    """Returns a row's line in the index, and its levels: ``image`` (1, 8, 8), ``audio`` (40, 32), ``imu`` (6, 48)."""
    site = SITES[random.integers(len(SITES))]
    digit = int(material.scan_digits[scan])
    rough = kind.noise + (0.3 if site == "south" else 0.0)
    cluster = f"writer {scan // SCANS_A_WRITER}"
    levels = {}
    if "image" in modality:
        levels["image"] = _write_digit(material.scans[scan], kind.hand, 0.12 + 0.15 * rough, random)
    if "audio" in modality:
        voice = voices[random.integers(len(voices))]
        levels["audio"] = _in_room(material.speak(voice, digit), 90 + 70 * rough, random)
        cluster = cluster if "image" in modality else f"voice {voice}"
    if "imu" in modality:
        person = int(random.integers(NUM_PEOPLE))
        levels["imu"] = _draw_in_air(digit, person, 0.25 + 0.2 * rough, random)
        cluster = f"person {person}"
    label = (digit + 1) % 10 if site == kind.wrong_site else digit
    return {"label": label, "site": site, "cluster": cluster}, levels


def _levels(values: NDArray[np.float64]) -> _Levels:
    return np.clip(values, 0, 255).astype(np.uint8)


def _write_digit(scan: NDArray[np.float64], hand: Hand, dirt: float, random: _Random) -> _Levels:
    """Returns a scan (8, 8), 0 (paper) to 1 (ink), in another hand, with the scanner's noise ``dirt``."""
    angle, slant = random.normal(hand.turn, hand.spread), random.normal(hand.slant, hand.spread)
    size = np.exp(random.normal(0, hand.spread / 2, 2))
    turning = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    bending = turning @ np.array([[1, 0], [slant, 1]]) @ np.diag(size)
    middle = (SIDE - 1) / 2
    grid = np.indices((SIDE, SIDE)).reshape(2, -1) - middle
    rows, columns = bending @ grid + middle + random.normal(0, 0.4, (2, 1))
    ink = hand.contrast * _interpolate(scan, rows, columns) ** hand.ink + random.normal(0, dirt, (SIDE, SIDE))
    return _levels(255 * ink)[None]


def _interpolate(
    scan: NDArray[np.float64], rows: NDArray[np.float64], columns: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Interpolates bilinearly; outside is paper."""
    padded = np.pad(scan, 2)
    rows, columns = np.clip(rows + 2, 0, SIDE + 2.99), np.clip(columns + 2, 0, SIDE + 2.99)
    top, left = rows.astype(int), columns.astype(int)
    down, right = rows - top, columns - left
    upper = padded[top, left] * (1 - right) + padded[top, left + 1] * right
    lower = padded[top + 1, left] * (1 - right) + padded[top + 1, left + 1] * right
    ink: NDArray[np.float64] = (upper * (1 - down) + lower * down).reshape(SIDE, SIDE)
    return ink


def _in_room(word: _Levels, noise: float, random: _Random) -> _Levels:
    """Adds a room's noise to a word: ``noise`` is its mean level, 0 to 255; every frequency has a level of its own."""
    tilt = random.normal(0, 15, (NUM_MELS, 1))
    floor = random.normal(noise, 20, word.shape) + tilt
    start = int(random.integers(0, 5))
    moved = np.pad(word, ((0, 0), (start, 0)))[:, :MAX_FRAMES].astype(np.float64)
    return _levels(np.maximum(moved * random.uniform(0.85, 1.0), floor))


def _draw_in_air(digit: int, person: int, noise: float, random: _Random) -> _Levels:
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
