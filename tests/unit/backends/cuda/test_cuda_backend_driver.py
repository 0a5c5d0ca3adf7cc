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


@pytest.mark.parametrize("version", [12050, 13000])
def test_a_process_uses_a_backend_in_many_ways_one_after_the_other(fake_driver: FakeDriver, version: int):
    body = """
told = {}

def once():
    backend = CudaBackend(api=runtime)
    with backend.open_lanes(EVEN + UNEVEN) as lanes:
        sums, report = work(lanes), [[record.granted_sms, len(record.sm_ids)] for record in lanes.partitions]
        opened = num_lent(backend)
    made = [count("created", kind) for kind in ("green", "stream", "library")]
    return [sums, report, opened, num_lent(backend), made]
told["again"] = [once(), once(), once()]
told["kept"] = leaked()
CudaBackend(api=runtime).pool.close()
told["ended"] = leaked()

second = CudaBackend(1, api=runtime)
with second.open_lanes([(0,), (1,)]) as lanes:
    told["second"] = [second.device.num_slots, [record.granted_sms for record in lanes.partitions]]

backend = CudaBackend(2, api=runtime)  # a pool with room for new partitions
fake.mosaic_fake_fail_nth(b"cuGreenCtxCreate", 2, 3)
error = error_of(lambda: backend.open_lanes(EVEN + UNEVEN))
lent = num_lent(backend)
with backend.open_lanes(EVEN + UNEVEN) as lanes:
    told["failure"] = [error["status"], lent, work(lanes)]
told["misused"] = misused()
result = told
"""
    told = run(fake_driver, body, version=version, devices="132:9.0,108:8.0,132:9.0")
    first, *others = told["again"]
    assert first[:4] == [[8.0, 8.0], [[64, 64], [64, 64], [80, 80], [48, 48]], 4, 0]
    assert (told["kept"], told["ended"]) == ({"primary": 1, "green": 4, "stream": 4}, {})
    assert others == [first, first], "lanes opened again make nothing new"
    assert told["second"] == [27, [4, 4]], "the second device has slots and a pool of its own"
    assert told["failure"] == ["CUDA_ERROR_OUT_OF_MEMORY", 0, [8.0, 8.0]], "the backend stays usable"
    assert told["misused"] == []
