"""The set "spoken digit triples": handwriting, a caption and speech of the same three digits.

The digits are scikit-learn's bundled scans of handwriting (UCI "Optical Recognition of Handwritten Digits", CC BY 4.0),
the speech is synthetic, and the captions come from four templates. Nothing is downloaded.

The 1000 strings are divided 800 to 200. Testing uses strings, voices and scans that training never sees. Scikit-learn
keeps the scans in the order of collection, so testing uses the last ones, not random ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mosaic.demo.speech import MAX_FRAMES, NUM_MELS, WORDS, speak
from mosaic.errors import MosaicError

NUM_TEST_STRINGS, NUM_TEST_SCANS, NUM_TEST_VOICES, NUM_VOICES = 200, 397, 4, 24
SPEEDS = (0.85, 1.0, 1.2)
NUM_FRAMES = 96
TEMPLATES = ("{} {} {}", "the digits {} {} {}", "{}, {} and then {}", "someone wrote {} {} {}")
ALPHABET = " ,abcdefghijklmnopqrstuvwxyz"
"""A character's token is its index here plus one; token 0 is padding."""

Batch: TypeAlias = dict[str, Tensor]
"""``image`` (B, 1, 8, 24) and ``audio`` (B, 40, 96) float, ``text`` (B, length) int64; a row's digits are the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One side of the set: the material of its samples."""

    strings: Tensor
    """(num_strings, 3) int64, digits 0 to 9; no two rows are equal."""
    scans: Tensor
    """(num_scans, 8, 8) float, zero mean and unit variance over the whole set, sorted by digit."""
    scan_starts: Tensor
    """(11,) int64: the scans of digit d are ``scan_starts[d]`` to ``scan_starts[d + 1]``."""
    speech: Tensor
    """(num_voices, num_speeds, 10, frames, 40) float log-mel, zero mean and unit variance over the whole set."""
    speech_frames: Tensor
    """(num_voices, num_speeds, 10) int64: frames of each word before its padding."""
    captions: Tensor
    """(num_templates, num_strings, length) int64 tokens, padded with 0."""
    scan_ids: Tensor
    """(num_scans,) int64: indices of scikit-learn's scans."""
    voices: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DigitTriples:
    """Spoken digit triples; both sides share no string, no voice and no scan."""

    train: Split
    test: Split

    @property
    def vocabulary(self) -> int:
        """Number of tokens that a caption may have, padding included."""
        return len(ALPHABET) + 1


def load_scans() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Returns scans of handwriting (num_scans, 8, 8), 0 (paper) to 1 (ink), in order of collection, and their digits.

    Raises:
        MosaicError: The extra ``demo`` is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MosaicError(
            f"scikit-learn cannot be imported ({error}); the handwriting needs it: pip install 'mosaic-colocate[demo]'"
        ) from error
    digits = load_digits()
    return digits.images / 16, digits.target.astype(np.int64)


def load(seed: int = 0) -> DigitTriples:
    """Makes the set in a second; the seed selects the held-out strings and voices."""
    scans, scan_digits = load_scans()
    shape = (NUM_VOICES, len(SPEEDS), len(WORDS))
    speech, frames = np.zeros((*shape, MAX_FRAMES, NUM_MELS)), np.zeros(shape, dtype=np.int64)
    for place in np.ndindex(shape):
        voice, speed, digit = place
        word = speak(digit, voice, speed=SPEEDS[speed])
        speech[place][: len(word)], frames[place] = word, len(word)
    random = np.random.default_rng(seed)
    strings, voices, ids = random.permutation(1000), random.permutation(NUM_VOICES), np.arange(len(scans))
    standard_scans, standard_speech = _standard(scans), _standard(speech)

    def split(numbers: NDArray[np.int64], own_ids: NDArray[np.int64], own_voices: NDArray[np.int64]) -> Split:
        digits = np.stack([numbers // 100, numbers // 10 % 10, numbers % 10], axis=1)
        order = own_ids[np.argsort(scan_digits[own_ids], kind="stable")]
        return Split(
            strings=torch.from_numpy(digits),
            scans=standard_scans[order],
            scan_starts=torch.from_numpy(np.searchsorted(scan_digits[order], np.arange(11))),
            speech=standard_speech[own_voices],
            speech_frames=torch.from_numpy(frames[own_voices]),
            captions=_captions(digits),
            scan_ids=torch.from_numpy(order),
            voices=tuple(own_voices.tolist()),
        )

    return DigitTriples(
        train=split(strings[NUM_TEST_STRINGS:], ids[:-NUM_TEST_SCANS], voices[NUM_TEST_VOICES:]),
        test=split(strings[:NUM_TEST_STRINGS], ids[-NUM_TEST_SCANS:], voices[:NUM_TEST_VOICES]),
    )


def _standard(levels: NDArray[np.float64]) -> Tensor:
    values = torch.from_numpy(levels).float()
    return (values - values.mean()) / values.std()


def _captions(strings: NDArray[np.int64]) -> Tensor:
    length = max(len(template.format(*["three"] * 3)) for template in TEMPLATES)
    tokens = np.zeros((len(TEMPLATES), len(strings), length), dtype=np.int64)
    for row, template in enumerate(TEMPLATES):
        for column, string in enumerate(strings):
            caption = template.format(*(WORDS[digit] for digit in string))
            tokens[row, column, : len(caption)] = [ALPHABET.index(letter) + 1 for letter in caption]
    return torch.from_numpy(tokens)


def batches(split: Split, batch_size: int, seed: int, steps: int) -> Iterator[Batch]:
    """Returns batches of one shape; in each, all digit strings differ, and scans, voices, speeds, captions are random.

    Args:
        split: Side of the set to draw from.
        batch_size: Rows of a batch, at most the number of strings of the split.
        seed: The same seed gives the same batches.
        steps: Number of batches.

    Raises:
        ValueError: The split has fewer strings than a batch has rows.
    """
    if not 1 <= batch_size <= len(split.strings):
        raise ValueError(f"batch_size={batch_size} needs as many different strings; use 1 to {len(split.strings)}")
    random = torch.Generator().manual_seed(seed)
    return (
        _draw(split, torch.randperm(len(split.strings), generator=random)[:batch_size], random) for _ in range(steps)
    )


def whole(split: Split, seed: int = 0) -> Batch:
    """Draws every string of a split once, for evaluation; the same seed gives the same samples."""
    return _draw(split, torch.arange(len(split.strings)), torch.Generator().manual_seed(seed))


def _draw(split: Split, rows: Tensor, random: torch.Generator) -> Batch:
    """Draws one sample for each of ``rows``, indices into ``split.strings``."""
    digits = split.strings[rows]
    starts, ends = split.scan_starts[digits], split.scan_starts[digits + 1]
    # In double precision, because rounding must not reach the first scan of the next digit.
    scans = starts + (torch.rand(digits.shape, generator=random, dtype=torch.float64) * (ends - starts)).long()
    image = split.scans[scans].transpose(1, 2).reshape(len(rows), 1, 8, 24)
    template = torch.randint(len(split.captions), (len(rows),), generator=random)
    return {"image": image, "audio": _draw_speech(split, digits, random), "text": split.captions[template, rows]}


def _draw_speech(split: Split, digits: Tensor, random: torch.Generator) -> Tensor:
    """Speaks each row's three words one after the other, in one voice and at one speed; then silence."""
    num_voices, num_speeds, _, most_frames, num_mels = split.speech.shape
    voice = torch.randint(num_voices, (len(digits), 1), generator=random)
    speed = torch.randint(num_speeds, (len(digits), 1), generator=random)
    ends = split.speech_frames[voice, speed, digits].cumsum(dim=1)
    time = torch.arange(NUM_FRAMES)
    word = (time >= ends[:, :2, None]).sum(dim=1)
    begin = torch.nn.functional.pad(ends, (1, 0)).gather(1, word)
    clip = (voice * num_speeds + speed) * 10 + digits.gather(1, word)
    frame = (time - begin).clamp(max=most_frames - 1)
    # A word's last stored frame is silence, and so is what follows the last word.
    speech = split.speech.reshape(-1, num_mels)[clip * most_frames + frame]
    return speech.transpose(1, 2).contiguous()
