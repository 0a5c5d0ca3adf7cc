"""The set "spoken digit triples": handwriting, a caption and speech of the same three digits.

The digits are scikit-learn's bundled scans of handwriting (UCI "Optical Recognition of Handwritten Digits", CC BY 4.0).
The speech is synthetic, and the captions come from four templates. Nothing is downloaded.

The 1000 strings are divided 800 to 200. Testing uses strings, voices and scans that training never sees. Scikit-learn
keeps the scans in the order of collection, so testing uses the last ones, not random ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mosaic.errors import MosaicError

NUM_TEST_STRINGS, NUM_TEST_SCANS, NUM_TEST_VOICES, NUM_VOICES = 200, 397, 4, 24
NUM_MELS = 40
MAX_FRAMES = 32
"""Most frames of a word."""
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEMPLATES = ("{} {} {}", "the digits {} {} {}", "{}, {} and then {}", "someone wrote {} {} {}")
MAX_LETTERS = max(len(template.format("three", "three", "three")) for template in TEMPLATES)
ALPHABET = " ,abcdefghijklmnopqrstuvwxyz"
"""A character's token is its index here plus one; token 0 is padding."""

Batch: TypeAlias = dict[str, Tensor]
"""``image`` (B, 1, 8, 24) and ``audio`` (B, 40, 96) float, ``text`` (B, length) int64; a row's digits are the same."""
Levels: TypeAlias = NDArray[np.uint8]
_Floats: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    strings: NDArray[np.int64]
    """(num_strings, 3) digits 0 to 9; no two rows are equal."""
    scans: Sequence[_Floats]
    """For each digit its scans (num_scans, 8, 8), of zero mean and unit variance over the whole set."""
    speech: Sequence[Sequence[_Floats]]
    """For each voice the spectra of the ten words, (frames, 40), -0.5 (silence) to 4.6."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DigitTriples:
    train: Split
    test: Split


def load_scans() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Returns scans (num_scans, 8, 8), 0 (paper) to 1 (ink), in order of collection, and their digits."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MosaicError(
            f"scikit-learn cannot be imported ({error}); the handwriting needs it: pip install 'mosaic-colocate[demo]'"
        ) from error
    digits = load_digits()
    return digits.images / 16, digits.target.astype(np.int64)


def speak(digit: int, voice: int) -> Levels:
    """Returns the spectrum of a synthetic word, 0 (silence) to 255, (frames, NUM_MELS); its last frame is silence.

    A word is three bands of sound that rise and fall on their way through five points. A voice has its own pitch, pace
    and accent.
    """
    word, own = np.random.default_rng((3, digit)), np.random.default_rng((11, voice))
    pitch, pace, accents = own.uniform(-4, 4), own.uniform(0.8, 1.2), own.normal(0, 1.5, (10, 3, 5))
    frames = np.linspace(0, 4, int(word.uniform(14, 23) / pace))
    spectrum = np.zeros((len(frames) + 1, NUM_MELS))
    for accent in accents[digit]:
        mels = np.interp(frames, range(5), word.uniform(4, NUM_MELS - 4, 5) + accent + pitch)
        loudness = np.interp(frames, range(5), word.uniform(0, 1, 5))
        band = loudness[:, None] * np.exp(-(((np.arange(NUM_MELS) - mels[:, None]) / 2) ** 2))
        spectrum[:-1] = np.maximum(spectrum[:-1], band)
    return (255 * spectrum).astype(np.uint8)


def load(seed: int = 0) -> DigitTriples:
    """Makes the set; the seed selects the held-out strings and voices."""
    scans, scan_digits = load_scans()
    scans = (scans - scans.mean()) / scans.std()
    random = np.random.default_rng(seed)
    strings, voices = random.permutation(1000), random.permutation(NUM_VOICES)

    def split(numbers: NDArray[np.int64], part: slice, own_voices: NDArray[np.int64]) -> Split:
        own, digits = scans[part].astype(np.float32), scan_digits[part]
        spoken = ([speak(digit, voice) for digit in range(10)] for voice in own_voices)
        return Split(
            strings=np.stack([numbers // 100, numbers // 10 % 10, numbers % 10], axis=1),
            scans=[own[digits == digit] for digit in range(10)],
            speech=[[(word / 50 - 0.5).astype(np.float32) for word in words] for words in spoken],
        )

    return DigitTriples(
        train=split(strings[NUM_TEST_STRINGS:], slice(-NUM_TEST_SCANS), voices[NUM_TEST_VOICES:]),
        test=split(strings[:NUM_TEST_STRINGS], slice(-NUM_TEST_SCANS, None), voices[:NUM_TEST_VOICES]),
    )


def batches(split: Split, batch_size: int, seed: int, steps: int) -> Iterator[Batch]:
    """Returns batches of one shape; in each, all digit strings differ, and scans, voices and captions are random."""
    if not 1 <= batch_size <= len(split.strings):
        raise ValueError(f"batch_size={batch_size} needs as many different strings; use 1 to {len(split.strings)}")
    random = np.random.default_rng(seed)
    return (_draw(split, random.permutation(split.strings)[:batch_size], random) for _ in range(steps))


def whole(split: Split, seed: int = 0) -> Batch:
    """Draws every string of a split once, for evaluation."""
    return _draw(split, split.strings, np.random.default_rng(seed))


def _draw(split: Split, strings: NDArray[np.int64], random: np.random.Generator) -> Batch:
    """Draws for each string three scans, three words in one voice, then silence, and a caption."""
    image = np.zeros((len(strings), 1, 8, 24), dtype=np.float32)
    audio = np.zeros((len(strings), 3 * MAX_FRAMES, NUM_MELS), dtype=np.float32)
    text = np.zeros((len(strings), MAX_LETTERS), dtype=np.int64)
    for row, string in enumerate(strings.tolist()):
        image[row, 0] = np.hstack([split.scans[digit][random.integers(len(split.scans[digit]))] for digit in string])
        voice = split.speech[int(random.integers(len(split.speech)))]
        spoken = np.concatenate([voice[digit] for digit in string])
        audio[row] = spoken[-1]  # silence
        audio[row, : len(spoken)] = spoken
        caption = TEMPLATES[int(random.integers(len(TEMPLATES)))].format(*(WORDS[digit] for digit in string))
        text[row, : len(caption)] = [ALPHABET.index(letter) + 1 for letter in caption]
    return {
        "image": torch.from_numpy(image),
        "audio": torch.from_numpy(audio).transpose(1, 2).contiguous(),
        "text": torch.from_numpy(text),
    }
