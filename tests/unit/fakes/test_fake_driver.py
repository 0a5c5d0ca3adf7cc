"""The fake driver keeps to the rules that NVIDIA documents of contexts, streams, functions and work; asked directly.

Each row has a body, what it answers, and the driver's settings where they are not those of an H100 under CUDA 13.0.
"""

from __future__ import annotations

from typing import Any

import pytest
from fake_driver.asking import INVALID_VALUE, READY, ask, one, rule
from fake_driver.harness import FakeDriver

WHOLE = "_, context = green(describe(whole())[1])\n"
DEFAULT = "green(describe(split(1, 8)[1][0])[1], flags=0)[0]"
LATE = f"""{WHOLE}_, handle = stream(context)
call("cuGreenCtxDestroy", context)
late = call("cuStreamDestroy", handle)
result = [late, count("created", "stream") - count("destroyed", "stream")]
"""
DETACHED = f"""{READY}
_, context = green(describe(groups[2])[1])
_, handle = stream(context)
call("cuGreenCtxDestroy", context)
given = [wait(handle), clear(memory, handle), launch(kernel, memory, 8, handle)]
result = [given, call("cuStreamDestroy", handle)]
"""


@pytest.mark.parametrize(
    ("body", "answer", "settings"),
    [
        rule(
            "a green context has the merged SMs",
            """
_, groups, _ = split(16, 8)
status, context = green(describe(*groups[:10])[1])
granted = Resource()
call("cuGreenCtxGetDevResource", context, ctypes.byref(granted), 1)
result = [status, granted.sm_count]
""",
            [0, 80],
        ),
        one("the default-stream flag is required before 13.3", DEFAULT, INVALID_VALUE, version=13020),
        one("the default-stream flag is not required since", DEFAULT, 0, version=13030),
        rule("a green stream is non-blocking", f"{WHOLE}result = [stream(context, 0)[0], stream(context)[0]]", [1, 0]),
        rule("a stream that outlives its context leaks before 13.1", LATE, [709, 1], version=13000),
        rule("a stream that outlives its context is destroyed since", LATE, [0, 0], version=13010),
        rule("a stream of a dead context takes no work", DETACHED, [[709] * 3, 709], version=13000),
        rule("a detached stream takes no work and is destroyed", DETACHED, [[917] * 3, 0], version=13010),
        rule(
            "a green context retains the primary context and is destroyed once",
            f"""{WHOLE}before = [count("created", "primary"), count("destroyed", "primary")]
ends = [call("cuGreenCtxDestroy", context), call("cuGreenCtxDestroy", context)]
result = [before, ends, count("destroyed", "primary"), count("created", "green"), count("destroyed", "green")]
""",
            [[1, 0], [0, 709], 1, 1, 1],
        ),
        rule(
            "contexts and streams take memory and give it back",
            """
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
""",
            [3 * 2**20 + 2**16, 0],
        ),
        rule(
            "wrong ends are counted as misuse",
            f"""{WHOLE}_, handle = stream(context)
call("cuGreenCtxDestroy", context), call("cuGreenCtxDestroy", context)
call("cuStreamDestroy", handle), call("cuStreamDestroy", handle)
call("cuDevicePrimaryCtxRelease", 0, version=11000)
result = misused()
""",
            [
                *("context_destroyed_before_its_streams", "context_destroyed_twice"),
                *("primary_released_too_often", "stream_destroyed_twice"),
            ],
            version=13010,
        ),
    ],
)
def test_contexts_and_streams(fake_driver: FakeDriver, body: str, answer: Any, settings: dict[str, Any]):
    assert ask(fake_driver, body, **settings) == answer


FOUND = "[(status, found, bool(address)) for status, found, address in [find({name!r}, {version})]][0]"


@pytest.mark.parametrize(
    ("body", "answer", "settings"),
    [
        *(
            one(f"{name} of {version}", FOUND.format(name=name, version=version), answer)
            for name, version, answer in [
                ("cuGreenCtxStreamCreate", 12050, [0, 0, True]),
                ("cuGreenCtxStreamCreate", 12040, [0, 2, False]),
                ("cuNoSuchFunction", 12040, [0, 1, False]),
                ("cuInit", 13010, [INVALID_VALUE, 0, False]),
            ]
        ),
        rule(
            "a name has a form for each version that changed it",
            """
forms = [find("cuCtxPushCurrent", version)[2] for version in (2000, 3020, 4000, 12040, 14000)]
result = [forms[0] == forms[1] != forms[2] == forms[3] != forms[4], forms[0] == forms[4]]
ctypes.CFUNCTYPE(ctypes.c_int)(forms[0])(0)
result += [misused()]
""",
            [True, True, ["form_of_another_version"]],
            version=14000,
        ),
        rule(
            "per-thread forms are told",
            """
fake.cuGetProcAddress_v2(b"cuInit", ctypes.byref(ctypes.c_void_p()), 2000, ctypes.c_uint64(2), None)
result = misused()
""",
            ["per_thread_forms"],
        ),
    ],
)
def test_functions_are_looked_up(fake_driver: FakeDriver, body: str, answer: Any, settings: dict[str, Any]):
    assert ask(fake_driver, body, **settings) == answer


WORDS = f"""{READY}
def seen(waits_for=one, **grid):
    clear(memory, one), launch(kernel, memory, 8, one, **grid), copy(words, memory, one)
    before = sms_in(words)
    wait(waits_for)
    return [before, sms_in(words)]
"""


@pytest.mark.parametrize(
    ("body", "answer", "settings"),
    [
        rule(
            "current contexts are a stack, and work needs one",
            """
without = allocate(4)[0]
context = primary()
result = [without, push(context), allocate(4)[0], pop(), allocate(4)[0], pop(), misused()]
""",
            [201, 0, 0, 0, 201, 201, ["popped_too_often"]],
        ),
        rule(
            "a kernel writes the SMs of its stream's context",
            f"""{READY}
_, handle = stream(green(describe(groups[1], groups[4])[1])[1])
given = [clear(memory, handle), launch(kernel, memory, 8, handle), copy(words, memory, handle), wait(handle)]
too_large = launch(kernel, memory, 8, handle, threads=2048)
call("cuLibraryUnload", library, version=12000)
result = [given, sms_in(words), too_large, launch(kernel, memory, 8, handle), load(b"none")[0]]
""",
            [[0, 0, 0, 0], [*range(8, 16), *range(32, 40)], INVALID_VALUE, 400, 500],
        ),
        rule("work is done when its stream is waited for", f"{WORDS}result = seen()", [[], list(range(8))]),
        *(
            rule(f"work is not done when {stream} is", f"{WORDS}result = seen({stream}) + [wait(one)]", [[], [], 0])
            for stream in ("other", "None")
        ),
        *(
            rule(f"a grid of {grid} reaches {number} SMs", f"{WORDS}result = len(seen({grid})[1])", number)
            for grid, number in {"blocks=16": 8, "blocks=8": 4, "threads=128, blocks=32": 2, "spin_ns=0": 1}.items()
        ),
        rule(
            "a thread's stack may start with torch's primary context",
            """
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
""",
            [True, True],
            devices="132:9.0,132:9.0",
            current=1,
        ),
        rule(
            "an error that leaves the process inconsistent is returned by all that follows",
            f"""{READY}
fake.mosaic_fake_fail_nth(b"cuStreamSynchronize", 700, 1)
result = [wait(one), wait(other), clear(memory, None), pop(), allocate(4)[0]]
""",
            [700] * 5,
        ),
    ],
)
def test_work(fake_driver: FakeDriver, body: str, answer: Any, settings: dict[str, Any]):
    assert ask(fake_driver, body, **settings) == answer


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
