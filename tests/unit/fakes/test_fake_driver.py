"""The fake driver keeps to the rules that NVIDIA documents; asked directly, without ``mosaic._C``.

The examples of splits are those of the CUDA programming guide (green contexts, splits of 132 SMs) and of cuda.h.
Each row has a body, what it answers, and the driver's settings where they are not those of an H100 under CUDA 13.0.
"""

from __future__ import annotations

from typing import Any

import pytest
from fake_driver.asking import INVALID_CONFIGURATION, INVALID_TYPE, INVALID_VALUE, READY, ask
from fake_driver.harness import FakeDriver

CLUSTERS = "18,18,18,18,16,16,14,14"
DRY = """
def dry(flags, minimum):
    made, source = ctypes.c_uint(0), whole()
    status = call("cuDevSmResourceSplitByCount", None, ctypes.byref(made), ctypes.byref(source), None, flags, minimum)
    return [status, made.value]
"""


def rule(name: str, body: str, answer: Any, **settings: Any) -> Any:
    return pytest.param(body, answer, settings, id=name)


def one(name: str, expression: str, answer: Any, **settings: Any) -> Any:
    return rule(name, f"result = {expression}", answer, **settings)


@pytest.mark.parametrize(
    ("groups", "minimum", "flags", "made", "size", "left"),
    [(2, 72, 0, 1, 72, 60), (6, 11, 0, 6, 16, 36), (6, 11, 1, 6, 12, 60), (2, 1, 0, 2, 8, 116)],
)
def test_the_splits_printed_in_the_programming_guide_come_out_the_same(
    fake_driver: FakeDriver, groups: int, minimum: int, flags: int, made: int, size: int, left: int
):
    body = f"""
status, results, remainder = split({groups}, {minimum}, {flags})
result = [status, [one.sm_count for one in results], remainder.sm_count]
"""
    assert ask(fake_driver, body) == [0, [size] * made, left]


@pytest.mark.parametrize(
    ("body", "answer", "settings"),
    [
        *(
            one(f"minimum and alignment of {device}", "[whole().minimum, whole().alignment]", least, devices=device)
            for device, least in {"80:7.0": [2, 2], "108:8.0": [4, 2], "132:9.0": [8, 8], "148:10.0": [8, 8]}.items()
        ),
        one("neither before CUDA 13.0", "[whole().sm_count, whole().minimum]", [132, 0], version=12080),
        rule("a dry run tells how many groups", f"{DRY}result = [dry(0, 1), dry(1, 1)]", [[0, 16], [0, 66]]),
        rule(
            "a clean split leaves an invalid remainder",
            "_, results, rest = split(16, 8)\nresult = [len(results), rest.type, rest.sm_count]",
            [16, 0, 0],
            devices="128:9.0",
        ),
        rule(
            "an output of a split cannot be split again",
            "_, results, rest = split(2, 64)\nresult = [split(2, 8, source=each)[0] for each in (results[0], rest)]",
            [INVALID_CONFIGURATION] * 2,
        ),
        rule(
            "a split goes on through a green context",
            """
_, results, remainder = split(1, 80)
_, context = green(describe(remainder)[1])
inner = Resource()
call("cuGreenCtxGetDevResource", context, ctypes.byref(inner), 1)
status, groups, rest = split(1, 48, source=inner)
result = [status, inner.sm_count, groups[0].sm_count, rest.sm_count]
""",
            [0, 52, 48, 4],
        ),
        one(
            "wrong arguments of a split",
            "[split(*given)[0] for given in ((1, 133), (1, 8, 4), (1, 130), (1, 8, 0, Resource()))]",
            [INVALID_VALUE, INVALID_VALUE, INVALID_CONFIGURATION, INVALID_TYPE],
        ),
        rule(
            "outputs that were not zeroed",
            'dirty = Resource(oversize=(1,))\nresult = call("cuDeviceGetDevResource", 0, ctypes.byref(dirty), 1)',
            INVALID_VALUE,
        ),
        *(
            rule(
                f"clusters: groups of at least {minimum}, flags {flags}",
                f"{DRY}_, groups, rest = split(66, {minimum}, {flags})\n"
                f"result = [dry({flags}, {minimum})[1], len(groups), rest.sm_count]",
                [made, made, left],
                clusters=CLUSTERS,
            )
            for minimum, flags, made, left in [(8, 0, 14, 20), (16, 0, 7, 20), (40, 0, 2, 52), (2, 1, 66, 0)]
        ),
        one(
            "clusters: a multiple of the alignment may be out of a sized split's reach",
            "[sized((size, 8))[0] for size in (112, 120, 128)] + sized((120, 2), (0, 2))[:2]",
            [0, 915, 915, 0, [120, 12]],
            clusters=CLUSTERS,
            version=13010,
        ),
    ],
)
def test_splits(fake_driver: FakeDriver, body: str, answer: Any, settings: dict[str, Any]):
    assert ask(fake_driver, body, **settings) == answer


@pytest.mark.parametrize(
    ("resources", "status"),
    [
        ("first[0], first[1]", 0),
        ("first[0], rest", 0),
        ("first[2]", 0),
        ("whole()", 0),
        ("first[0], second[1]", INVALID_CONFIGURATION),
        ("first[0], first[0]", INVALID_CONFIGURATION),
        ("whole(), first[0]", INVALID_CONFIGURATION),
        ("Resource()", INVALID_TYPE),
    ],
)
def test_a_descriptor_merges_only_different_outputs_of_one_split(fake_driver: FakeDriver, resources: str, status: int):
    body = f"_, first, rest = split(4, 8)\n_, second, _ = split(4, 8)\nresult = describe({resources})[0]"
    assert ask(fake_driver, body) == status


@pytest.mark.parametrize(
    ("version", "status", "alignments"), [(13000, 0, [8, 8]), (13010, INVALID_CONFIGURATION, [8, 2])]
)
def test_what_a_split_leaves_over_joins_its_groups_only_before_13_1(
    fake_driver: FakeDriver, version: int, status: int, alignments: list[int]
):
    body = """
_, groups, rest = split(16, 8)
result = [describe(groups[0], rest)[0], describe(rest)[0], [groups[0].alignment, rest.alignment]]
"""
    assert ask(fake_driver, body, version=version) == [status, 0, alignments]


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
    assert ask(fake_driver, f"result = sized({wanted})", version=13010) == [0, sizes, sizes, left]


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


def test_a_sized_split_without_results_only_discovers_and_comes_with_13_1(fake_driver: FakeDriver):
    body = "result = sized((0, 8), (0, 8), results=False)"
    assert ask(fake_driver, body, version=13010) == [0, [128, 0], [], 4]
    found = [
        ask(fake_driver, f"result = bool(find('cuDevSmResourceSplit', {version})[2])", version=version)
        for version in (13000, 13010)
    ]
    assert found == [False, True]


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
