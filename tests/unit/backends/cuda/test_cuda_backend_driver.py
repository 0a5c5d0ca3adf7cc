"""``CudaBackend`` with its real pool over the fake ``libcuda.so.1``, in child processes; only torch's part is faked.

Children import torch, which takes seconds: questions that can share one do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fake_driver.harness import FakeDriver

# The fake driver takes the kernel's source for its code.
BACKEND = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
import torch
from fake_streams import FakeStreams
from mosaic.backends.cuda import driver as cuda
from mosaic.backends.cuda import probe as cuda_probe
from mosaic.backends.cuda.backend import CudaBackend
cuda.compile_probe = lambda compute_capability, source: source.encode()
num_lent = lambda backend: backend.pool._pool.stats().num_lent
EVEN = [tuple(range(8)), tuple(range(8, 16))]
UNEVEN = [tuple(range(10)), tuple(range(10, 16))]
runtime = FakeStreams()

def work(lanes):
    "A step of two stages, whose second reads what the first made."
    with runtime.watching():
        left, right = (lanes.lane(slots).submit(lambda: torch.ones(2, 2)) for slots in EVEN)
        both = [lanes.lane(slots).submit(lambda: left.wait() @ right.wait(), after=[left, right]) for slots in UNEVEN]
        return [ticket.wait().sum().item() for ticket in both]
"""


def run(fake_driver: FakeDriver, body: str, **settings: str | int) -> Any:
    return fake_driver.run(BACKEND + body, **settings)


def test_a_process_uses_a_backend_in_many_ways_one_after_the_other(fake_driver: FakeDriver):
    body = """
told = {}

def once():
    backend = CudaBackend(api=runtime)
    with backend.open_lanes(EVEN + UNEVEN) as lanes:
        work(lanes)
    return [count("created", kind) for kind in ("green", "stream", "library")]
told["again"] = [once(), once(), once()]

fine = CudaBackend(api=runtime, fine=True)
with fine.open_lanes([(0,), tuple(range(1, 66))]) as lanes:
    told["fine"] = [fine.device.num_slots, [record.granted_sms for record in lanes.partitions]]

second = CudaBackend(1, api=runtime)
with second.open_lanes([(0,), (1,)]) as lanes:
    told["second"] = [second.device.num_slots, [record.granted_sms for record in lanes.partitions]]

backend = CudaBackend(api=runtime, fine=True)  # a pool with room for new partitions
fake.mosaic_fake_fail_nth(b"cuGreenCtxCreate", 2, 3)
error = error_of(lambda: backend.open_lanes(EVEN + UNEVEN))
lent = num_lent(backend)
with backend.open_lanes(EVEN + UNEVEN) as lanes:
    told["failure"] = [error["status"], lent, work(lanes)]
told["misused"] = misused()
result = told
"""
    told = run(fake_driver, body, version=13000, devices="132:9.0,108:8.0")
    first, *others = told["again"]
    assert others == [first, first], "lanes opened again make nothing new"
    assert told["fine"] == [66, [2, 130]]
    assert told["second"] == [27, [4, 4]], "the second device has slots and a pool of its own"
    assert told["failure"] == ["CUDA_ERROR_OUT_OF_MEMORY", 0, [8.0, 8.0]], "the backend stays usable"
    assert told["misused"] == []


def test_a_step_of_two_stages_runs_and_everything_made_is_ended(fake_driver: FakeDriver):
    body = """
backend = CudaBackend(api=runtime)
lanes = backend.open_lanes(EVEN + UNEVEN)
sums = work(lanes)
open_ = num_lent(backend)
report = [[record.granted_sms, len(record.sm_ids)] for record in lanes.partitions]
lanes.close()
closed = num_lent(backend)
kept = leaked()
backend.pool.close()
result = [sums, open_, report, closed, kept, leaked(), misused()]
"""
    sums, opened, report, closed, kept, left, misused = run(fake_driver, body, version=12050)
    assert sums == [8.0, 8.0]
    assert (opened, closed) == (4, 0)
    assert report == [[64, 64], [64, 64], [80, 80], [48, 48]]
    assert kept == {"primary": 1, "green": 4, "stream": 4}
    assert (left, misused) == ({}, [])


def test_a_process_ends_well_with_lanes_open(fake_driver: FakeDriver, tmp_path: Path):
    report = tmp_path / "report"
    body = """
sys.kept = CudaBackend(api=runtime).open_lanes(EVEN)
result = True
"""
    assert run(fake_driver, body, report=str(report)) is True
    told = report.read_text().splitlines()
    assert not [line for line in told if line.startswith("misused")]
    assert {"green 2", "stream 2"} <= set(told)  # streams outlive everything that may still use them
