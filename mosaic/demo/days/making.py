"""Creates days of digits: handwriting (real scans, warped), speech and motion (synthetic), at two sites.

The frozen set shares no scan and no voice with any day. All days draw from the same scans and the usual voices; a
day's scans are all different. Nothing is downloaded; the same seed gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mosaic.demo.days.motion import draw_in_air
from mosaic.demo.days.rows import DayRow, write_rows
from mosaic.demo.days.strokes import Hand, write_digit
from mosaic.demo.days.voices import Speakers, all_voices, in_room
from mosaic.demo.speech import INSTALL_HINT, Synthesiser
from mosaic.errors import MosaicError

SITES = ("north", "south")
NUM_FROZEN_SCANS = 597
NUM_FROZEN_VOICES = 48
NUM_USUAL_VOICES = 24
NUM_NEW_VOICES = 16
SCANS_A_WRITER = 20
NUM_PEOPLE = 24

PLAIN_MIX = {"image": 0.35, "audio": 0.35, "image+audio": 0.3}


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
    """Material of days: scans, speakers, and their division."""

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
        self.speakers = Speakers(synthesiser)
        voices = all_voices()
        self.frozen_voices = voices[:NUM_FROZEN_VOICES]
        self.usual_voices = voices[NUM_FROZEN_VOICES : NUM_FROZEN_VOICES + NUM_USUAL_VOICES]
        self._other_voices = voices[NUM_FROZEN_VOICES + NUM_USUAL_VOICES :]

    def voices(self, new: int | None) -> tuple[str, ...]:
        """Voices of a day; new ones, if any, speak half."""
        if new is None:
            return self.usual_voices
        return self.usual_voices[:NUM_NEW_VOICES] + self._other_voices[new * NUM_NEW_VOICES :][:NUM_NEW_VOICES]


@contextmanager
def open_material() -> Iterator[Material]:
    """Opens scans and voices; caches spoken words until it is closed."""
    with Synthesiser() as synthesiser:
        yield Material(synthesiser)


def write_day(folder: Path, kind: DayKind, material: Material, *, seed: int) -> None:
    """Writes a day's folder; the same seed gives the same bytes.

    Raises:
        MosaicError: The folder exists already.
    """
    usable = np.arange(len(material.scans) - NUM_FROZEN_SCANS)
    write_rows(folder, _rows(kind, usable, material.voices(kind.new_voices), material, np.random.default_rng(seed)))


def write_frozen(folder: Path, material: Material, *, num_rows: int = 1800) -> None:
    """Writes the frozen set: the last scans in order of collection, and voices that no day has.

    Raises:
        MosaicError: The folder exists already.
    """
    usable = np.arange(len(material.scans) - NUM_FROZEN_SCANS, len(material.scans))
    kind = DayKind(num_rows=num_rows)
    write_rows(folder, _rows(kind, usable, material.frozen_voices, material, np.random.default_rng(10**6)))


def _rows(
    kind: DayKind, usable: NDArray[np.int64], voices: tuple[str, ...], material: Material, random: np.random.Generator
) -> list[DayRow]:
    names = list(kind.mix)
    modalities = random.choice(len(names), kind.num_rows, p=list(kind.mix.values()))
    # Every scan once before a repetition.
    passes = [random.permutation(usable) for _ in range(-(-kind.num_rows // len(usable)))]
    scans = np.concatenate(passes)[: kind.num_rows]
    rows = []
    for modality, scan in zip(modalities, scans, strict=True):
        rows.append(_row(kind, names[modality], int(scan), voices, material, random))
    return rows


def _row(
    kind: DayKind, modality: str, scan: int, voices: tuple[str, ...], material: Material, random: np.random.Generator
) -> DayRow:
    site = SITES[random.integers(len(SITES))]
    digit = int(material.scan_digits[scan])
    rough = kind.noise + (0.3 if site == "south" else 0.0)
    row = DayRow(
        label=(digit + 1) % 10 if site == kind.wrong_site else digit,
        site=site,
        cluster=f"writer {scan // SCANS_A_WRITER}",
    )
    if "image" in modality:
        row = replace(row, image=write_digit(material.scans[scan], kind.hand, 0.12 + 0.15 * rough, random))
    if "audio" in modality:
        voice = voices[random.integers(len(voices))]
        heard = in_room(material.speakers.speak(voice, digit), 90 + 70 * rough, random)
        row = replace(row, audio=heard, cluster=row.cluster if "image" in modality else f"voice {voice}")
    if "imu" in modality:
        person = int(random.integers(NUM_PEOPLE))
        row = replace(row, imu=draw_in_air(digit, person, 0.25 + 0.2 * rough, random), cluster=f"person {person}")
    return row
