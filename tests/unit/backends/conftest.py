"""A runtime and a driver of this process in the place of torch's and CUDA's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_streams import FakeGreenDriver, FakeStreams


@pytest.fixture
def driver() -> FakeGreenDriver:
    return FakeGreenDriver()


@pytest.fixture
def runtime() -> Iterator[FakeStreams]:
    made = FakeStreams()
    with made.watching():
        yield made
