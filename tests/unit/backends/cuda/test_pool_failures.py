"""Every driver call of a pool's life fails in turn: each is a CudaError that names it, and leaks nothing."""

from __future__ import annotations

import pytest
from fake_driver.harness import FakeDriver
from fake_driver.pools import run_pools

# Runs a part of a pool's life once to see its calls, then once for each call, with that call failing.
TURNS = """
ENDS = {"cuStreamDestroy": "stream", "cuGreenCtxDestroy": "green", "cuDevicePrimaryCtxRelease": "primary",
        "cuLibraryUnload": "library", "cuMemFree": "memory"}
SILENT = {"cuGetErrorName", "cuGetErrorString"}

def make():
    return pool_of(HALVES, [[0, 1], [2, 3]], **OPTIONS)

def prepare():
    return None if PART == "construct" else make()

def act(pool):
    if PART == "construct":
        return make()
    if PART == "add_layout":
        pool.add_layout([[4], [0, 1], [6, 7]])
    elif PART == "verify":
        pool.verify(IMAGE)
    elif PART == "close":
        pool.close()
    elif PART == "lend":
        pool.give_back(pool.lend(1, 1))
    elif PART == "probe_stream":
        _C.probe_stream(pool.device, pool.lend(0, 0), IMAGE)
    return pool

def calls():
    return {name: count("calls", name) for name in called()}

def calls_of_part():
    pool = prepare()
    before = calls()
    pool = act(pool)
    made = {name: number - before.get(name, 0) for name, number in calls().items()}
    pool.close()
    return {name: number for name, number in made.items() if number and name not in SILENT}

def state_of(pool):
    stats = pool.stats()
    return [stats.num_contexts, len(stats.layouts), [i.sm_ids for i in pool.partitions(0)]]

def turn(name, nth):
    start = leaked()
    pool = prepare()
    held, depth = pool and state_of(pool), fake.mosaic_fake_depth()
    fake.mosaic_fake_fail_nth(name.encode(), 999, nth)
    error = error_of(lambda: act(pool))
    fake.mosaic_fake_fail(name.encode(), 0)
    unchanged = PART == "close" or pool is None or state_of(pool) == held
    depth += name == "cuCtxPopCurrent"  # which alone may leave a context current
    unchanged = unchanged and fake.mosaic_fake_depth() == depth
    if PART in ("add_layout", "verify"):
        act(pool)  # the second try does what the first should have done
        unchanged = unchanged and state_of(pool) == after
    # What a failed end has left is the driver's; Mosaic must not try again, nor leave anything else.
    expected = dict(start)
    if name in ENDS:
        expected[ENDS[name]] = expected.get(ENDS[name], 0) + 1
    late = pool and error_of(pool.close)
    good = (error and error["kind"] == "CudaError" and error["call"] == name and name in error["text"]
            and error["status"] == "CUDA_ERROR_UNKNOWN" and unchanged and not late
            and (pool is None or pool.closed))
    del pool
    return [] if good and leaked() == expected else [[name, nth, error, unchanged, late, start, leaked(), expected]]

_C.driver_version()  # the look-up of functions, once a process, is not of this part
part = calls_of_part()
after = state_of(act(prepare())) if PART in ("add_layout", "verify") else None
wrong = [one for name, number in part.items() for nth in range(1, number + 1) for one in turn(name, nth)]
result = [sorted(part), wrong]
"""

PARTS = {"construct": 17, "add_layout": 7, "verify": 13, "close": 6, "probe_stream": 13, "lend": 0}
"""Driver functions that each part of a pool's life calls."""


@pytest.mark.parametrize("part", PARTS)
def test_each_call_that_fails_is_named_and_nothing_is_leaked(fake_driver: FakeDriver, part: str):
    calls, wrong = run_pools(fake_driver, f"PART, OPTIONS = {part!r}, {{}}\n{TURNS}")
    assert wrong == []
    assert len(calls) == PARTS[part]
