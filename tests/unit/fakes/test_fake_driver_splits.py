"""The fake driver splits a device as NVIDIA documents it; asked directly, without ``mosaic._C``.

The examples of splits are those of the CUDA programming guide (green contexts, splits of 132 SMs) and of cuda.h.
Each row has a body, what it answers, and the driver's settings where they are not those of an H100 under CUDA 13.0.
"""

from __future__ import annotations

from typing import Any

import pytest
from fake_driver.asking import INVALID_CONFIGURATION, INVALID_TYPE, INVALID_VALUE, ask, one, rule
from fake_driver.harness import FakeDriver

CLUSTERS = "18,18,18,18,16,16,14,14"
DRY = """
def dry(flags, minimum):
    made, source = ctypes.c_uint(0), whole()
    status = call("cuDevSmResourceSplitByCount", None, ctypes.byref(made), ctypes.byref(source), None, flags, minimum)
    return [status, made.value]
"""


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
