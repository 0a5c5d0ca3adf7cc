import math
from dataclasses import replace

import pytest

from mosaic.device import Device
from mosaic.errors import InvalidProfileError
from mosaic.graph import ModuleGraph, ModuleNode
from mosaic.profile import (
    Environment,
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


def pair(beside="text", times=(3.0, 3.0, 9.0), alone=(2.0,)):
    return PairSample(
        module="image", beside=beside, phase=Phase.FORWARD, quota=1, beside_quota=1, times_ms=times, alone_ms=alone
    )


def profile(*samples, pairs=()):
    return Profile(device=DEVICE, graph=GRAPH, samples=samples, pairs=pairs, environment=HERE)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        *(
            (lambda time=time: sample(times=(1.0, time)), "finite and not negative")
            for time in (math.nan, math.inf, -0.1)
        ),
        (lambda: sample(times=()), "use one or more"),
        (lambda: profile(sample(), sample()), "two samples for 'image'"),
        (lambda: profile(sample("audio")), "the profile has 'audio', which its graph lacks"),
        (lambda: profile(sample(quota=3)), "3 slots of two cores with 2 slots"),
        (lambda: profile(sample(), pairs=(pair("audio"),)), "'audio'"),
        *(
            (lambda which=which, times=times: pair(**{which: times}), "pair 'image' beside 'text'")
            for which in ("times", "alone")
            for times in ((), (math.nan,), (-1.0,))
        ),
    ],
)
def test_numbers_and_names_that_cannot_be_are_refused(make, said):
    with pytest.raises(InvalidProfileError, match=said):
        make()


@pytest.mark.parametrize("field", ["driver", "driver_version", "torch_version"])
def test_another_driver_or_torch_warns_and_goes_on(field):
    measured = replace(profile(sample()), environment=replace(HERE, **{field: "1.0"}))
    with pytest.warns(UserWarning, match=f"has {field}=1.0, this machine 2.0"):
        measured.check_matches(graph=GRAPH, device=DEVICE, environment=replace(HERE, **{field: "2.0"}), structures={})


def test_a_module_that_was_rebuilt_since_the_profile_is_refused_by_name():
    measured = replace(profile(sample()), structures={"image": "a1"})
    now = {"image": "b2", "text": "c3"}
    with pytest.raises(InvalidProfileError, match="image changed since the profile; profile this model again"):
        measured.check_matches(graph=GRAPH, device=DEVICE, environment=HERE, structures=now)
