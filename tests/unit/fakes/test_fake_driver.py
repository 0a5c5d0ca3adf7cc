"""The fake driver keeps to the rules that NVIDIA documents; asked directly, without ``mosaic._C``.

The examples are those of the CUDA programming guide (green contexts, table of splits on 132 SMs).
"""

from __future__ import annotations

import pytest
from fake_driver.asking import INVALID_CONFIGURATION, INVALID_TYPE, INVALID_VALUE, ask
from fake_driver.harness import FakeDriver


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
    ("device", "rule"),
    [("80:7.0", [2, 2]), ("108:8.0", [4, 2]), ("132:9.0", [8, 8]), ("148:10.0", [8, 8])],
)
def test_minimum_and_alignment_follow_the_compute_capability(fake_driver: FakeDriver, device: str, rule: list[int]):
    assert ask(fake_driver, "result = [whole().minimum, whole().alignment]", devices=device) == rule


def test_a_driver_before_13_0_leaves_minimum_and_alignment_at_zero(fake_driver: FakeDriver):
    body = "result = [whole().sm_count, whole().minimum, whole().alignment]"
    assert ask(fake_driver, body, version=12080) == [132, 0, 0]


@pytest.mark.parametrize(("flags", "possible"), [(0, 16), (1, 66)])
def test_a_dry_run_tells_how_many_groups_there_would_be(fake_driver: FakeDriver, flags: int, possible: int):
    body = f"""
made, source = ctypes.c_uint(0), whole()
status = call("cuDevSmResourceSplitByCount", None, ctypes.byref(made), ctypes.byref(source), None, {flags}, 1)
result = [status, made.value]
"""
    assert ask(fake_driver, body) == [0, possible]


def test_a_clean_split_leaves_an_invalid_remainder(fake_driver: FakeDriver):
    body = "_, results, remainder = split(16, 8)\nresult = [len(results), remainder.type, remainder.sm_count]"
    assert ask(fake_driver, body, devices="128:9.0") == [16, 0, 0]


@pytest.mark.parametrize("which", ["results[0]", "remainder"])
def test_an_output_of_a_split_cannot_be_split_again(fake_driver: FakeDriver, which: str):
    body = f"_, results, remainder = split(2, 64)\nresult = split(2, 8, source={which})[0]"
    assert ask(fake_driver, body) == INVALID_CONFIGURATION


def test_a_split_may_go_on_through_a_green_context(fake_driver: FakeDriver):
    body = """
_, results, remainder = split(1, 80)
_, context = green(describe(remainder)[1])
inner = Resource()
call("cuGreenCtxGetDevResource", context, ctypes.byref(inner), 1)
status, groups, rest = split(1, 48, source=inner)
result = [status, inner.sm_count, groups[0].sm_count, rest.sm_count]
"""
    assert ask(fake_driver, body) == [0, 52, 48, 4]


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ("1, 133", INVALID_VALUE),
        ("1, 8, 4", INVALID_VALUE),
        ("1, 130", INVALID_CONFIGURATION),
        ("1, 8, 0, Resource()", INVALID_TYPE),
    ],
)
def test_a_split_with_wrong_arguments_is_refused(fake_driver: FakeDriver, arguments: str, status: int):
    assert ask(fake_driver, f"result = split({arguments})[0]") == status


def test_outputs_that_were_not_zeroed_are_refused(fake_driver: FakeDriver):
    body = """
dirty = Resource(oversize=(1,))
result = call("cuDeviceGetDevResource", 0, ctypes.byref(dirty), 1)
"""
    assert ask(fake_driver, body) == INVALID_VALUE


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


CLUSTERS = "18,18,18,18,16,16,14,14"


@pytest.mark.parametrize(
    ("minimum", "flags", "made", "left"), [(8, 0, 14, 20), (16, 0, 7, 20), (40, 0, 2, 52), (2, 1, 66, 0)]
)
def test_clusters_make_fewer_groups_than_division(
    fake_driver: FakeDriver, minimum: int, flags: int, made: int, left: int
):
    body = f"""
dry, source = ctypes.c_uint(0), whole()
call("cuDevSmResourceSplitByCount", None, ctypes.byref(dry), ctypes.byref(source), None, {flags}, {minimum})
_, groups, rest = split(66, {minimum}, {flags})
result = [dry.value, len(groups), rest.sm_count]
"""
    assert ask(fake_driver, body, clusters=CLUSTERS) == [made, made, left]


def test_a_multiple_of_the_alignment_may_be_out_of_a_sized_splits_reach(fake_driver: FakeDriver):
    body = "result = [sized((size, 8))[0] for size in (112, 120, 128)] + sized((120, 2), (0, 2))[:2]"
    assert ask(fake_driver, body, clusters=CLUSTERS, version=13010) == [0, 915, 915, 0, [120, 12]]


def test_a_green_context_has_the_merged_sms(fake_driver: FakeDriver):
    body = """
_, groups, _ = split(16, 8)
status, context = green(describe(*groups[:10])[1])
granted = Resource()
call("cuGreenCtxGetDevResource", context, ctypes.byref(granted), 1)
result = [status, granted.sm_count]
"""
    assert ask(fake_driver, body) == [0, 80]


@pytest.mark.parametrize(("version", "status"), [(13020, INVALID_VALUE), (13030, 0)])
def test_the_default_stream_flag_is_required_before_13_3(fake_driver: FakeDriver, version: int, status: int):
    body = "result = green(describe(split(1, 8)[1][0])[1], flags=0)[0]"
    assert ask(fake_driver, body, version=version) == status


def test_a_green_stream_has_to_be_non_blocking(fake_driver: FakeDriver):
    body = "_, context = green(describe(whole())[1])\nresult = [stream(context, 0)[0], stream(context)[0]]"
    assert ask(fake_driver, body) == [INVALID_VALUE, 0]


@pytest.mark.parametrize(("version", "status", "leaked"), [(13000, 709, 1), (13010, 0, 0)])
def test_a_stream_destroyed_after_its_context_leaks_before_13_1(
    fake_driver: FakeDriver, version: int, status: int, leaked: int
):
    body = """
_, context = green(describe(whole())[1])
_, handle = stream(context)
call("cuGreenCtxDestroy", context)
late = call("cuStreamDestroy", handle)
result = [late, count("created", "stream") - count("destroyed", "stream")]
"""
    assert ask(fake_driver, body, version=version) == [status, leaked]


def test_a_green_context_retains_the_primary_context_and_is_destroyed_once(fake_driver: FakeDriver):
    body = """
_, context = green(describe(whole())[1])
before = [count("created", "primary"), count("destroyed", "primary")]
ends = [call("cuGreenCtxDestroy", context), call("cuGreenCtxDestroy", context)]
result = [before, ends, count("destroyed", "primary"), count("created", "green"), count("destroyed", "green")]
"""
    assert ask(fake_driver, body) == [[1, 0], [0, 709], 1, 1, 1]


@pytest.mark.parametrize(
    ("name", "version", "found"),
    [
        ("cuGreenCtxStreamCreate", 12050, [0, 0, True]),
        ("cuGreenCtxStreamCreate", 12040, [0, 2, False]),
        ("cuNoSuchFunction", 12040, [0, 1, False]),
        ("cuInit", 13010, [INVALID_VALUE, 0, False]),
    ],
)
def test_a_look_up_answers_by_the_version_asked_for(
    fake_driver: FakeDriver, name: str, version: int, found: list[object]
):
    body = f"""
status, found, address = find("{name}", {version})
result = [status, found, bool(address)]
"""
    assert ask(fake_driver, body) == found


def test_a_name_has_a_form_for_each_version_that_changed_it(fake_driver: FakeDriver):
    body = """
forms = [find("cuCtxPushCurrent", version)[2] for version in (2000, 3020, 4000, 12040, 14000)]
result = [forms[0] == forms[1] != forms[2] == forms[3] != forms[4], forms[0] == forms[4]]
ctypes.CFUNCTYPE(ctypes.c_int)(forms[0])(0)
result += [misused()]
"""
    assert ask(fake_driver, body, version=14000) == [True, True, ["form_of_another_version"]]


def test_a_look_up_of_per_thread_forms_is_told(fake_driver: FakeDriver):
    body = """
fake.cuGetProcAddress_v2(b"cuInit", ctypes.byref(ctypes.c_void_p()), 2000, ctypes.c_uint64(2), None)
result = misused()
"""
    assert ask(fake_driver, body) == ["per_thread_forms"]


def test_nothing_but_the_look_up_is_a_symbol_of_the_library(fake_driver: FakeDriver):
    assert ask(fake_driver, "result = [hasattr(fake, 'cuInit'), hasattr(fake, 'cuDeviceGet')]") == [False, False]


def test_a_call_before_cu_init_is_refused_and_an_injected_failure_hits_the_nth_call(fake_driver: FakeDriver):
    early = """
address = ctypes.c_void_p()
fake.cuGetProcAddress_v2(b"cuDeviceGet", ctypes.byref(address), 2000, ctypes.c_uint64(0), None)
device = ctypes.c_int()
get = ctypes.CFUNCTYPE(ctypes.c_int)(address.value)
result = [get(ctypes.byref(device), 0)]
"""
    assert fake_driver.run(early) == [3]
    body = "result = [call('cuDeviceGet', ctypes.byref(ctypes.c_int()), 0) for _ in range(3)]"
    assert ask(fake_driver, body, fail="cuDeviceGet@2=999") == [0, 999, 0]
