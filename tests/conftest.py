"""Fixtures shared by all tests."""

from __future__ import annotations

import pytest
from fake_driver.harness import FakeDriver


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> FakeDriver:
    """The fake ``libcuda.so.1``, compiled once a session; tests talk to it from child processes."""
    return FakeDriver.build(tmp_path_factory.mktemp("fake_driver"))
