"""Synthetic digits drawn in the air with a wrist sensor, from a few points per digit.

The pen follows the points' line at a person's speed. Acceleration is the second difference of its path in the frame of
a tilted wrist, with gravity; rotation follows the direction of the stroke; the sensor adds noise.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NUM_TIMES = 48

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


def draw_in_air(digit: int, person: int, noise: float, random: np.random.Generator) -> NDArray[np.uint8]:
    """Returns the sensor's measurements, (6, NUM_TIMES) levels.

    Args:
        digit: 0 to 9.
        person: Sets the wrist's angle, and the size and slant of the writing.
        noise: Noise of the sensor; 0.1 is low.
        random: Draws the variation between repetitions.
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
    levels: NDArray[np.uint8] = np.clip(128 + 48 * measured, 0, 255).astype(np.uint8)
    return levels
