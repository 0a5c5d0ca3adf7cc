"""A loop and commands that start while other processes use the CPU: measured and marked."""

from __future__ import annotations

import logging

import pytest
from engine_cases import TwoTowers, pair_batch
from foreign_load import others_use

import mosaic
from mosaic.backends.host.backend import HostBackend
from mosaic.profiler import ProfileSettings

BUSY = ProfileSettings(retry_seconds=0.0, sample_seconds=0.05, min_repeats=2, max_repeats=3)
NOTE = "other processes used 61% of the CPU; times are not comparable"


def test_a_profile_that_others_disturbed_is_marked_in_the_log_and_in_describe(
    model: TwoTowers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    others_use(monkeypatch, 0.61)
    with caplog.at_level(logging.WARNING, logger="mosaic"):
        options = mosaic.Options(cache=None, profiling=BUSY, trial=None)
        handle = mosaic.colocate(model, sample=pair_batch(), backend=HostBackend(num_slots=2), options=options)
    assert handle.plan.foreign_cpu_share == 0.61
    assert f"while the modules were profiled, {NOTE}" in [record.getMessage() for record in caplog.records]
    assert f"while the modules were profiled, {NOTE}" in handle.describe().splitlines()
    handle.remove()
