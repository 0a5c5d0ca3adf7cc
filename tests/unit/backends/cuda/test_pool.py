"""A stream pool against the fake driver: layouts over one split, and the SMs a probe sees."""

from __future__ import annotations

import pytest
from fake_driver.harness import FakeDriver
from fake_driver.pools import run_pools

REFUSED = {
    "pool.add_layout([])": "layout=[] has no partition",
    "pool.add_layout([[0], []])": "slots=[] is empty, but a partition needs a slot; name some of 0 to 15",
    "pool.add_layout([[0, 16]])": "slots=[0, 16] names slot 16, but this split has 16 slots; use 0 to 15",
    "pool.add_layout([[0, 1], [2], [3, 1]])": "slot 1 is in partitions 0 and 2",
    "pool.lend(1, 0)": "layout=1 is none of the 1 layouts",
    "pool.lend(0, 2)": "partition=2 is none of the 2 partitions of layout 0",
    "pool.partitions(1)": "layout=1 is none",
    "pool.give_back(12345)": "stream=12345 is not lent by this pool",
    "[pool.give_back(stream) for stream in [pool.lend(0, 0)] * 2]": "is not lent by this pool",
    "pool_of([[3, 1, 3]])": "names slot 3 twice, but a partition is a set; name each slot once",
}


def test_a_wrong_argument_is_refused_with_the_way_out_and_changes_nothing(fake_driver: FakeDriver):
    body = f"""
pool = pool_of(HALVES)
def state():
    return public(pool.stats()) | {{"layouts": len(pool.stats().layouts), "num_lent": 0}}
def refused(call):
    before, error = state(), error_of(lambda: eval(call, globals()))
    return [error, before == state(), count("created", "green") - count("destroyed", "green")]
result = [refused(call) for call in {list(REFUSED)!r}]
"""
    answers = run_pools(fake_driver, body)
    for (error, unchanged, contexts), words in zip(answers, REFUSED.values(), strict=True):
        assert error["kind"] == "ValueError"
        assert words in error["text"]
        assert (unchanged, contexts) == (True, 2)


# The probe.


def test_verify_leaves_lent_streams_alone_and_ends_what_it_made(fake_driver: FakeDriver):
    body = """
pool = pool_of(HALVES)
fake.mosaic_fake_given.argtypes = [ctypes.c_void_p]
lent = [pool.lend(0, 0), pool.lend(0, 1)]
before = leaked()
pool.verify(IMAGE)
given = [fake.mosaic_fake_given(stream) for stream in lent]
result = [before == leaked(), pool.stats().num_lent, given, misused()]
"""
    assert run_pools(fake_driver, body) == [True, 2, [0, 0], []]


def test_a_chip_with_scattered_sm_ids_and_fewer_slots_is_probed_whole(fake_driver: FakeDriver):
    body = """
pool = pool_of([list(range(start, 14, 3)) for start in range(3)])
pool.verify(IMAGE)
infos = pool.partitions(0)
ids = sorted(id for info in infos for id in info.sm_ids)
result = [pool.split.num_slots, [[info.granted_sms, len(info.sm_ids)] for info in infos],
          set(ids) < set(_C.probe_stream(pool.device, 0, IMAGE)), len(set(ids))]
"""
    sizes = [[40, 40], [40, 40], [32, 32]]
    clusters = "18,18,18,18,16,16,14,14"
    assert run_pools(fake_driver, body, clusters=clusters) == [14, sizes, True, 112]


@pytest.mark.parametrize("current", [0, 1])
def test_torchs_context_stays_current_whichever_device_it_is_of(fake_driver: FakeDriver, current: int):
    body = f"""
pool = pool_of([[0], [1]], [[2]])
pool.verify(IMAGE)
costs = [cost.driver_bytes for cost in [*pool.stats().layouts, pool.add_layout([[3]])]]
probed = _C.probe_stream(pool.device, 0, IMAGE)
pool.close()
torchs = _C.PrimaryContext(_C.Device({current}))  # so that its handle can be compared
address, popped = ctypes.c_void_p(), ctypes.c_void_p()
fake.cuGetProcAddress_v2(b"cuCtxPopCurrent", ctypes.byref(address), 4000, ctypes.c_uint64(0), None)
depth = fake.mosaic_fake_depth()
pops = [ctypes.CFUNCTYPE(ctypes.c_int)(address.value)(ctypes.byref(popped)), fake.mosaic_fake_device_of(popped)]
torchs.close()
result = [min(costs) > 0, len(probed), depth, pops, leaked(), misused()]
"""
    told = run_pools(fake_driver, body, devices="132:9.0,108:8.0", current=current)
    assert told == [True, 132, 1, [0, current], {"primary": 1}, []]


def test_a_probe_that_ran_nowhere_is_an_error(fake_driver: FakeDriver):
    body = "pool = pool_of(HALVES)\nresult = error_of(lambda: pool.verify(IMAGE))"
    error = run_pools(fake_driver, body, quirk="kernels_nowhere")
    assert (error["call"], error["status"]) == ("cuLaunchKernel", "CUDA_SUCCESS")
