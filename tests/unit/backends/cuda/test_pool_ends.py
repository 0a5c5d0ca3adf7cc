"""How pools end: by close, by being dropped, at exit, after a fork; several at once, and from many threads."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_driver.harness import FakeDriver
from fake_driver.pools import run_pools


def test_streams_are_waited_for_then_end_before_the_first_context_and_the_primary_last(fake_driver: FakeDriver):
    body = """
pool = pool_of(HALVES)
fake.mosaic_fake_mark()
pool.close()
result = words("log")
"""
    assert run_pools(fake_driver, body) == [
        "cuCtxPushCurrent",
        *["cuStreamSynchronize"] * 2,
        *["cuStreamDestroy"] * 2,
        "cuCtxPopCurrent",
        *["cuGreenCtxDestroy"] * 2,
        "cuDevicePrimaryCtxRelease",
    ]


@pytest.mark.parametrize(
    "keep",
    [
        "sys.kept = pool",
        "atexit.register(pool.close)",
    ],
)
def test_a_pool_alive_at_exit_crashes_nothing_and_ends_what_it_can(fake_driver: FakeDriver, tmp_path: Path, keep: str):
    report = tmp_path / "report"
    body = f"""
import atexit, sys
pool = pool_of(HALVES)
pool.lend(0, 0)
{keep}
result = True
"""
    assert run_pools(fake_driver, body, report=str(report)) is True
    told = report.read_text().splitlines()
    assert not [line for line in told if line.startswith("misused")]
    if keep != "sys.kept = pool":  # Python itself does not end what is kept there
        assert set(told) == {"green 0", "primary 0", "stream 0"}


def test_a_pool_whose_driver_is_in_an_error_for_good_says_so_and_is_closed(fake_driver: FakeDriver):
    body = """
pool = pool_of(HALVES)
lent = pool.lend(0, 0)
fake.mosaic_fake_fail_nth(b"cuStreamSynchronize", 700, 1)  # as when a kernel of the user's went astray
calls = [lambda: pool.verify(IMAGE), lambda: pool.add_layout([[0]]), pool.close]
errors = [error_of(call) for call in calls]
told = [[error["status"] for error in errors], "start it anew" in errors[-1]["text"]]
result = [*told, pool.closed, error_of(pool.close), error_of(lambda: pool_of(HALVES))["status"]]
"""
    error = "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert run_pools(fake_driver, body) == [[error] * 3, True, True, None, error]


def test_a_pool_that_outlives_the_driver_has_nothing_left_to_end(fake_driver: FakeDriver):
    body = """
dropped, closed = pool_of(HALVES), pool_of(HALVES)
fake.mosaic_fake_end()
del dropped
result = [error_of(closed.close), closed.closed, error_of(lambda: pool_of(HALVES))["status"]]
"""
    assert run_pools(fake_driver, body) == [None, True, "CUDA_ERROR_DEINITIALIZED"]


# Runs a function in a forked child and returns what it returned, by way of a pipe.
FORK = """
import os
def in_child(work):
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(send, json.dumps(work()).encode())
        os._exit(0)
    os.close(send)
    with os.fdopen(receive) as told:
        text = told.read()
    assert os.waitpid(child, 0)[1] == 0
    return json.loads(text)
"""


def test_in_a_forked_child_every_method_says_that_the_pool_is_the_parents(fake_driver: FakeDriver):
    body = f"""{FORK}
pool, context = pool_of(HALVES), _C.PrimaryContext(_C.Device(0))
stream = pool.lend(0, 0)
def child():
    calls = [lambda: pool.lend(0, 0), lambda: pool.give_back(stream), pool.close, pool.stats,
             lambda: pool.add_layout([[0]]), lambda: pool.partitions(0),
             lambda: pool.verify(IMAGE), context.close, lambda: _C.Device(0)]
    errors = [error_of(call) for call in calls]
    return [[e and e["kind"] for e in errors], [e and "spawn" in e["needed"] for e in errors], pool.closed, misused()]
errors = in_child(child)
pool.give_back(stream)
pool.close(), context.close()
result = [*errors, leaked()]
"""
    kinds, ways_out, closed, wrong, left = run_pools(fake_driver, body)
    assert kinds == ["BackendUnavailableError"] * 9
    assert all(ways_out)
    assert (closed, wrong, left) == (False, [], {})


def test_a_forked_child_drops_pools_without_a_driver_call(fake_driver: FakeDriver):
    body = f"""{FORK}
held = [pool_of(HALVES), _C.PrimaryContext(_C.Device(0))]
def child():
    held.clear()
    return [misused(), leaked()]
in_child_after_drop = in_child(child)
alive = len(_C.probe_stream(held[0].device, held[0].lend(0, 0), IMAGE))
held.clear()
result = [in_child_after_drop, alive, leaked(), misused()]
"""
    (wrong, in_child), alive, left, misused = run_pools(fake_driver, body)
    assert (wrong, alive, left, misused) == ([], 64, {}, [])
    assert in_child == {"primary": 1, "green": 2, "stream": 2}  # the parent's, untouched


def test_a_fork_while_another_thread_holds_the_lock_blocks_no_child(fake_driver: FakeDriver):
    body = f"""{FORK}
import threading
pool = pool_of(HALVES)
stop = threading.Event()
def busy():
    while not stop.is_set():
        pool.verify(IMAGE)
thread = threading.Thread(target=busy)
thread.start()
result = {{in_child(lambda: error_of(lambda: pool.lend(0, 0))["kind"]) for _ in range(20)}}
stop.set()
thread.join()
result = [*result]
"""
    assert run_pools(fake_driver, body) == ["BackendUnavailableError"]


def test_threads_borrow_add_and_verify_at_once_and_each_loan_is_counted(fake_driver: FakeDriver):
    body = """
import threading
pool = pool_of(HALVES, UNEQUAL)
streams, failures = [[pool.lend(layout, part) for part in range(2)] for layout in range(2)], []

def borrow(seed):
    for turn in range(3000):
        stream = pool.lend((seed + turn) % 2, turn % 2)
        if stream != streams[(seed + turn) % 2][turn % 2]:
            failures.append(stream)
        pool.give_back(stream)

def grow():
    for turn in range(60):
        pool.add_layout([[turn % 16], [(turn + 5) % 16]])
        pool.verify(IMAGE)
        pool.stats()

threads = [threading.Thread(target=borrow, args=(seed,)) for seed in range(6)] + [threading.Thread(target=grow)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
lent = [pool.stats().num_lent]
for stream in sum(streams, []):
    pool.give_back(stream)
lent.append(pool.stats().num_lent)
pool.close()
result = [failures, lent, leaked(), misused()]
"""
    assert run_pools(fake_driver, body) == [[], [4, 0], {}, []]


@pytest.mark.parametrize(
    ("slow", "call", "quick"),
    [
        ("pool.verify(IMAGE)", "cuLaunchKernel", "pool.lend(0, 0)"),
        ("pool.add_layout([[0], [1]])", "cuGreenCtxStreamCreate", "pool.give_back(stream)"),
        ("pool.close()", "cuStreamDestroy", "pool.lend(0, 0)"),
    ],
)
def test_quick_calls_wait_for_a_slow_one_and_other_python_threads_run_on(
    fake_driver: FakeDriver, slow: str, call: str, quick: str
):
    body = f"""
import threading
pool = pool_of(HALVES)
stream = pool.lend(0, 0)
fake.mosaic_fake_hold(b"{call}")
first, second = (threading.Thread(target=error_of, args=(call,)) for call in (lambda: {slow}, lambda: {quick}))
first.start()
while not fake.mosaic_fake_num_waiting():
    pass
second.start()
second.join(timeout=0.05)  # in vain, and this thread goes on: nobody waits with the GIL held
waited = second.is_alive()
fake.mosaic_fake_let_go()
first.join(), second.join()
result = [waited, pool.closed]
"""
    assert run_pools(fake_driver, body) == [True, slow == "pool.close()"]
