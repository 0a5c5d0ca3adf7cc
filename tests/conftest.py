"""Fixtures shared by all tests."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator

import pytest
from fake_driver.harness import FakeDriver
from hypothesis import settings

settings.register_profile("mosaic", deadline=None)  # no test asserts a time
settings.load_profile("mosaic")


@functools.cache
def why_no_gpu() -> str:
    """Why tests marked ``gpu`` cannot run here; empty where they can."""
    from mosaic.backends.cuda.backend import CudaBackend
    from mosaic.errors import BackendUnavailableError, CudaError

    try:
        CudaBackend()
    except (BackendUnavailableError, CudaError) as problem:
        return str(problem)
    return ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests marked ``gpu`` where there is none, unless one is required: then they fail."""
    if item.get_closest_marker("gpu") is None or not (reason := why_no_gpu()):
        return
    if os.environ.get("MOSAIC_REQUIRE_GPU") == "1":
        pytest.fail(f"MOSAIC_REQUIRE_GPU=1 and there is no GPU to use: {reason}", pytrace=False)
    pytest.skip(f"no GPU to use: {reason}")


@pytest.fixture(scope="session", autouse=True)
def own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps what tests measure out of the user's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def quiet_machine() -> Iterator[None]:
    """Measures as on a machine that nobody else uses, whatever else runs here."""
    from mosaic.profiler import CpuTime, ForeignLoad

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ForeignLoad, "taken", CpuTime(0.0, 1.0, 1.0))
        yield


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> FakeDriver:
    """The fake ``libcuda.so.1``, compiled once a session; tests talk to it from child processes."""
    return FakeDriver.build(tmp_path_factory.mktemp("fake_driver"))
