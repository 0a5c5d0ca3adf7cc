"""``CudaBackend`` with its real pool over the fake ``libcuda.so.1``, in child processes; only torch's part is faked.

Children import torch, which takes seconds: questions that can share one do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_driver.harness import FakeDriver

# The fake driver takes the kernel's source for its code.
BACKEND = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import torch
from fake_streams import FakeStreams
from mosaic.backends.cuda.driver import driver as cuda
from mosaic.backends.cuda.driver import probe as cuda_probe
from mosaic.backends.cuda.driver import CudaBackend
cuda_probe.compile_probe = lambda compute_capability: cuda.probe_source().encode()
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


@pytest.fixture(scope="module")
def told(fake_driver: FakeDriver) -> Any:
    """What a process says that uses the backend in many ways, one after the other, on a driver of CUDA 13.0."""
    body = """
import os
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

with CudaBackend(api=runtime, remainder=True).open_lanes(EVEN) as lanes:
    told["remainder"] = [list(lanes.report.remainder.sm_ids), lanes.remainder.submit(lambda: 3).wait()]

second = CudaBackend(1, api=runtime)
with second.open_lanes([(0,), (1,)]) as lanes:
    told["second"] = [second.device.num_slots, [record.granted_sms for record in lanes.partitions]]

told["absent"] = error_of(lambda: CudaBackend(3, api=runtime))["text"]
told["split"] = error_of(lambda: CudaBackend(api=runtime, placement="split").open_lanes(EVEN))
torch.cuda.is_available = lambda: False
told["torch"] = error_of(CudaBackend)

pool = cuda.open_pool(0, [EVEN])
told["probe"] = [cuda.probe_stream(0, pool.lend(0, 1)), len(cuda.probe_stream(0, 0))]
pool.close()

os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = "50"
backend = CudaBackend(api=runtime)
before = list(backend.notes)
backend.open_lanes(EVEN).close()
told["notes"] = [before, list(backend.notes)]

backend = CudaBackend(api=runtime, priority=-1)  # a pool of its own
fake.mosaic_fake_fail_nth(b"cuGreenCtxCreate", 2, 3)
error = error_of(lambda: backend.open_lanes(EVEN + UNEVEN))
lent = backend.pool.stats.num_lent
with backend.open_lanes(EVEN + UNEVEN) as lanes:
    told["failure"] = [error["status"], lent, work(lanes)]
told["misused"] = misused()
result = told
"""
    return run(fake_driver, body, version=13000, devices="132:9.0,108:8.0")


@pytest.mark.parametrize("version", [12050, 13010])
def test_a_step_of_two_stages_runs_and_everything_made_is_ended(fake_driver: FakeDriver, version: int):
    body = """
backend = CudaBackend(api=runtime)
lanes = backend.open_lanes(EVEN + UNEVEN)
sums = work(lanes)
open_ = backend.pool.stats.num_lent
report = [[record.granted_sms, len(record.sm_ids)] for record in lanes.report.partitions]
lanes.close()
closed = backend.pool.stats.num_lent
kept = leaked()
backend.pool.close()
result = [sums, open_, report, closed, kept, leaked(), misused()]
"""
    sums, opened, report, closed, kept, left, misused = run(fake_driver, body, version=version)
    assert sums == [8.0, 8.0]
    assert (opened, closed) == (4, 0)
    assert report == [[64, 64], [64, 64], [80, 80], [48, 48]]
    assert kept == {"primary": 1, "green": 4, "stream": 4}
    assert (left, misused) == ({}, [])


def test_lanes_opened_again_and_again_make_nothing_new(told: Any):
    first, *others = told["again"]
    assert others == [first, first]


def test_fine_slots_and_the_remainder_reach_the_driver(told: Any):
    assert told["fine"] == [66, [2, 130]]
    assert told["remainder"] == [[128, 129, 130, 131], 3]


def test_the_second_device_has_its_own_slots_and_pool(told: Any):
    assert told["second"] == [27, [4, 4]]


def test_a_device_that_is_not_there_is_refused(told: Any):
    assert "device 3 is not there" in told["absent"]


def test_placement_by_sizes_needs_a_newer_driver_and_says_so(told: Any):
    assert told["split"]["kind"] == "BackendUnavailableError"
    assert "13.1" in told["split"]["text"]


def test_without_a_gpu_build_of_torch_the_backend_says_what_to_install(told: Any):
    assert told["torch"]["kind"] == "BackendUnavailableError"
    assert "torch cannot use the GPU" in told["torch"]["text"]


def test_any_stream_can_be_probed_through_the_backends_module(told: Any):
    assert told["probe"] == [list(range(64, 128)), 132]


def test_surroundings_that_defeat_partitions_are_noted(told: Any):
    before, notes = told["notes"]
    assert before == []
    assert any("CUDA_DEVICE_MAX_CONNECTIONS=1 for 2 lanes" in note for note in notes)
    assert any("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50" in note for note in notes)


def test_a_context_that_cannot_be_made_leaves_the_backend_usable(told: Any):
    assert told["failure"] == ["CUDA_ERROR_OUT_OF_MEMORY", 0, [8.0, 8.0]]


def test_no_rule_of_the_driver_is_broken(told: Any):
    assert told["misused"] == []


def test_placement_by_sizes_makes_each_layout_by_a_split_of_its_own(fake_driver: FakeDriver):
    body = """
backend = CudaBackend(api=runtime, placement="split")
with backend.open_lanes(EVEN + UNEVEN) as lanes:
    sums = work(lanes)
    sms = [list(record.sm_ids) for record in lanes.partitions]
backend.pool.close()
result = [sums, sms, leaked(), misused()]
"""
    sums, sms, left, misused = run(fake_driver, body, version=13010)
    assert sums == [8.0, 8.0]
    assert set(sms[0]).isdisjoint(sms[1])
    assert set(sms[2]).isdisjoint(sms[3])
    assert (left, misused) == ({}, [])


@pytest.mark.parametrize(("version", "lacking"), [(12040, "cuGreenCtxStreamCreate"), (12000, "cuGreenCtxCreate")])
def test_a_driver_without_green_context_streams_is_refused_by_the_calls_it_lacks(
    fake_driver: FakeDriver, version: int, lacking: str
):
    body = "from mosaic.backends.cuda.driver import CudaDriver\nresult = error_of(CudaDriver(0).describe)"
    error = fake_driver.run(body, version=version)
    assert error["kind"] == "BackendUnavailableError"
    assert lacking in error["found"]
    assert error["needed"] == "CUDA 12.5"


@pytest.mark.parametrize(("devices", "quirk"), [("132:9.0", "kernels_spread_far"), ("132:10.0", "overlapping_groups")])
def test_partitions_that_are_seen_to_overlap_are_refused_with_the_reason(
    fake_driver: FakeDriver, devices: str, quirk: str
):
    body = """
backend = CudaBackend(api=runtime)
error = error_of(lambda: backend.open_lanes(EVEN))
again = error_of(lambda: backend.open_lanes(EVEN))
num_lent = backend.pool.stats.num_lent
backend.pool.close()
result = [error, again == error, num_lent, leaked()]
"""
    error, is_same, num_lent, left = run(fake_driver, body, devices=devices, quirk=quirk)
    assert error["kind"] == "CudaError"
    assert "were seen to share SM" in error["text"]
    assert "mosaic doctor" in error["text"]
    assert (is_same, num_lent, left) == (True, 0, {})


@pytest.mark.parametrize("keep", ["lanes.close()", "sys.kept = lanes"])
def test_a_process_ends_well_with_lanes_open_or_closed(fake_driver: FakeDriver, tmp_path: Path, keep: str):
    report = tmp_path / "report"
    body = f"""
lanes = CudaBackend(api=runtime).open_lanes(EVEN)
{keep}
result = True
"""
    assert run(fake_driver, body, report=str(report)) is True
    told = report.read_text().splitlines()
    assert not [line for line in told if line.startswith("misused")]
    assert {"green 2", "stream 2"} <= set(told)  # streams outlive everything that may still use them


def test_the_backend_is_loaded_with_torch_only_when_it_is_asked_for(fake_driver: FakeDriver):
    body = """
import sys
import mosaic.backends.cuda.driver as cuda
before = "torch" in sys.modules
wrong = error_of(lambda: cuda.NoSuchBackend)["kind"]
cuda.CudaBackend
result = [before, wrong, "torch" in sys.modules]
"""
    assert fake_driver.run(body) == [False, "AttributeError", True]
