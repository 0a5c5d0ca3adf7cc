"""The first lines of every child that makes stream pools."""

from __future__ import annotations

from typing import Any

from fake_driver.harness import FakeDriver

POOLS = """
from mosaic import _C
IMAGE = _C.PROBE_SOURCE.encode()
HALVES = [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]]
UNEQUAL = [list(range(10)), list(range(10, 16))]

def pool_of(*layouts, device=0, **options):
    return _C.StreamPool(_C.Device(device), layouts, **options)

def public(value):
    return {name: getattr(value, name) for name in dir(value) if not name.startswith("_")}
"""


def run_pools(fake_driver: FakeDriver, body: str, **settings: str | int) -> Any:
    """Runs a body that makes pools; see ``FakeDriver.run``."""
    return fake_driver.run(POOLS + body, **settings)
