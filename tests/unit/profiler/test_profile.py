import math
import warnings
from dataclasses import replace

import pytest

from mosaic import artifact
from mosaic.device import Device
from mosaic.errors import InvalidFileError, InvalidProfileError
from mosaic.graph import ModuleGraph, ModuleNode
from mosaic.profile import (
    Environment,
    GroupMember,
    GroupSample,
    HeldOutError,
    ModuleStructure,
    PairSample,
    Phase,
    Profile,
    Sample,
)

DEVICE = Device(name="two cores", kind="host", num_slots=2)
GRAPH = ModuleGraph(modules=(ModuleNode(name="image"), ModuleNode(name="text")))
HERE = Environment(torch_version="2.13.0", python_version="3.11", created="2026-01-01T00:00:00", foreign_cpu_share=0.0)


def sample(module="image", quota=1, times=(1.0, 2.0, 4.0), phase=Phase.FORWARD):
    return Sample(module=module, phase=phase, quota=quota, times_ms=times)


def profile(*samples, pairs=()):
    return Profile(device=DEVICE, graph=GRAPH, samples=samples, pairs=pairs, environment=HERE)


def test_a_profile_survives_its_file(tmp_path):
    made = profile(sample(), sample(quota=2), sample(phase=Phase.BACKWARD))
    artifact.save(made, tmp_path / "profile.json")
    assert artifact.load(Profile, tmp_path / "profile.json") == made


def test_medians_and_quartiles_come_from_the_raw_times():
    assert sample().median_ms == 2.0
    assert sample().quartiles_ms == (1.5, 3.0)
    assert sample(times=(3.0,)).quartiles_ms == (3.0, 3.0)


@pytest.mark.parametrize("time", [math.nan, math.inf, -0.1])
def test_an_impossible_time_is_refused(time):
    with pytest.raises(InvalidProfileError, match="finite and not negative"):
        sample(times=(1.0, time))


def test_a_sample_without_measurements_is_refused():
    with pytest.raises(InvalidProfileError, match="no measurements"):
        sample(times=())


def test_two_samples_of_one_point_are_refused():
    with pytest.raises(InvalidProfileError, match="two samples for 'image'"):
        profile(sample(), sample())


def test_a_sample_of_an_unknown_module_is_refused():
    with pytest.raises(InvalidProfileError, match="'audio', not in its graph"):
        profile(sample("audio"))


def test_a_sample_with_more_slots_than_the_device_is_refused():
    with pytest.raises(InvalidProfileError, match="3 slots; two cores has 2"):
        profile(sample(quota=3))


def test_nan_in_a_file_is_refused():
    text = artifact.to_json(profile(sample())).replace("4.0", "NaN")
    with pytest.raises((InvalidFileError, InvalidProfileError), match=r"profile\.json"):
        artifact.parse(Profile, text, source="profile.json")


def test_a_profile_of_another_device_or_graph_is_refused():
    other = Device(name="eight cores", kind="host", num_slots=8)
    made = profile(sample())
    with pytest.raises(InvalidProfileError, match="profile again on this device"):
        made.check_matches(graph=GRAPH, device=other)
    with pytest.raises(InvalidProfileError, match="profile this model again"):
        made.check_matches(graph=ModuleGraph(modules=(ModuleNode(name="image"),)), device=DEVICE)


def test_slowdown_is_the_ratio_of_medians():
    pair = PairSample(
        module="image",
        beside="text",
        phase=Phase.FORWARD,
        quota=1,
        beside_quota=1,
        times_ms=(3.0, 3.0, 9.0),
        alone_ms=(2.0,),
    )
    assert pair.slowdown == 1.5


def test_a_pair_with_an_unknown_module_is_refused():
    pair = PairSample(
        module="image", beside="audio", phase=Phase.FORWARD, quota=1, beside_quota=1, times_ms=(1.0,), alone_ms=(1.0,)
    )
    with pytest.raises(InvalidProfileError, match="'audio'"):
        profile(sample(), pairs=(pair,))


def test_samples_are_given_by_rising_quota():
    made = profile(sample(quota=2), sample(quota=1), sample("text"))
    assert [found.quota for found in made.samples_of("image", Phase.FORWARD)] == [1, 2]


def member(module="image", quota=1, times=(3.0,), alone=(2.0,)):
    return GroupMember(module=module, phase=Phase.FORWARD, quota=quota, times_ms=times, alone_ms=alone)


def full_profile():
    made = profile(
        replace(sample(), bandwidth_utilisation=0.25, sm_occupancy=1.0, source="composed"),
        Sample(module="image", phase=Phase.FORWARD, quota=2, infeasible="OutOfMemoryError: tried 3 GiB"),
    )
    return replace(
        made,
        groups=(GroupSample(members=(member(), member("text"))),),
        held_out=(
            HeldOutError(subject="image", phase=Phase.FORWARD, form="smooth", median=0.01, largest=0.1, count=8),
        ),
        structures=(ModuleStructure(module="image", digest="a1"),),
        environment=replace(HERE, driver="580.95.05", sm_clock_mhz=1980, memory_clock_mhz=3201),
    )


def test_everything_that_a_profile_can_hold_survives_its_file(tmp_path):
    made = full_profile()
    artifact.save(made, tmp_path / "profile.json")
    assert artifact.load(Profile, tmp_path / "profile.json") == made


def test_a_file_of_the_first_schema_is_refused_with_the_way_out():
    text = artifact.to_json(profile(sample())).replace('"schema_version": 2', '"schema_version": 1')
    with pytest.raises(InvalidFileError, match=r"schema_version=1 is not 2; .*: make the file again"):
        artifact.parse(Profile, text, source="profile.json")


def test_an_infeasible_sample_has_a_reason_and_no_times():
    failed = Sample(module="image", phase=Phase.FORWARD, quota=1, infeasible="OutOfMemoryError: tried 3 GiB")
    with pytest.raises(InvalidProfileError, match="no time at 1 slots: OutOfMemoryError: tried 3 GiB"):
        _ = failed.median_ms
    for wrong in ({"infeasible": "x", "times_ms": (1.0,)}, {"infeasible": ""}):
        with pytest.raises(InvalidProfileError, match="a reason and no times"):
            Sample(module="image", phase=Phase.FORWARD, quota=1, **wrong)


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
def test_a_utilisation_that_is_no_share_is_refused(share):
    with pytest.raises(InvalidProfileError, match="a share between 0 and 1"):
        replace(sample(), bandwidth_utilisation=share)
    with pytest.raises(InvalidProfileError, match="a share between 0 and 1"):
        replace(sample(), sm_occupancy=share)


@pytest.mark.parametrize("times", [(), (math.nan,), (-1.0,)])
def test_impossible_times_in_a_group_are_refused(times):
    with pytest.raises(InvalidProfileError, match="group member 'image'"):
        member(times=times)
    with pytest.raises(InvalidProfileError, match="group member 'image'"):
        member(alone=times)


@pytest.mark.parametrize("names", [(), ("image",), ("image", "image")])
def test_a_group_takes_two_modules_or_more_once_each(names):
    with pytest.raises(InvalidProfileError, match="two or more modules, once each"):
        GroupSample(members=tuple(member(name) for name in names))


def test_a_group_that_does_not_fit_its_profile_is_refused():
    wide = GroupSample(members=(member(quota=2), member("text")))
    with pytest.raises(InvalidProfileError, match=r"2 \+ 1 slots; two cores has 2"):
        replace(profile(sample()), groups=(wide,))
    with pytest.raises(InvalidProfileError, match="'audio', not in its graph"):
        replace(profile(sample()), groups=(GroupSample(members=(member(), member("audio"))),))


def test_slowdown_of_a_member_is_the_ratio_of_medians():
    assert member(times=(3.0, 9.0, 3.0), alone=(2.0,)).slowdown == 1.5
    assert member(alone=(0.0,)).slowdown == 1.0


@pytest.mark.parametrize("field", ["driver", "driver_version", "torch_version"])
def test_another_driver_or_torch_warns_and_goes_on(field):
    made = replace(profile(sample()), environment=replace(HERE, **{field: "1.0"}))
    with pytest.warns(UserWarning, match=f"measured with {field}=1.0, this is 2.0"):
        made.check_matches(graph=GRAPH, device=DEVICE, environment=replace(HERE, **{field: "2.0"}))


def test_versions_that_are_equal_or_unknown_do_not_warn():
    made = replace(profile(sample()), environment=replace(HERE, driver="580.95.05"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.check_matches(graph=GRAPH, device=DEVICE, environment=HERE)
        made.check_matches(graph=GRAPH, device=DEVICE)


def test_a_module_that_was_rebuilt_since_the_profile_is_refused_by_name():
    now = [ModuleStructure(module="image", digest="b2"), ModuleStructure(module="text", digest="c3")]
    with pytest.raises(InvalidProfileError, match="image changed since the profile; profile this model again"):
        full_profile().check_matches(graph=GRAPH, device=DEVICE, structures=now)
