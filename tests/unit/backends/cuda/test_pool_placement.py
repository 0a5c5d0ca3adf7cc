"""Pools whose layouts are placed by one sized split each, which drivers of CUDA 13.1 and newer can do."""

from __future__ import annotations

import pytest
from fake_driver.harness import FakeDriver
from fake_driver.pools import run_pools


def test_a_layout_is_split_by_the_sizes_of_its_slots_in_one_call(fake_driver: FakeDriver):
    body = """
pool = pool_of([[9, 8], [0, 1, 2]], placement="split")
pool.verify(IMAGE)
result = [[[info.slots, info.requested_sms, info.granted_sms, info.sm_ids] for info in pool.partitions(0)],
          count("calls", "cuDevSmResourceSplit"), pool.placement]
"""
    assert run_pools(fake_driver, body, version=13010) == [
        [[[8, 9], 16, 16, list(range(16))], [[0, 1, 2], 24, 24, list(range(16, 40))]],
        1,
        "split",
    ]


def test_the_same_layout_is_shared_and_another_one_is_not(fake_driver: FakeDriver):
    body = """
pool = pool_of([[0], [1]], [[0], [1]], [[0], [2]], placement="split")
pool.verify(IMAGE)
result = [[cost.num_contexts for cost in pool.stats().layouts], count("created", "green"),
          [info.sm_ids for info in pool.partitions(2)]]
"""
    assert run_pools(fake_driver, body, version=13010) == [
        [2, 0, 2],
        4,
        [list(range(8)), list(range(8, 16))],
    ]


@pytest.mark.parametrize("fine", [False, True])
def test_whatever_slots_a_chip_with_clusters_has_a_sized_split_can_give(fake_driver: FakeDriver, fine: bool):
    body = f"""
slots = list(range(_C.SlotSplit(_C.Device(0), fine={fine}).num_slots))
pool = pool_of([slots[:5], slots[5:]], [slots[:1], slots[1:2], slots[2:]], placement="split", fine={fine})
pool.verify(IMAGE)
layouts = [[info.sm_ids for info in pool.partitions(number)] for number in (0, 1)]
result = [len(slots), [[len(ids) for ids in layout] for layout in layouts],
          [len(set(sum(layout, []))) for layout in layouts]]
"""
    size, num_slots = (2, 66) if fine else (8, 14)
    sizes = [[5 * size, (num_slots - 5) * size], [size, size, (num_slots - 2) * size]]
    told = run_pools(fake_driver, body, version=13010, clusters="18,18,18,18,16,16,14,14")
    assert told == [num_slots, sizes, [num_slots * size] * 2]


def test_an_older_driver_is_named_with_the_version_needed_and_nothing_is_made(fake_driver: FakeDriver):
    body = "result = [error_of(lambda: pool_of([[0]], placement='split')), leaked()]"
    error, left = run_pools(fake_driver, body, version=13000)
    assert (error["kind"], error["found"]) == ("BackendUnavailableError", "a driver of CUDA 13.0")
    assert error["needed"] == "a driver of CUDA 13.1 or newer"
    assert "cuDevSmResourceSplit" in error["text"]
    assert left == {}


def test_a_split_that_gives_other_sizes_is_refused(fake_driver: FakeDriver):
    body = "result = [error_of(lambda: pool_of([[0, 1], [2]], placement='split')), leaked()]"
    error, left = run_pools(fake_driver, body, version=13010, quirk="other_sizes")
    assert (error["call"], error["status"]) == ("cuDevSmResourceSplit", "CUDA_SUCCESS")
    assert "gave 14 SMs where 16 were asked for" in error["text"]
    assert left == {}
