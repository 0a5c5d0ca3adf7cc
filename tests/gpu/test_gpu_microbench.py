"""The questions of ``mosaic bench`` on a real GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mosaic.backends.base import Backend
from mosaic.backends.table import open_backend
from mosaic.microbench import QUESTIONS, BenchSettings, Budget
from mosaic.microbench.isolation import measure_isolation
from mosaic.microbench.pool import PoolResult, measure_pool

pytestmark = pytest.mark.gpu


@pytest.fixture
def backend() -> Backend:
    return open_backend("cuda")


@pytest.mark.parametrize("name", list(QUESTIONS))
def test_a_short_run_leaves_its_files(name: str, backend: Backend, tmp_path: Path):
    question = QUESTIONS[name]
    question.leave(question.measure(backend, BenchSettings.tiny(), Budget(12)), tmp_path)
    origin = json.loads((tmp_path / f"{name}.json").read_text())["origin"]
    assert origin["backend"] == "cuda"
    assert origin["driver_version"]
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_partitions_run_on_disjoint_sms_and_keep_their_backward(backend: Backend):
    result = measure_isolation(backend, BenchSettings.tiny(), Budget(60))
    assert result.layouts
    for layout in result.layouts:
        assert layout.disjoint
        assert all(partition.keeps_backward for partition in layout.partitions)
        for partition in layout.partitions:
            assert partition.num_sms is None or len(partition.units) <= partition.num_sms + 2


def test_a_pool_grows_and_gives_a_price_for_each_context(backend: Backend):
    result = measure_pool(backend, BenchSettings.tiny(), Budget(60))
    assert isinstance(result, PoolResult)
    assert result.lending is not None
    assert result.growth is not None
    assert result.growth.contexts == result.growth.asked or result.growth.stopped_by
    assert all(creation.held_bytes is not None for creation in result.creations)
