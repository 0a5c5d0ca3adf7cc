"""The fake driver's sized split, the work it does, and how it ends; asked directly, without ``mosaic._C``."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_driver.asking import INVALID_CONFIGURATION, INVALID_TYPE, INVALID_VALUE, READY, ask
from fake_driver.harness import FakeDriver


@pytest.mark.parametrize(
    ("wanted", "sizes", "left"),
    [
        ("(80, 8), (48, 8)", [80, 48], 4),
        ("(80,), (48,)", [80, 48], 4),  # a co-scheduled count of 0 is the default, 8 on Hopper
        ("(0, 0)", [128], 4),  # the examples of cuda.h, in its order
        ("(10, 2)", [10], 122),
        ("(8, 4), (0, 2, 0, BACKFILL)", [8, 124], 0),
        ("(72, 8), (0,)", [72, 56], 4),
        ("(132, 8, 0, BACKFILL)", [132], 0),
    ],
)
def test_a_sized_split_gives_the_sizes_asked_for_or_discovers_them(
    fake_driver: FakeDriver, wanted: str, sizes: list[int], left: int
):
    answer = ask(fake_driver, f"result = sized({wanted.rstrip(',')})", version=13010)
    assert answer == [0, sizes, sizes, left]


@pytest.mark.parametrize(
    ("wanted", "status"),
    [
        ("(81, 8)", INVALID_VALUE),
        ("(84, 8)", INVALID_VALUE),  # never rounded
        ("(134, 2)", INVALID_VALUE),
        ("(64, 3)", INVALID_VALUE),
        ("(64, 64)", INVALID_VALUE),
        ("(8, 8, 0, 0, (1,))", INVALID_VALUE),
        ("(8, 8, 0, 8)", INVALID_VALUE),
        ("(8, 8), flags=1", INVALID_VALUE),
        ("(80, 8), (56, 8)", INVALID_CONFIGURATION),
        ("(128, 8), (0, 8)", INVALID_CONFIGURATION),
        ("(80, 8), results=False", INVALID_CONFIGURATION),
        ("(80, 8), source=split(2, 64)[1][0]", INVALID_CONFIGURATION),
        ("(80, 8), source=Resource()", INVALID_TYPE),
    ],
)
def test_a_sized_split_refuses_what_it_cannot_give_exactly(fake_driver: FakeDriver, wanted: str, status: int):
    assert ask(fake_driver, f"result = sized({wanted})[0]", version=13010) == status


def test_a_sized_split_without_results_only_discovers(fake_driver: FakeDriver):
    body = "result = sized((0, 8), (0, 8), results=False)"
    assert ask(fake_driver, body, version=13010) == [0, [128, 0], [], 4]


@pytest.mark.parametrize(("version", "found"), [(13000, False), (13010, True)])
def test_the_sized_split_comes_with_13_1(fake_driver: FakeDriver, version: int, found: bool):
    body = f"result = bool(find('cuDevSmResourceSplit', {version})[2])"
    assert ask(fake_driver, body, version=version) is found


def test_current_contexts_are_a_stack_and_work_needs_one(fake_driver: FakeDriver):
    body = """
without = allocate(4)[0]
context = primary()
result = [without, push(context), allocate(4)[0], pop(), allocate(4)[0], pop(), misused()]
"""
    assert ask(fake_driver, body) == [201, 0, 0, 0, 201, 201, ["popped_too_often"]]


def test_a_kernel_writes_the_sms_of_its_streams_context(fake_driver: FakeDriver):
    body = f"""{READY}
_, handle = stream(green(describe(groups[1], groups[4])[1])[1])
given = [clear(memory, handle), launch(kernel, memory, 8, handle), copy(words, memory, handle), wait(handle)]
too_large = launch(kernel, memory, 8, handle, threads=2048)
call("cuLibraryUnload", library, version=12000)
result = [given, sms_in(words), too_large, launch(kernel, memory, 8, handle), load(b"none")[0]]
"""
    seen = [*range(8, 16), *range(32, 40)]
    assert ask(fake_driver, body) == [[0, 0, 0, 0], seen, INVALID_VALUE, 400, 500]


@pytest.mark.parametrize("waits_for", ["other", "None"])
def test_work_is_done_when_its_own_stream_is_waited_for_and_not_before(fake_driver: FakeDriver, waits_for: str):
    body = f"""{READY}
clear(memory, one), launch(kernel, memory, 8, one), copy(words, memory, one)
before = sms_in(words)
wait({waits_for})
result = [before, sms_in(words), wait(one), sms_in(words)]
"""
    assert ask(fake_driver, body) == [[], [], 0, list(range(8))]


def test_work_given_to_another_stream_has_no_order_without_an_event(fake_driver: FakeDriver):
    body = f"""{READY}
clear(memory, one), launch(kernel, memory, 8, one)
done = event()
created = [record(done, one), wait(other)]
copy(words, memory, other), wait(other)
unordered = sms_in(words)
follow(other, done), clear(memory, one), copy(words, memory, other), wait(other)
result = [created, unordered == list(range(8)), sms_in(words)]  # without what came after the event
"""
    assert ask(fake_driver, body) == [[0, 0], False, list(range(8))]


@pytest.mark.parametrize(("quirk", "status"), [("", 0), ("strict_events", 400)])
def test_an_event_of_the_primary_context_is_refused_on_a_green_stream_by_the_words_alone(
    fake_driver: FakeDriver, quirk: str, status: int
):
    body = f"""{READY}
made = event()
result = [record(made, one), record(made, None), follow(one, made)]
"""
    assert ask(fake_driver, body, quirk=quirk) == [status, 0, 0]


@pytest.mark.parametrize(
    ("grid", "seen"),
    [({"blocks": 16}, 8), ({"blocks": 8}, 4), ({"threads": 128, "blocks": 32}, 2), ({"spin_ns": 0}, 1)],
)
def test_a_grid_reaches_only_as_many_sms_as_its_blocks_fill(fake_driver: FakeDriver, grid: dict[str, int], seen: int):
    body = f"""{READY}
clear(memory, one), launch(kernel, memory, 8, one, **{grid}), copy(words, memory, one), wait(one)
result = len(sms_in(words))
"""
    assert ask(fake_driver, body) == seen


@pytest.mark.parametrize(("version", "status", "destroyed"), [(13000, 709, 709), (13010, 917, 0)])
def test_a_stream_whose_context_has_gone_takes_no_work(
    fake_driver: FakeDriver, version: int, status: int, destroyed: int
):
    body = f"""{READY}
_, context = green(describe(groups[2])[1])
_, handle = stream(context)
call("cuGreenCtxDestroy", context)
given = [wait(handle), clear(memory, handle), launch(kernel, memory, 8, handle), record(event(), handle)]
result = [given, call("cuStreamDestroy", handle)]
"""
    assert ask(fake_driver, body, version=version) == [[status] * 4, destroyed]


def test_a_threads_stack_may_start_with_torchs_primary_context(fake_driver: FakeDriver):
    body = """
import threading
mine, theirs = primary(0), primary(1)
def popped():
    context = ctypes.c_void_p()
    return [call("cuCtxPopCurrent", ctypes.byref(context), version=4000), context.value]
elsewhere = []
push(mine)
pops = [popped(), popped(), popped()[0]]
thread = threading.Thread(target=lambda: elsewhere.append(popped()))
thread.start(), thread.join()
result = [pops == [[0, mine.value], [0, theirs.value], 201], elsewhere == [[0, theirs.value]]]
"""
    assert ask(fake_driver, body, devices="132:9.0,132:9.0", current=1) == [True, True]


def test_an_error_that_leaves_the_process_inconsistent_is_returned_by_all_that_follows(fake_driver: FakeDriver):
    body = f"""{READY}
fake.mosaic_fake_fail_nth(b"cuStreamSynchronize", 700, 1)
result = [wait(one), wait(other), clear(memory, None), pop(), allocate(4)[0]]
"""
    assert ask(fake_driver, body) == [700] * 5


def test_contexts_and_streams_take_memory_and_give_it_back(fake_driver: FakeDriver):
    body = """
push(primary())
def free():
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert call("cuMemGetInfo", ctypes.byref(free), ctypes.byref(total), version=3020) == 0
    return free.value
start = free()
_, context = green(describe(whole())[1])
_, handle = stream(context)
made = free()
call("cuStreamDestroy", handle), call("cuGreenCtxDestroy", context)
result = [start - made, start - free()]
"""
    assert ask(fake_driver, body) == [3 * 2**20 + 2**16, 0]


def test_wrong_ends_are_counted_as_misuse(fake_driver: FakeDriver):
    body = """
_, context = green(describe(whole())[1])
_, handle = stream(context)
call("cuGreenCtxDestroy", context), call("cuGreenCtxDestroy", context)
call("cuStreamDestroy", handle), call("cuStreamDestroy", handle)
call("cuDevicePrimaryCtxRelease", 0, version=11000)
result = misused()
"""
    assert ask(fake_driver, body, version=13010) == [
        "context_destroyed_before_its_streams",
        "context_destroyed_twice",
        "primary_released_too_often",
        "stream_destroyed_twice",
    ]


def test_a_forked_child_of_an_initialised_process_has_no_driver(fake_driver: FakeDriver):
    body = """
import os
get, init = (ctypes.CFUNCTYPE(ctypes.c_int)(find(name, 2000)[2]) for name in ("cuDeviceGetCount", "cuInit"))
receive, send = os.pipe()
if os.fork() == 0:
    statuses = [get(ctypes.byref(ctypes.c_int())), init(0)]
    os.write(send, json.dumps([statuses, misused()]).encode())
    os._exit(0)
os.close(send)
result = [json.loads(os.read(receive, 1000)), init(0), misused()]
os.wait()
"""
    assert ask(fake_driver, body) == [[[3, 3], ["call_in_a_forked_child"]], 0, []]


def test_after_its_end_the_driver_answers_that_it_has_ended(fake_driver: FakeDriver):
    body = """
get = ctypes.CFUNCTYPE(ctypes.c_int)(find("cuDeviceGetCount", 2000)[2])
fake.mosaic_fake_end()
result = get(ctypes.byref(ctypes.c_int()))
"""
    assert ask(fake_driver, body) == 4


def test_what_is_left_at_exit_is_written_to_the_report(fake_driver: FakeDriver, tmp_path: Path):
    report = tmp_path / "report"
    body = """
_, context = green(describe(whole())[1])
stream(context)
call("cuGreenCtxDestroy", context)
result = True
"""
    ask(fake_driver, body, report=str(report))
    lines = ["green 0", "primary 0", "stream 1", "misused context_destroyed_before_its_streams 1"]
    assert report.read_text().splitlines() == lines
