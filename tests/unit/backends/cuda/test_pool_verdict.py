"""``GreenPool`` judges the SMs that the probe saw: partitions that overlap are refused."""

from __future__ import annotations

from typing import Any

import pytest
from fake_driver.harness import FakeDriver

POOL = """
from mosaic.backends.cuda import driver as cuda
from mosaic.backends.cuda.pool import GreenPool
def pool_of():
    return GreenPool(cuda.CudaDriver(0))
num_lent = lambda pool: pool._pool.stats().num_lent
def borrow(pool, *layouts):
    return pool.borrow(layouts, image=lambda: cuda.probe_source().encode())
HALVES = (tuple(range(8)), tuple(range(8, 16)))
"""


def run(fake_driver: FakeDriver, body: str, **settings: str | int) -> Any:
    return fake_driver.run(POOL + body, **settings)


def test_two_sms_that_dynamic_parallelism_adds_on_hopper_are_allowed(fake_driver: FakeDriver):
    body = """
pool = pool_of()
loan = borrow(pool, HALVES)
lent = num_lent(pool)
loan.give_back()
pool.close()
result = [[record.sm_ids[-2:] for record in loan.records.values()], lent, leaked(), misused()]
"""
    shared, lent, left, misused = run(fake_driver, body, quirk="kernels_spread")
    assert (shared, lent, left, misused) == ([[130, 131]] * 2, 2, {}, [])


@pytest.mark.parametrize(("devices", "quirk"), [("132:9.0", "kernels_spread_far"), ("132:10.0", "kernels_spread")])
def test_more_shared_sms_and_those_of_other_devices_are_refused_each_time(
    fake_driver: FakeDriver, devices: str, quirk: str
):
    body = """
pool = pool_of()
errors = [error_of(lambda: borrow(pool, HALVES)) for _ in range(2)]
alone = borrow(pool, HALVES[:1])
result = [errors, num_lent(pool), len(alone.streams), misused()]
"""
    told = run(fake_driver, body, devices=devices, quirk=quirk, version=13010)
    (first, second), lent, num_streams, misused = told
    assert first == second
    call = "cuDevSmResourceSplitByCount"
    assert (first["kind"], first["call"], first["status"]) == ("CudaError", call, "CUDA_SUCCESS")
    assert "slots [0, 1, 2, 3, 4, 5, 6, 7] and the partition of slots [8, 9," in first["text"]
    assert (lent, num_streams, misused) == (1, 1, [])


def test_a_driver_whose_groups_overlap_is_refused_between_layouts_too(fake_driver: FakeDriver):
    body = """
pool = pool_of()
served = borrow(pool, ((0,),), ((2,),))
result = [error_of(lambda: borrow(pool, ((0, 1),), ((2, 3),)))["text"], len(served.streams)]
"""
    text, served = run(fake_driver, body, devices="132:10.0", quirk="overlapping_groups")
    assert "slots [0, 1] and the partition of slots [2, 3] share SM 15 (1 shared in total)" in text
    assert served == 2


def test_borrowers_of_one_partition_share_its_stream_and_the_last_gives_it_back(fake_driver: FakeDriver):
    body = """
import threading
pool = pool_of()
loans = [borrow(pool, HALVES), borrow(pool, HALVES[:1], HALVES)]
same = loans[0].streams == loans[1].streams
def use():
    for _ in range(50):
        loan = borrow(pool, HALVES)
        loan.give_back(), loan.give_back()
threads = [threading.Thread(target=use) for _ in range(4)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
lent = [num_lent(pool)]
for loan in loans:
    loan.give_back()
    lent.append(num_lent(pool))
late = borrow(pool, HALVES)
pool.close()
late.give_back()  # as lanes do that are let go after their pool
result = [same, lent, leaked(), misused()]
"""
    assert run(fake_driver, body) == [True, [2, 2, 0], {}, []]
