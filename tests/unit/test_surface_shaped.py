"""Surfaces in the shape of a module's operators: what few samples tell, and what the shape may not do."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from functools import cache

import pytest
from planning_cases import profile_of, sample

from mosaic.artifact import load, save
from mosaic.cost import CostModel, ScalingSurface, ShapedSurface, ShapePosterior, held_out_errors, next_shaped_sample
from mosaic.cost.counts import Gemm, MemoryCounts, ModuleCounts, Operator, OperatorKind, PhaseCounts
from mosaic.cost.roofline import phase_ms
from mosaic.cost.surfaces.shape_prior import shape_of
from mosaic.cost.surfaces.shaped import shaped_without
from mosaic.errors import InvalidProfileError
from mosaic.hardware import Hardware, find_hardware
from mosaic.profile import Phase, Profile, Sample
from mosaic.shape import ModuleShape, ShapeCurve

F, B = Phase.FORWARD, Phase.BACKWARD
H100 = find_hardware("h100-80g")
SLOTS = range(1, 17)


def operators(scale: int) -> PhaseCounts:
    size = 768
    rows = 1024 * scale
    gemm = Gemm(m=rows, n=size, k=size)
    product = Operator(
        name="mm",
        kind=OperatorKind.MATMUL,
        dtype="bfloat16",
        flops=2 * rows * size * size,
        read_bytes=2 * size * (rows + size),
        written_bytes=2 * rows * size,
        gemm=gemm,
        calls=8,
    )
    mapped = Operator(
        name="relu",
        kind=OperatorKind.MEMORY,
        dtype="bfloat16",
        flops=rows * size,
        read_bytes=2 * rows * size,
        written_bytes=2 * rows * size,
        calls=64,
    )
    return PhaseCounts(operators=(product, mapped))


def counts(degree: int = 1) -> ModuleCounts:
    memory = MemoryCounts(parameter_bytes=0)
    return ModuleCounts(forward=operators(8 // degree), backward=operators(16 // degree), memory=memory)


@cache
def shape() -> ModuleShape:
    found = shape_of("m", {1: counts(), 2: counts(2)}, H100, SLOTS)
    assert found is not None
    return found


def slower() -> Hardware:
    """The device as it turns out to be."""
    efficiency = dataclasses.replace(H100.efficiency, matmul=0.4, memory=0.55)
    return dataclasses.replace(H100, efficiency=efficiency, sm_gb_per_s=55.0, launch_us=6.0)


def taken(quota: int, phase: Phase, *, degree: int = 1, noise: float = 0.01) -> Sample:
    dice = random.Random(f"{quota} {phase} {degree}")
    true = phase_ms(counts(degree).phase(phase), slower(), quota * H100.sms_per_slot)
    times = [true * math.exp(dice.gauss(0, noise)) for _ in range(5)]
    return sample(quota, *times, phase=phase, degree=degree)


def both(*quotas: int, **options: float) -> list[Sample]:
    return [taken(quota, phase, **options) for quota in quotas for phase in Phase]  # type: ignore[arg-type]


def surface(samples: list[Sample], phase: Phase, of: ModuleShape | None) -> ShapedSurface:
    mine = [s for s in samples if s.phase is phase]
    return ShapedSurface(mine, shape=of, others=[s for s in samples if s.phase is not phase])


def mean_error(samples: list[Sample], of: ModuleShape | None) -> float:
    return statistics.fmean(
        abs(surface(samples, phase, of).time_ms(1, q) / taken(q, phase, noise=0).median_ms - 1)
        for phase in Phase
        for q in SLOTS
    )


def test_two_samples_and_the_operators_come_as_close_as_the_paper() -> None:
    assert mean_error(both(1, 16), shape()) < 0.0365
    assert mean_error(both(1, 16), shape()) < mean_error(both(1, 16), None) / 2


def test_at_a_sample_it_is_the_sample() -> None:
    samples = both(1, 4, 9, 16, noise=0)
    for each in samples:
        assert surface(samples, each.phase, shape()).time_ms(1, each.quota) == each.median_ms


def test_more_slots_never_take_longer_and_times_stay_between_the_samples() -> None:
    wavy = dataclasses.replace(
        shape(),
        curves=tuple(
            dataclasses.replace(c, log_ms=tuple(x + 0.2 * math.sin(i) for i, x in enumerate(c.log_ms)))
            for c in shape().curves
        ),
    )
    samples = both(2, 7, 16)
    times = [surface(samples, F, wavy).time_ms(1, q) for q in range(2, 17)]
    assert times == sorted(times, reverse=True)
    assert min(times) > 0


def test_nothing_is_extrapolated() -> None:
    with pytest.raises(ValueError, match="outside the sampled quotas"):
        surface(both(2, 16), F, shape()).time_ms(1, 1)


def test_a_shape_that_the_samples_refute_is_not_used() -> None:
    samples = [
        sample(q, 1.0 + (q == 1) * 0.001, phase=p) for q in (1, 8, 16) for p in Phase
    ]  # flat: no operator counts
    assert ShapePosterior(shape(), samples).is_refuted
    assert surface(samples, F, shape()).time_ms(1, 4) == ScalingSurface(samples[::2]).time_ms(1, 4)


def test_where_left_out_samples_say_so_the_plain_form_takes_over() -> None:
    law = [sample(q, 0.5 + 3 / q, phase=F) for q in (1, 2, 4, 8, 12, 16)]  # what the plain form is exact for
    plain, shaped = ScalingSurface(law), ShapedSurface(law, shape=shape())
    assert [shaped.time_ms(1, q) for q in SLOTS] == [plain.time_ms(1, q) for q in SLOTS]


def test_the_other_phase_and_degree_tell_of_this_one() -> None:
    alone = ShapePosterior(shape(), both(1, 16)[::2])
    with_backward = ShapePosterior(shape(), both(1, 16))
    with_degree = ShapePosterior(shape(), [*both(1, 16), *both(1, 4, 16, degree=2)])
    spreads = [max(one.spread(F, 1, q) for q in SLOTS) for one in (alone, with_backward, with_degree)]
    assert spreads == sorted(spreads, reverse=True)
    assert spreads[2] < spreads[0]


def test_spreads_cover_the_errors() -> None:
    posterior = ShapePosterior(shape(), both(1, 16))
    inside = [
        abs(math.log(posterior.ms(p, 1, q) / taken(q, p, noise=0).median_ms)) <= 2 * posterior.spread(p, 1, q) + 0.01
        for p in Phase
        for q in range(2, 16)
    ]
    assert statistics.fmean(inside) >= 0.9


def sampled(bound: float) -> list[Sample]:
    found: list[Sample] = []
    while (quota := next_shaped_sample(found, SLOTS, shape(), bound=bound)) is not None:
        found += both(quota)
    return found


def test_sampling_takes_the_ends_then_one_that_checks_and_stops() -> None:
    quotas = [s.quota for s in sampled(0.1)[::2]]
    assert quotas[:2] == [16, 1]
    assert len(quotas) == 3


def test_a_tighter_bound_takes_more_samples_and_errs_less() -> None:
    few, many = sampled(0.1), sampled(0.01)
    assert len(many) > len(few)
    assert mean_error(many, shape()) <= mean_error(few, shape())


def test_a_quota_that_failed_is_not_asked_for_again() -> None:
    found: list[Sample] = []
    asked = []
    while (quota := next_shaped_sample(found, SLOTS, shape(), bound=0.05)) is not None:
        asked.append(quota)
        if quota < 3:
            found += [Sample(module="m", phase=p, quota=quota, infeasible="out of memory") for p in Phase]
        else:
            found += both(quota)
    assert len(asked) == len(set(asked))
    assert len(asked) < 9


def test_held_out_errors_do_not_see_the_other_phase_of_what_is_left_out() -> None:
    samples = both(1, 4, 8, 16)
    seen: list[set[int]] = []
    make = shaped_without(shape(), [s for s in samples if s.phase is B])

    def noted(rest: object) -> ShapedSurface:
        made = make(rest)  # type: ignore[arg-type]
        seen.append({s.quota for s in rest})  # type: ignore[attr-defined]
        return made

    found = held_out_errors([s for s in samples if s.phase is F], form="shaped", make=noted)
    assert found is not None
    assert (found.form, found.count) == ("shaped", 2)
    assert found.largest < 0.1
    assert seen == [{1, 8, 16}, {1, 4, 16}]


def test_a_profile_keeps_shapes_and_its_cost_model_follows_them(tmp_path) -> None:
    bare = profile_of({"m": lambda d, q: 1.0}, num_slots=16)
    profile = dataclasses.replace(bare, samples=tuple(both(1, 16)), shapes=(shape(),))
    save(profile, tmp_path / "profile.json")
    read = load(Profile, tmp_path / "profile.json")
    assert read == profile
    follows, plain = CostModel.from_profile(read), CostModel.from_profile(read, surface="smooth")
    assert follows.time_ms("m", F, 1, 5) == surface(both(1, 16), F, shape()).time_ms(1, 5)
    assert follows.time_ms("m", F, 1, 5) != plain.time_ms("m", F, 1, 5)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"quotas": (2, 1)}, "use rising ones"),
        ({"quotas": ()}, "use rising ones"),
        ({"quotas": (1,)}, "one finite value for each of 1 quotas"),
        ({"curves": (ShapeCurve(phase="forward", degree=1, log_ms=(math.nan,) * 16, modes=()),)}, "finite"),
    ],
)
def test_a_broken_shape_is_refused(change: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidProfileError, match=says):
        dataclasses.replace(shape(), **change)  # type: ignore[arg-type]


def test_a_module_without_operators_has_no_shape() -> None:
    empty = ModuleCounts(forward=PhaseCounts(), backward=PhaseCounts(), memory=MemoryCounts(parameter_bytes=0))
    assert shape_of("m", {1: empty}, H100, SLOTS) is None
