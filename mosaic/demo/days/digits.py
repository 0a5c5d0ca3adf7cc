"""A new folder for ``mosaic retrain``, and its days: handwriting (real scans, warped), speech, gestures (synthetic).

The frozen set shares no scan and no voice with any day. A day's scans are all different. The same seed gives the same
bytes. A day's folder has ``rows.safetensors`` (uint8 levels), ``index.jsonl`` (a line a row), and ``_SUCCESS``, written
last.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from scipy.ndimage import affine_transform

from mosaic.demo.data import MAX_FRAMES, NUM_MELS, Levels, load_scans, speak
from mosaic.errors import MosaicError

TEMPLATES = ("retrain.toml", "train.py")
NUM_FROZEN_SCANS = 597
SCANS_A_WRITER = 20
NUM_PEOPLE = 24
NUM_TIMES = 48
FROZEN_VOICES, USUAL_VOICES = range(1000, 1048), range(1048, 1072)


@dataclass(frozen=True, slots=True, kw_only=True)
class DayKind:
    """Kind of a day's data; the defaults are a plain day."""

    num_rows: int = 800
    mix: Mapping[str, float]
    """Shares of rows by their modalities."""
    voices: Sequence[int] = USUAL_VOICES
    slant: float = 0.0
    """Mean shear of the writing, in points a point."""
    noise: float = 0.0
    """Extra noise of rooms and scanners: 0 for none, 1 for much."""
    wrong_site: str | None = None
    """Site with labels one too high; None for none."""


PLAIN = DayKind(mix={"image": 0.35, "audio": 0.35, "image+audio": 0.3})


def write_starter(
    folder: Path, day: date | None = None, *, num_rows: int = 800, num_frozen: int = 1800
) -> tuple[Path, ...]:
    """Writes recipe, model file, one ready day (by default yesterday in UTC) and the frozen set; returns their paths.

    It overwrites nothing: MosaicError if one of them exists already, or the extra ``demo`` is missing.
    """
    day = day if day is not None else datetime.now(UTC).date() - timedelta(days=1)
    files = tuple(folder / name for name in TEMPLATES)
    first, frozen = folder / "data" / day.isoformat(), folder / "data" / "frozen"
    for path in (*files, first, frozen):
        if path.exists() or folder.is_file():
            path = folder if folder.is_file() else path
            raise MosaicError(f"{path} is there already and is not overwritten; move it away, or name another folder")
    # First the frozen set: without the extra, nothing is written.
    frozen_kind = replace(PLAIN, num_rows=num_frozen, voices=FROZEN_VOICES)
    _write(frozen, frozen_kind, slice(-NUM_FROZEN_SCANS, None), np.random.default_rng(10**6))
    write_day(first, replace(PLAIN, num_rows=num_rows), seed=1)
    for path in files:
        path.write_bytes((resources.files("mosaic.demo.days.template") / path.name).read_bytes())
    return (*files, first, frozen)


def write_day(folder: Path, kind: DayKind, *, seed: int) -> None:
    """Writes a day's folder; raises MosaicError if it exists already, or the extra ``demo`` is missing."""
    _write(folder, kind, slice(-NUM_FROZEN_SCANS), np.random.default_rng(seed))


def _write(folder: Path, kind: DayKind, part: slice, random: np.random.Generator) -> None:
    scans, digits = load_scans()
    usable = np.arange(len(scans))[part]
    try:
        folder.mkdir(parents=True)
    except FileExistsError as error:
        raise MosaicError(f"{folder} is there already, and days never change; remove it or name another") from error
    modalities = random.choice(list(kind.mix), kind.num_rows, p=list(kind.mix.values()))
    # Every scan once before a repetition.
    passes = [random.permutation(usable) for _ in range(-(-kind.num_rows // len(usable)))]
    stored: dict[str, list[Levels]] = {}
    lines = []
    for modality, scan in zip(modalities, np.concatenate(passes)[: kind.num_rows].tolist(), strict=True):
        row, levels = _row(kind, modality, scan, int(digits[scan]), scans[scan], random)
        for name, values in levels.items():
            row[name] = len(stored.setdefault(name, []))
            stored[name].append(values)
        lines.append(json.dumps(row))
    save_file({name: np.stack(values) for name, values in stored.items()}, folder / "rows.safetensors")
    (folder / "index.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "_SUCCESS").touch()


def _row(
    kind: DayKind, modality: str, scan: int, digit: int, ink: NDArray[np.float64], random: np.random.Generator
) -> tuple[dict[str, Any], dict[str, Levels]]:
    """Returns a row's line in the index, and its levels: ``image`` (1, 8, 8), ``audio`` (40, 32), ``imu`` (6, 48)."""
    site = ("north", "south")[random.integers(2)]
    noise = kind.noise + (0.3 if site == "south" else 0.0)
    cluster = f"writer {scan // SCANS_A_WRITER}"
    levels = {}
    if "image" in modality:
        levels["image"] = _write_digit(ink, kind.slant, 0.12 + 0.15 * noise, random)
    if "audio" in modality:
        voice = kind.voices[int(random.integers(len(kind.voices)))]
        levels["audio"] = _in_room(speak(digit, voice), 60 + 60 * noise, random)
        cluster = cluster if "image" in modality else f"voice {voice}"
    if "imu" in modality:
        person = int(random.integers(NUM_PEOPLE))
        levels["imu"] = _gesture(digit, person, 0.8 + 0.6 * noise, random)
        cluster = f"person {person}"
    label = (digit + 1) % 10 if site == kind.wrong_site else digit
    return {"label": label, "site": site, "cluster": cluster}, levels


def _levels(values: NDArray[np.float64]) -> Levels:
    return np.clip(values, 0, 255).astype(np.uint8)


def _write_digit(scan: NDArray[np.float64], slant: float, dirt: float, random: np.random.Generator) -> Levels:
    """Returns a scan (8, 8), 0 (paper) to 1 (ink), in another hand, with the scanner's noise ``dirt``."""
    hand = np.array([[1, 0], [random.normal(slant, 0.2), 1]]) + random.normal(0, 0.1, (2, 2))
    middle = np.full(2, 3.5)
    offset = middle - hand @ middle + random.normal(0, 0.4, 2)
    warped = affine_transform(scan, hand, offset, order=1, mode="grid-constant")
    return _levels(255 * (warped + random.normal(0, dirt, scan.shape)))[None]


def _in_room(word: Levels, noise: float, random: np.random.Generator) -> Levels:
    """Adds a room's noise to a word: ``noise`` is its mean level, 0 to 255; every frequency has a level of its own."""
    floor = random.normal(noise, 20, (NUM_MELS, MAX_FRAMES)) + random.normal(0, 15, (NUM_MELS, 1))
    start = int(random.integers(0, MAX_FRAMES - len(word) + 1))
    floor[:, start : start + len(word)] = np.maximum(floor[:, start : start + len(word)], word.T)
    return _levels(floor)


def _gesture(digit: int, person: int, noise: float, random: np.random.Generator) -> Levels:
    """Returns a wrist sensor's acceleration and rotation, (6, NUM_TIMES); level 128 is none.

    A digit has six curves of three waves. A person has their own strength and tilt of the wrist; the sensor adds noise.
    """
    curves, habit = np.random.default_rng((5, digit)).normal(0, 1, (6, 3)), np.random.default_rng((7, person))
    time = np.linspace(0, 1, NUM_TIMES) ** random.uniform(0.8, 1.25)
    waves = np.sin(2 * np.pi * (np.arange(1, 4)[:, None] * time + random.normal(0, 0.08, (3, 1))))
    tilt = np.kron(np.eye(2), habit.normal(0, 0.2, (3, 3)) + np.eye(3))
    measured = tilt @ curves @ waves * habit.uniform(0.6, 1.4)
    return _levels(128 + 30 * (measured + random.normal(0, noise, measured.shape)))
