"""The raw material of spoken digit triples: scans of digits and log-mel spectra of words, in one cached file."""

from __future__ import annotations

import functools
import logging
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from io import BytesIO
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mosaic.artifact import write_bytes
from mosaic.demo.speech import INSTALL_HINT, Synthesiser
from mosaic.errors import MosaicError

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
VOICES = (
    *(f"en-us+f{number}" for number in range(1, 6)),
    *(f"en-us+m{number}" for number in range(1, 9)),
    *("en-gb-scotland", "en-gb-x-rp", "en-gb-x-gbclan", "en-gb-x-gbcwmd", "en-029", "en-us-nyc"),
    *("en-us+Alicia", "en-us+Andy", "en-us+Michael", "en-gb-scotland+Annie", "en-029+linda"),
)
WORDS_PER_MINUTE = (165, 190, 220)
NUM_MELS = 40
MAX_FRAMES = 32

_FILE = "spoken-digit-triples-2.npz"
"""The number changes with the content."""
_HOP_MS = 16
_WINDOW_MS = 32
_RANGE_DB = 80.0

FrameCallback: TypeAlias = Callable[[int, int], None]
"""Called with the finished and the total number of words."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recordings:
    """Scans and words as in the file."""

    scans: NDArray[np.uint8]
    """(num_scans, 8, 8), 0 (paper) to 16 (ink), in scikit-learn's order."""
    scan_digits: NDArray[np.int64]
    """(num_scans,), 0 to 9."""
    speech: NDArray[np.uint8]
    """(num_voices, num_speeds, 10, MAX_FRAMES, NUM_MELS) log-mel, 0 (silence) to 255; a frame is 16 ms."""
    speech_frames: NDArray[np.int64]
    """(num_voices, num_speeds, 10): frames of each word, a short silence after it included."""
    voices: tuple[str, ...]
    """espeak-ng's names."""


def load_recordings(cache: Path, progress: FrameCallback | None = None) -> Recordings:
    """Reads the recordings from a folder; creates them if missing or damaged.

    Raises:
        MosaicError: If the extra ``demo`` is not installed, or the folder cannot be written.
    """
    path = cache / _FILE
    if path.exists():
        try:
            with (
                path.open("rb") as opened,
                np.load(opened, allow_pickle=False) as file,
            ):  # each array has a checksum in the archive
                arrays = {field.name: file[field.name] for field in fields(Recordings)}
            return Recordings(**{**arrays, "voices": tuple(map(str, arrays["voices"]))})
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            _logger.warning("%s cannot be used (%s); making it again", path, error)
    recordings = _make(progress)
    content = BytesIO()
    arrays = {field.name: np.asarray(getattr(recordings, field.name)) for field in fields(Recordings)}
    np.savez_compressed(content, **arrays)  # type: ignore[arg-type]  # its stub takes the arrays for options
    write_bytes(content.getvalue(), path)
    return recordings


def _make(progress: FrameCallback | None) -> Recordings:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MosaicError(
            f"scikit-learn cannot be imported ({error}); the demo's handwriting needs it: {INSTALL_HINT}"
        ) from error
    digits = load_digits()
    shape = (len(VOICES), len(WORDS_PER_MINUTE), len(WORDS))
    speech = np.zeros((*shape, MAX_FRAMES, NUM_MELS), dtype=np.uint8)
    frames = np.zeros(shape, dtype=np.int64)
    with Synthesiser() as synthesiser:
        for count, place in enumerate(np.ndindex(shape), start=1):
            voice, speed, digit = place
            spectrum = speak_spectrum(synthesiser, WORDS[digit], VOICES[voice], WORDS_PER_MINUTE[speed])
            frames[place] = len(spectrum)
            speech[place][: len(spectrum)] = spectrum
            if progress is not None:
                progress(count, frames.size)
    return Recordings(
        scans=digits.images.astype(np.uint8),
        scan_digits=digits.target.astype(np.int64),
        speech=speech,
        speech_frames=frames,
        voices=VOICES,
    )


def speak_spectrum(synthesiser: Synthesiser, word: str, voice: str, words_per_minute: int) -> NDArray[np.uint8]:
    """Speaks a word; returns its log-mel levels, shape (num_frames, NUM_MELS), at most ``MAX_FRAMES`` of them."""
    samples = synthesiser.speak(word, voice=voice, words_per_minute=words_per_minute)
    return _trim(_log_mel(samples, _mel_filters(synthesiser.sample_rate), synthesiser.sample_rate))


@functools.cache
def _mel_filters(sample_rate: int) -> NDArray[np.float64]:
    """Triangles on the mel scale (O'Shaughnessy 1987) from 60 Hz to 8 kHz, shape (num_bins, NUM_MELS)."""
    window = sample_rate * _WINDOW_MS // 1000
    hertz = np.fft.rfftfreq(window, 1 / sample_rate)
    low, high = (2595 * np.log10(1 + edge / 700) for edge in (60.0, 8000.0))
    corners = 700 * (10 ** (np.linspace(low, high, NUM_MELS + 2) / 2595) - 1)
    rising = (hertz[:, None] - corners[:-2]) / (corners[1:-1] - corners[:-2])
    falling = (corners[2:] - hertz[:, None]) / (corners[2:] - corners[1:-1])
    filters: NDArray[np.float64] = np.clip(np.minimum(rising, falling), 0, None)
    return filters


def _log_mel(samples: NDArray[np.int16], mels: NDArray[np.float64], sample_rate: int) -> NDArray[np.uint8]:
    """Decibels under the word's loudest value, ``_RANGE_DB`` of them on 0 to 255; shape (num_frames, NUM_MELS)."""
    window, hop = sample_rate * _WINDOW_MS // 1000, sample_rate * _HOP_MS // 1000
    padded = np.pad(samples.astype(np.float64) / 32768, (window // 2, window))
    pieces = np.lib.stride_tricks.sliding_window_view(padded, window)[::hop]
    power = np.abs(np.fft.rfft(pieces * np.hanning(window), axis=1)) ** 2 @ mels
    decibels = 10 * np.log10(np.maximum(power, 1e-12))
    scaled = (decibels - decibels.max()) / _RANGE_DB + 1
    levels: NDArray[np.uint8] = np.clip(np.rint(255 * scaled), 0, 255).astype(np.uint8)
    return levels


def _trim(spectrum: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Trims the silence around a word to one frame at the end, and the word to ``MAX_FRAMES``."""
    loud = np.flatnonzero(spectrum.max(axis=1) > 255 * 0.4)
    word = spectrum[loud[0] : loud[-1] + 1][: MAX_FRAMES - 1]
    return np.concatenate([word, np.zeros((1, NUM_MELS), dtype=np.uint8)])
