"""Coefficients back from made-up groups, and what cannot be fitted."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace

import pytest
from planning_cases import sample

from bench.cost.fitting.fitted import InterferenceFit, fit_interference
from bench.cost.fitting.group import GroupMember, GroupSample
from mosaic.cost import Bandwidths, Eq8, LeveledBandwidth, Leveling, SharedBandwidth, Sharing
from mosaic.cost.interference import Interference
from mosaic.cost.interference.leveling import Demand
from mosaic.errors import InvalidProfileError
from mosaic.profile import Phase

F, B = Phase.FORWARD, Phase.BACKWARD
MODULES = "abcdefgh"
TRUE = Eq8(e1=0.3, e2=4.0, e3=12.0)


def share_of(module: str, quota: int) -> float:
    return min(1.0, (0.15 + 0.1 * MODULES.index(module)) * (0.4 + 0.6 * quota / 16))


def bandwidths() -> Bandwidths:
    return Bandwidths(
        replace(sample(q, 1.0, module=m, phase=phase), bandwidth_utilisation=share_of(m, q))
        for m in MODULES
        for q in range(1, 17)
        for phase in Phase
    )


def groups(
    law: Eq8 | Sharing | Leveling, sizes: list[int], *, noise_ms: float = 0.0, seed: int = 0, phase: Phase = F
) -> list[GroupSample]:
    """Groups of given sizes whose members take what a law says; each time alone is 10 to 30 ms."""
    dice = random.Random(seed)
    found = []
    for size in sizes:
        names = dice.sample(MODULES, size)
        cuts = sorted(dice.sample(range(1, 16), size - 1))
        quotas = [after - before for before, after in zip([0, *cuts], [*cuts, 16], strict=True)]
        shares = [share_of(name, quota) for name, quota in zip(names, quotas, strict=True)]
        members = []
        for name, quota, own in zip(names, quotas, shares, strict=True):
            alone = 10 + 20 * dice.random()
            if isinstance(law, Eq8):
                extra = law.as_written_ms(shares)
            elif isinstance(law, Sharing):
                extra = alone * law.extra_share(own, math.fsum(shares) - own)
            else:
                takers = {
                    n: law.taker(Demand(module=n, quota=q, share=s))
                    for n, q, s in zip(names, quotas, shares, strict=True)
                }
                extra = alone * law.extra_share(takers[name], [of for n, of in takers.items() if n != name])
            times = (alone + extra + dice.gauss(0, noise_ms),)
            members.append(GroupMember(module=name, phase=phase, quota=quota, times_ms=times, alone_ms=(alone,)))
        found.append(GroupSample(members=tuple(members)))
    return found


def fitted(found: list[GroupSample], form: str) -> InterferenceFit:
    return fit_interference(found, bandwidths(), form)


SIZES = [2] * 10 + [3] * 8 + [4] * 4


def mean_error(form: Interference, found: list[GroupSample]) -> float:
    """The figure of the paper's section 5.3.2, at groups that were not fitted."""
    errors = []
    for group in found:
        for member in group.members:
            beside = [(other.module, other.quota) for other in group.members if other is not member]
            extra = form.extra_ms(member.module, F, quota=member.quota, alone_ms=member.alone_ms[0], beside=beside)
            errors.append(abs((member.alone_ms[0] + extra) / member.times_ms[0] - 1))
    return statistics.fmean(errors)


@pytest.mark.parametrize("law", [TRUE, Eq8(e1=-1.5, e2=5.0, e3=3.0)], ids=["positive", "negative constant"])
def test_eq8_gives_its_coefficients_back_without_noise(law: Eq8) -> None:
    found = fitted(groups(law, SIZES), "full").coefficients[F]
    assert isinstance(found, Eq8)
    assert (found.e1, found.e2, found.e3) == pytest.approx((law.e1, law.e2, law.e3))


LEVELS = [
    Leveling(draw=0.1, capacity=0.8, fairness=0.0),
    Leveling(draw=0.1, capacity=0.9, fairness=1.0, draws={"a": 0.2, "g": 0.12, "h": 0.3}),
    Leveling(draw=0.15, capacity=0.7, fairness=0.4, cache=0.1, draws={"c": 0.3}),
]
LARGE = [2] * 6 + [3] * 6 + [4] * 4 + [6] * 4 + [8] * 4


@pytest.mark.parametrize("law", LEVELS, ids=["in proportion", "max-min", "between"])
def test_our_form_finds_the_coefficients_that_made_the_data(law: Leveling) -> None:
    fit = fitted(groups(law, LARGE), "ours")
    found, form = fit.coefficients[F], fit.interference(bandwidths())
    assert isinstance(found, Leveling)
    assert isinstance(form, LeveledBandwidth)
    assert (found.capacity, found.fairness, found.cache) == pytest.approx(
        (law.capacity, law.fairness, law.cache), abs=0.02
    )
    assert mean_error(form, groups(law, LARGE, seed=7)) < 0.01


def test_a_pairwise_law_is_found_and_our_form_has_to_earn_its_bends() -> None:
    law = Sharing(pressure=0.1, product=0.5)
    found = fitted(groups(law, SIZES), "pairwise").coefficients[F]
    assert isinstance(found, Sharing)
    assert (found.pressure, found.product) == pytest.approx((0.1, 0.5))
    chosen = fitted(groups(law, SIZES, noise_ms=0.5), "ours")
    assert isinstance(chosen.interference(bandwidths()), SharedBandwidth)


def test_both_phases_get_the_same_of_our_two_forms() -> None:
    made = groups(Sharing(product=0.5), SIZES, noise_ms=0.5) + groups(LEVELS[0], LARGE, phase=B)
    fit = fitted(made, "ours")
    assert isinstance(fit.interference(bandwidths()), LeveledBandwidth)
    assert all(isinstance(one, Leveling) for one in fit.coefficients.values())


def test_groups_that_ran_faster_together_give_no_gain() -> None:
    fit = fitted(groups(Eq8(e1=-0.5), SIZES, noise_ms=0.05), "pairwise")
    assert isinstance(fit.interference(bandwidths()), SharedBandwidth)
    assert fit.interference(bandwidths()).is_zero


def test_each_phase_is_fitted_by_itself_and_stands_in_where_the_other_is_missing() -> None:
    both = groups(TRUE, SIZES) + groups(Eq8(e1=1.0, e2=8.0), SIZES, phase=B)
    found = fitted(both, "full").coefficients[B]
    assert isinstance(found, Eq8)
    assert (found.e1, found.e2, found.e3) == pytest.approx((1.0, 8.0, 0.0), abs=1e-9)
    alone = fitted(groups(TRUE, SIZES), "full").coefficients
    assert alone[B] is alone[F]


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ("full", "2 groups of modules .* at least 2 more groups"),
        ("additive", "2 groups of modules .* at least 1 more groups"),
        ("ours", "2 groups of modules .* at least 1 more groups"),
    ],
)
def test_too_few_groups_say_how_many_more_are_needed(form: str, says: str) -> None:
    with pytest.raises(InvalidProfileError, match=says):
        fitted(groups(TRUE, [2, 3]), form)


def test_what_was_not_measured_or_cannot_tell_is_refused_with_what_to_measure() -> None:
    with pytest.raises(InvalidProfileError, match="no modules were measured side by side"):
        fitted([], "full")
    with pytest.raises(InvalidProfileError, match=r"cannot tell e1, e2, e3 apart \(condition number .*groups of 3"):
        fitted(groups(TRUE, [2]) * 6, "full")
    with pytest.raises(InvalidProfileError, match="is not known; profile it with hardware counters"):
        fit_interference(groups(TRUE, SIZES), Bandwidths([]), "full")


def test_members_that_take_no_time_are_left_out() -> None:
    idle = [replace(g, members=tuple(replace(m, alone_ms=(0.0,)) for m in g.members)) for g in groups(TRUE, [2, 2])]
    assert fitted(groups(TRUE, SIZES) + idle, "full") == fitted(groups(TRUE, SIZES), "full")
