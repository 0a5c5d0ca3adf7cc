"""Measured gains of SM targets by device, read from ``sm_targets.json``, which ``python -m bench.tables`` writes.

The file is made of kept results. It maps a device's name, as its driver reports it, to the mean speed-up of matrix
products on a part of the device when libraries know how many SMs the part has (``Options(sm_target=True)``).
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

SM_TARGETS = Path(__file__).with_name("sm_targets.json")
PAYS = 1.03
"""Speed-up from which on an SM target counts as a gain."""


def sm_target_speedup(device_name: str) -> float | None:
    """Returns the measured speed-up of a device by an SM target; None where it was not measured."""
    return _speedups().get(device_name)


def sm_target_pays(device_name: str) -> bool:
    """Tells whether a measurement showed that an SM target pays on a device."""
    return (sm_target_speedup(device_name) or 0.0) >= PAYS


@cache
def _speedups() -> dict[str, float]:
    speedups: dict[str, float] = json.loads(SM_TARGETS.read_text(encoding="utf-8"))
    return speedups
