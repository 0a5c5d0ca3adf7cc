"""Fixtures of tests that need a GPU; importing this needs none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mosaic.backends.cuda.driver import CudaBackend


@pytest.fixture(scope="session")
def cuda_backend() -> CudaBackend:
    """The first GPU."""
    return CudaBackend()


@pytest.fixture
def halves(cuda_backend: CudaBackend) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two partitions that together are all slots."""
    slots = cuda_backend.device.slots
    middle = len(slots) // 2
    return slots[:middle], slots[middle:]


@pytest.fixture(autouse=True)
def idle_at_the_end() -> Iterator[None]:
    """Waits for the device after each test, so that a failure is told where it belongs."""
    yield
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
