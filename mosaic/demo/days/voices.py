"""Synthetic spoken digits for the days: espeak-ng's voices, with the noise of each site's room."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mosaic.demo.recordings import MAX_FRAMES, NUM_MELS, WORDS, speak_spectrum
from mosaic.demo.speech import Synthesiser

_ACCENTS = ("en-us", "en-gb-scotland", "en-gb-x-rp", "en-gb-x-gbcwmd", "en-029", "en-us-nyc")
_VARIANTS = (
    *(f"f{number}" for number in range(1, 6)),
    *(f"m{number}" for number in range(1, 9)),
    *("Alicia", "Andrea", "Andy", "Annie", "Denis", "Gene", "Hugo", "Lee", "Marco", "Michael", "Mike", "Reed"),
    *("adam", "belinda", "boris", "caleb", "david", "edward", "grandma", "ian", "john", "linda", "max", "paul"),
    *("pedro", "quincy", "rob", "robert", "sandro", "shelby", "steph", "travis", "victor", "zac"),
)


def all_voices() -> tuple[str, ...]:
    """Returns espeak-ng's names of 282 voices, in a fixed random order."""
    names = [f"{accent}+{variant}" for accent in _ACCENTS for variant in _VARIANTS]
    return tuple(names[place] for place in np.random.default_rng(0).permutation(len(names)))


class Speakers:
    """Speaks digits, each voice at its own speed; caches spoken words."""

    def __init__(self, synthesiser: Synthesiser) -> None:
        self._synthesiser = synthesiser
        self._spoken: dict[tuple[str, int], NDArray[np.uint8]] = {}

    def speak(self, voice: str, digit: int) -> NDArray[np.uint8]:
        """Returns a digit in a voice, shape (NUM_MELS, MAX_FRAMES); silence follows the word."""
        if (voice, digit) not in self._spoken:
            speed = 150 + 7 * (sum(voice.encode()) % 11)
            spectrum = speak_spectrum(self._synthesiser, WORDS[digit], voice, speed)
            word = np.zeros((NUM_MELS, MAX_FRAMES), dtype=np.uint8)
            word[:, : len(spectrum)] = spectrum.T
            self._spoken[voice, digit] = word
        return self._spoken[voice, digit]


def in_room(word: NDArray[np.uint8], noise: float, random: np.random.Generator) -> NDArray[np.uint8]:
    """Adds a room's noise to a word: ``noise`` is its mean level, 0 to 255; every frequency has a level of its own."""
    tilt = random.normal(0, 15, (NUM_MELS, 1))
    floor = random.normal(noise, 20, word.shape) + tilt
    start = int(random.integers(0, 5))
    moved = np.pad(word, ((0, 0), (start, 0)))[:, :MAX_FRAMES].astype(np.float64)
    loudness = random.uniform(0.85, 1.0)
    levels: NDArray[np.uint8] = np.clip(np.maximum(moved * loudness, floor), 0, 255).astype(np.uint8)
    return levels
