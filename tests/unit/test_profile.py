import math

import pytest

from mosaic import artifact
from mosaic.device import Device
from mosaic.errors import InvalidFileError, InvalidProfileError
from mosaic.graph import ModuleGraph, ModuleNode
from mosaic.profile import Environment, PairSample, Phase, Profile, Sample

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
