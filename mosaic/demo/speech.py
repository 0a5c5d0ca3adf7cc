"""Spoken digits without a microphone: log-mel spectra of ten words, put together from formants.

A word is a row of sounds; a sound has three formants (vowels: Peterson and Barney, 1952), loudness, and noise. A voice
has a vocal tract of its own length, its own vowels, loudness over frequency, and speed. The same voice speaks the same
word the same way every time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
NUM_MELS = 40
MAX_FRAMES = 32
"""Most frames of a word; a frame is 16 ms."""
Levels = NDArray[np.uint8]

_SOUNDS: dict[str, tuple[float, float, float, float, float, float, float]] = {
    "iy": (270, 2290, 3010, 1.0, 0, 0, 5),
    "ih": (390, 1990, 2550, 1.0, 0, 0, 4),
    "eh": (530, 1840, 2480, 1.0, 0, 0, 5),
    "ah": (640, 1190, 2390, 1.0, 0, 0, 5),
    "aa": (730, 1090, 2440, 1.0, 0, 0, 5),
    "ao": (570, 840, 2410, 1.0, 0, 0, 6),
    "uw": (300, 870, 2240, 0.9, 0, 0, 6),
    "ow": (480, 900, 2300, 1.0, 0, 0, 5),
    "w": (300, 650, 2200, 0.7, 0, 0, 3),
    "r": (400, 1200, 1600, 0.8, 0, 0, 3),
    "n": (250, 1400, 2500, 0.6, 0, 0, 4),
    "z": (260, 1700, 2600, 0.4, 5500, 0.6, 4),
    "v": (260, 1100, 2300, 0.5, 4000, 0.3, 3),
    "f": (300, 1100, 2300, 0.0, 3800, 0.45, 4),
    "th": (300, 1400, 2600, 0.0, 4800, 0.35, 4),
    "s": (300, 1700, 2600, 0.0, 6200, 0.8, 5),
    "t": (300, 1800, 2700, 0.0, 4200, 0.7, 2),
    "k": (300, 1900, 2300, 0.0, 1900, 0.6, 2),
    "-": (300, 1500, 2500, 0.0, 0, 0, 2),
}
"""Formants in hertz, loudness of the voice, middle of the noise in hertz and its loudness, and frames."""
_PRONOUNCED = ("z iy r ow", "w ah n", "- t uw", "th r iy", "f ao r", "f aa ih v", "s ih - k s", "s eh v ah n",
               "eh iy - t", "n aa ih n")  # fmt: skip


def _mel(hertz: NDArray[np.float64]) -> NDArray[np.float64]:
    mels: NDArray[np.float64] = 2595 * np.log10(1 + hertz / 700)
    return mels


def speak(digit: int, voice: int, *, speed: float = 1.0) -> Levels:
    """Returns a word's levels, 0 (silence) to 255, shape (num_frames, NUM_MELS), with a frame of silence at its end."""
    own = np.random.default_rng((11, voice))
    tract, pace, tilt = own.uniform(0.85, 1.2), speed * own.uniform(0.9, 1.15), own.uniform(0.2, 0.9)
    accent = dict(zip(_SOUNDS, np.exp(own.normal(0, 0.07, (len(_SOUNDS), 3))), strict=True))
    names = _PRONOUNCED[digit].split()
    sounds = np.array([_SOUNDS[name] for name in names], dtype=np.float64)
    sounds[:, :3] *= tract * np.array([accent[name] for name in names])
    ends = np.cumsum(sounds[:, 6] / pace)
    middles = ends - sounds[:, 6] / pace / 2
    frames = np.arange(min(int(np.ceil(ends[-1])), MAX_FRAMES - 1))
    sounds[:, 4] = np.where(sounds[:, 4] > 0, sounds[:, 4], sounds[:, 4].max(initial=1))
    tracks = np.stack([np.interp(frames, middles, column) for column in sounds[:, :6].T], axis=1)
    bands = np.linspace(_mel(np.array(60.0)), _mel(np.array(8000.0)), NUM_MELS)
    loudness = np.zeros((len(frames), NUM_MELS))
    for formant, strength, width in ((0, 1.0, 150.0), (1, 0.8, 170.0), (2, 0.6, 190.0)):
        distance = (bands - _mel(tracks[:, formant])[:, None]) / width
        loudness = np.maximum(loudness, strength * tracks[:, 3:4] * np.exp(-(distance**2)))
    noise = np.exp(-(((bands - _mel(tracks[:, 4])[:, None]) / 350) ** 2))
    loudness = np.maximum(loudness, tracks[:, 5:6] * noise) * (1 - tilt * 0.4 * np.linspace(0, 1, NUM_MELS))
    levels = np.clip(255 * np.sqrt(loudness), 0, 255).astype(np.uint8)  # loudness is heard on a compressed scale
    return np.concatenate([levels, np.zeros((1, NUM_MELS), dtype=np.uint8)])
