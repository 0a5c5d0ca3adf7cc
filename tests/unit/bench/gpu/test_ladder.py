"""The ladder's verdicts: what each rung concludes from readings, good and bad ones."""

from __future__ import annotations

import subprocess
import sys

import pytest
from fake_streams.driver import FakePool
from fake_streams.events import FakeEvent, FakeStream

from bench import tables
from bench.gpu.bench import Bench
from bench.gpu.ladder import RUNGS
from bench.gpu.ladder.streams import events, partitions
from mosaic.backends.host.backend import HostBackend
from mosaic.microbench import Budget


def test_every_rung_is_a_function_that_asks_a_question_and_the_list_loads_no_torch():
    for rung in RUNGS.values():
        assert callable(rung.resolve())
        assert rung.asks.endswith("?")
    code = "import sys, bench.gpu.ladder; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tables.TOP, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_driver_that_refuses_events_on_green_streams_gets_its_verdict_and_its_sm_ids(
    monkeypatch: pytest.MonkeyPatch,
):
    green: set[int] = set()
    lend, record = FakePool.lend, FakeEvent.record

    def lend_noted(pool: FakePool, layout: int, partition: int) -> int:
        green.add(stream := lend(pool, layout, partition))
        return stream

    def refuse(event: FakeEvent, stream: FakeStream) -> None:
        if stream.handle in green:
            raise RuntimeError("invalid resource handle")
        record(event, stream)

    monkeypatch.setattr(FakePool, "lend", lend_noted)
    monkeypatch.setattr(FakeEvent, "record", refuse)
    bench = Bench(backend=HostBackend(num_slots=2), budget=Budget(), dry_run=True)
    found = {figure.name: figure.value for figure in events(bench)}
    assert found["default before left"] == 1.0
    assert found["left before default"] is None
    assert "green streams cannot be used with this driver" in bench.verdict
    list(partitions(bench))
    assert bench.verdict.startswith("disjoint, and as many SMs as granted")
