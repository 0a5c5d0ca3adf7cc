"""Handwritten digits for the days: scikit-learn's real scans with synthetic shape, size, ink and dirt."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SIDE = 8


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


def write_digit(scan: NDArray[np.float64], hand: Hand, dirt: float, random: np.random.Generator) -> NDArray[np.uint8]:
    """Returns a scan in another hand.

    Args:
        scan: (8, 8), 0 (paper) to 1 (ink).
        hand: The day's writing.
        dirt: Standard deviation of the scanner's noise, in the same unit.
        random: Draws the rest.

    Returns:
        (1, 8, 8) levels.
    """
    angle, slant = random.normal(hand.turn, hand.spread), random.normal(hand.slant, hand.spread)
    size = np.exp(random.normal(0, hand.spread / 2, 2))
    turning = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    bending = turning @ np.array([[1, 0], [slant, 1]]) @ np.diag(size)
    middle = (SIDE - 1) / 2
    grid = np.indices((SIDE, SIDE)).reshape(2, -1) - middle
    rows, columns = bending @ grid + middle + random.normal(0, 0.4, (2, 1))
    ink = hand.contrast * _read(scan, rows, columns) ** hand.ink + random.normal(0, dirt, (SIDE, SIDE))
    levels: NDArray[np.uint8] = np.clip(255 * ink, 0, 255).astype(np.uint8)[None]
    return levels


def _read(scan: NDArray[np.float64], rows: NDArray[np.float64], columns: NDArray[np.float64]) -> NDArray[np.float64]:
    """Interpolates bilinearly; outside is paper."""
    padded = np.pad(scan, 2)
    rows, columns = np.clip(rows + 2, 0, SIDE + 2.99), np.clip(columns + 2, 0, SIDE + 2.99)
    top, left = rows.astype(int), columns.astype(int)
    down, right = rows - top, columns - left
    upper = padded[top, left] * (1 - right) + padded[top, left + 1] * right
    lower = padded[top + 1, left] * (1 - right) + padded[top + 1, left + 1] * right
    ink: NDArray[np.float64] = (upper * (1 - down) + lower * down).reshape(SIDE, SIDE)
    return ink
