"""The ladder's verdicts: what each rung concludes from readings, good and bad ones."""

from __future__ import annotations

import subprocess
import sys

import pytest
from fake_driver.harness import FakeDriver
from fake_driver.pools import run_pools
from fake_streams.driver import FakePool
from fake_streams.events import FakeEvent, FakeStream

from bench import tables
from bench.gpu.bench import Bench
from bench.gpu.ladder import RUNGS
from bench.gpu.ladder.streams import events, partitions
from bench.gpu.run import cudnn_runs
from bench.record import Figure, Study
from mosaic.backends.host.backend import HostBackend
from mosaic.microbench import Budget


def test_the_probe_is_launched_as_the_driver_wants_it(fake_driver: FakeDriver):
    found = run_pools(
        fake_driver,
        f"import sys; sys.path.insert(0, {str(tables.TOP)!r})\n"
        "import ctypes\n"
        "from cuda.bindings import driver\n"
        "from bench.gpu.ladder.streams import SmProbe, sm_ids\n"
        "def ask(name, *given):\n"
        "    status, *values = getattr(driver, name)(*given)\n"
        "    assert int(status) == 0, (name, status)\n"
        "    return values[0] if values else None\n"
        "pool = pool_of([list(range(10)), list(range(10, 16))])\n"
        "streams = [pool.lend(0, part) for part in (0, 1)]\n"
        "ask('cuCtxPushCurrent', ask('cuDevicePrimaryCtxRetain', ask('cuDeviceGet', 0)))\n"
        "probe = SmProbe(b'... mosaic_smid ...', 132)\n"
        "result = []\n"
        "for stream in streams:\n"
        "    memory, words = ask('cuMemAlloc', 128), (ctypes.c_uint * 32)()\n"
        "    ask('cuMemsetD32Async', memory, 0, 32, stream)\n"
        "    probe.launch(int(memory), 32, stream)\n"
        "    ask('cuMemcpyDtoHAsync', ctypes.addressof(words), memory, 128, stream)\n"
        "    ask('cuStreamSynchronize', stream)\n"
        "    result.append(sm_ids(list(words)))",
    )
    assert found == [list(range(80)), list(range(80, 128))]


def test_every_rung_is_a_function_that_asks_a_question_and_the_list_loads_no_torch():
    for rung in RUNGS.values():
        assert callable(rung.resolve())
        assert rung.asks.endswith("?")
    code = "import sys, bench.gpu.ladder; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tables.TOP, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def study_of(**convolutions: float | None) -> Study:
    figures = tuple(
        Figure(name="patches 16x16", source="measured", value=value, part=f"first/{name.replace('_', '-')}")
        for name, value in convolutions.items()
    )
    return Study(
        study="gpu", command="", created="", commit="", python_version="", torch_version="", machine=None,
        foreign_cpu_share=None, figures=figures,
    )  # fmt: skip


def test_lanes_do_without_cudnn_where_the_ladder_saw_it_fail_and_convolutions_run_without_it():
    assert cudnn_runs(study_of())
    assert cudnn_runs(study_of(conv_warm=0.0, conv_native=0.001))
    assert not cudnn_runs(study_of(conv_warm=None, conv_native=0.0))
    assert not cudnn_runs(study_of(conv_warm=0.3, conv_native=0.0))
    assert cudnn_runs(study_of(conv_warm=None, conv_native=None))


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
