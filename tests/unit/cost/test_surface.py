"""Scaling surfaces: exact at samples, shaped like the data, never extrapolated."""

from __future__ import annotations

import pytest
from planning_cases import sample

from mosaic.cost import ScalingSurface
from mosaic.profile import Phase, Sample


@pytest.mark.parametrize(
    ("law", "sampled"),
    [
        (lambda q: 24 / q, (1, 4, 16)),
        (lambda q: 3.0, (16, 1, 4)),
        (lambda q: 2 + 24 / q, (1, 16)),
        (lambda q: max(4.0, 24 / q), (1, 6, 16)),
        (lambda q: 7.0, (3,)),
    ],
    ids=["perfect scaling", "launch-bound, unsorted", "a floor and scaling", "a roofline with its corner", "one point"],
)
def test_a_surface_is_exact_between_the_samples_of_a_simple_law(law, sampled: tuple[int, ...]) -> None:
    surface = ScalingSurface([sample(quota, law(quota)) for quota in sampled])
    quotas = range(min(sampled), max(sampled) + 1)
    assert surface.quotas(1) == tuple(quotas)
    assert [surface.time_ms(1, quota) for quota in quotas] == pytest.approx([law(quota) for quota in quotas])


@pytest.mark.parametrize(
    ("degree", "quota", "says"),
    [
        (1, 8, r"quota of 8 slots is outside the sampled quotas 2, 4 .*profile more"),
        (1, 1, "quota of 1 slots"),
        (8, 2, "degree 8 is outside the sampled degrees 1, 4; profile it"),
        (3, 4, "of degree 4"),
    ],
)
def test_nothing_is_extrapolated(degree: int, quota: int, says: str) -> None:
    surface = ScalingSurface([sample(2, 4.0), sample(4, 2.0), sample(2, 2.0, degree=4)])
    with pytest.raises(ValueError, match=says):
        surface.time_ms(degree, quota)


def failed(quota: int, *, degree: int = 1) -> Sample:
    return Sample(module="m", phase=Phase.FORWARD, quota=quota, degree=degree, infeasible="OutOfMemoryError: 3 GiB")


def test_where_a_module_cannot_run_the_reason_is_given_and_the_rest_goes_on() -> None:
    surface = ScalingSurface([failed(1), sample(4, 4.0), sample(8, 2.0)])
    assert surface.quotas(1) == (4, 5, 6, 7, 8)
    assert surface.time_ms(1, 8) == 2.0
    for quota in (1, 3):
        with pytest.raises(ValueError, match=f"cannot run at degree 1, quota {quota}: OutOfMemoryError: 3 GiB"):
            surface.time_ms(1, quota)
