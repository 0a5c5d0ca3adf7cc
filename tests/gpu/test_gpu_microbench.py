"""The questions of ``mosaic bench`` on a real GPU."""

from __future__ import annotations

import pytest

from mosaic.backends.base import Backend
from mosaic.backends.table import open_backend
from mosaic.microbench import QUESTIONS, BenchSettings, Budget, Setup

pytestmark = pytest.mark.gpu


@pytest.fixture
def backend() -> Backend:
    return open_backend("cuda")


def test_partitions_run_on_disjoint_sms_and_keep_their_backward(backend: Backend):
    result = QUESTIONS["isolation"].answer(Setup(backend=backend, settings=BenchSettings.tiny(), budget=Budget(60)))
    assert result.of("partitions")
    for row in result.of("partitions"):
        assert row.values["num_shared"] == row.values["num_backward_outside"] == 0
        if (num_sms := row.number("num_sms")) is not None:
            assert (row.number("num_units") or 0) <= num_sms + 2


def test_a_pool_grows_and_shows_the_price_of_each_context(backend: Backend):
    result = QUESTIONS["pool"].answer(Setup(backend=backend, settings=BenchSettings.tiny(), budget=Budget(60)))
    assert result.of("lending")
    (growth,) = result.of("growth")
    assert growth.labels["contexts"] == growth.labels["asked"] or growth.note
    assert all(row.values["held_mib"] is not None for row in result.of("creations"))
