"""Where to measure next, and errors at samples that were left out."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence

import pytest
from planning_cases import sample

from mosaic.cost import ScalingSurface
from mosaic.cost.surfaces.sampling import held_out_errors, next_sample
from mosaic.errors import InvalidProfileError
from mosaic.profile import Phase, Sample

Law = Callable[[int], float]

LAWS: dict[str, Law] = {
    "launch-bound": lambda q: max(4.0, 12 / q) + 0.05,
    "compute-bound in waves": lambda q: 0.1 + 0.05 * math.ceil(900 / (8 * q)),
    "memory-saturating": lambda q: 20 / min(q, 7) + 0.05,
    "softly saturating": lambda q: ((20 / q) ** 4 + 2.5**4) ** 0.25,
    "Amdahl": lambda q: 1 + 20 / q,
}
QUOTAS = range(2, 17)
TENTHS = (2, 3, 5, 6, 8, 10, 11, 13, 14, 16)
"""The paper's grid on sixteen slots."""
A_THIRD = 4
BOUND = 0.03


def failed(quota: int) -> Sample:
    return Sample(module="m", phase=Phase.FORWARD, quota=quota, infeasible="OutOfMemoryError")


def measured(law: Law, quota: int, noise: float = 0.0, seed: int = 0) -> Sample:
    dice = random.Random(seed * 1000 + quota)
    return sample(quota, *(law(quota) * math.exp(dice.gauss(0, noise)) for _ in range(5)))


def sampled(law: Law, *, most: int, noise: float = 0.0, seed: int = 0) -> list[Sample]:
    found: list[Sample] = []
    while len(found) < most:
        quota = next_sample(found, QUOTAS, bound=BOUND)
        if quota is None:
            break
        found.append(measured(law, quota, noise, seed))
    return found


def errors(samples: Sequence[Sample], law: Law) -> list[float]:
    surface = ScalingSurface(samples)
    return [abs(surface.time_ms(1, quota) / law(quota) - 1) for quota in QUOTAS]


@pytest.mark.parametrize("kind", LAWS)
def test_a_third_of_the_paper_s_grid_comes_as_close_as_the_whole_of_it(kind: str) -> None:
    law = LAWS[kind]
    few, tenths = [], []
    for seed in range(10):
        found = sampled(law, most=A_THIRD, noise=0.02, seed=seed)
        assert len(found) <= A_THIRD
        few.append(errors(found, law))
        tenths.append(errors([measured(law, quota, 0.02, seed) for quota in TENTHS], law))
    mean_few, mean_tenths = (statistics.mean(map(statistics.mean, runs)) for runs in (few, tenths))
    worst_few, worst_tenths = (statistics.mean(map(max, runs)) for runs in (few, tenths))
    assert mean_few <= mean_tenths + BOUND / 2
    assert worst_few <= worst_tenths + BOUND


@pytest.mark.parametrize(("kind", "most"), [("launch-bound", 3), ("memory-saturating", 4), ("Amdahl", 5)])
def test_sampling_stops_by_itself_once_little_is_open(kind: str, most: int) -> None:
    found = sampled(LAWS[kind], most=99)
    assert len(found) <= most
    assert max(errors(found, LAWS[kind])) < BOUND


@pytest.mark.parametrize("kind", LAWS)
def test_a_tighter_bound_never_takes_fewer_samples(kind: str) -> None:
    counts = []
    for bound in (0.2, 0.05, 0.01):
        found: list[Sample] = []
        while (quota := next_sample(found, QUOTAS, bound=bound)) is not None:
            found.append(measured(LAWS[kind], quota))
        counts.append(len(found))
    assert counts == sorted(counts)


def test_the_ends_come_first_the_whole_device_before_the_least() -> None:
    assert next_sample([], [2, 4, 8], bound=0.1) == 8
    assert next_sample([sample(8, 1.0)], [2, 4, 8], bound=0.1) == 2
    assert next_sample([sample(8, 1.0), sample(2, 1.0)], [2, 4, 8], bound=0.1) is None


def test_one_candidate_is_measured_once() -> None:
    assert next_sample([], [8], bound=0.1) == 8
    assert next_sample([sample(8, 1.0)], [8], bound=0.1) is None


def test_a_failure_at_the_least_quota_is_closed_in_by_halves() -> None:
    found = [sample(16, 1.0), failed(1)]
    asked = []
    while (quota := next_sample(found, range(1, 17), bound=0.1)) is not None:
        asked.append(quota)
        found.append(sample(quota, 16 / quota) if quota >= 5 else failed(quota))
    assert {4, 5} <= set(asked)
    assert len(asked) <= 5
    assert ScalingSurface(found).quotas(1)[0] == 5


def test_a_module_that_runs_nowhere_is_given_up_after_three_tries() -> None:
    found: list[Sample] = []
    while (quota := next_sample(found, range(1, 17), bound=0.1)) is not None:
        found.append(failed(quota))
    assert len(found) == 3


@pytest.mark.parametrize(("candidates", "bound"), [([], 0.1), ([1], 0.0), ([1], math.nan)])
def test_no_candidates_or_no_bound_is_refused(candidates: list[int], bound: float) -> None:
    with pytest.raises(ValueError, match="at least one candidate and a positive bound"):
        next_sample([], candidates, bound=bound)


def test_held_out_errors_are_zero_where_the_law_is_that_of_the_surface() -> None:
    found = held_out_errors([sample(q, 2 + 24 / q, degree=d) for q in (1, 4, 8, 16) for d in (1, 2)])
    assert found is not None
    assert (found.subject, found.phase, found.form, found.count) == ("m", Phase.FORWARD, "smooth", 4)
    assert found.largest == pytest.approx(0, abs=1e-9)


def test_held_out_errors_name_the_largest_and_the_median() -> None:
    found = held_out_errors([sample(1, 8.0), sample(2, 4.0), sample(4, 3.0), sample(8, 1.0)])
    assert found is not None
    # Without the sample at 4 slots scaling from 2 to 8 looks perfect: 2 ms there; without that at 2, less than 8 / 2.
    assert found.largest == pytest.approx(1 / 3)
    assert 0 < found.median < found.largest


def test_two_samples_hold_nothing_out() -> None:
    assert held_out_errors([sample(1, 2.0), sample(2, 1.0), failed(4)]) is None


def test_held_out_errors_of_two_modules_at_once_are_refused() -> None:
    with pytest.raises(InvalidProfileError, match="one module and phase"):
        held_out_errors([sample(1, 1.0), sample(1, 1.0, module="n")])
