"""Coefficients back from made-up groups, how sure they are, and what cannot be fitted."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace

import pytest
from planning_cases import device_of, pair, sample

from mosaic.artifact import load, parse, save, to_json
from mosaic.cost import (
    Bandwidths,
    Eq8,
    FullInterference,
    InterferenceFit,
    LeveledBandwidth,
    Leveling,
    NoInterference,
    SharedBandwidth,
    Sharing,
)
from mosaic.cost.fit import Form
from mosaic.cost.interference.leveling import Demand
from mosaic.cost.interference_fit import Coefficient, fit_interference, rank_forms
from mosaic.errors import InvalidProfileError
from mosaic.profile import GroupMember, GroupSample, Phase

F, B = Phase.FORWARD, Phase.BACKWARD
DEVICE = device_of(16)
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


def fitted(found: list[GroupSample], form: Form) -> InterferenceFit:
    return fit_interference(found, bandwidths(), form, device=DEVICE)


SIZES = [2] * 10 + [3] * 8 + [4] * 4


def test_eq8_gives_its_coefficients_back_without_noise() -> None:
    fit = fitted(groups(TRUE, SIZES), "full").of(F)
    assert fit.named == pytest.approx({"e1": 0.3, "e2": 4.0, "e3": 12.0})
    assert fit.r_squared == pytest.approx(1)
    assert fit.held_out is not None
    assert fit.held_out.largest < 1e-9
    assert (fit.num_groups, fit.num_samples) == (22, 10 * 2 + 8 * 3 + 4 * 4)


def test_a_negative_constant_of_eq8_is_found() -> None:
    fit = fitted(groups(Eq8(e1=-1.5, e2=5.0, e3=3.0), SIZES), "full").of(F)
    assert fit.named == pytest.approx({"e1": -1.5, "e2": 5.0, "e3": 3.0})


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    held = dict.fromkeys(("e1", "e2", "e3"), 0)
    widths = []
    for seed in range(60):
        fit = fitted(groups(TRUE, SIZES, noise_ms=0.4, seed=seed), "full").of(F)
        for c in fit.coefficients:
            assert c.low is not None
            assert c.high is not None
            held[c.name] += c.low <= getattr(TRUE, c.name) <= c.high
            widths.append(c.high - c.low)
    assert all(count >= 60 * 0.85 for count in held.values()), held
    assert statistics.median(widths) < 8


def test_more_noise_makes_wider_intervals_and_larger_errors() -> None:
    fits = [fitted(groups(TRUE, SIZES, noise_ms=noise), "full").of(F) for noise in (0.1, 1.0)]
    for quiet, loud in zip(*(fit.coefficients for fit in fits), strict=True):
        assert quiet.low is not None
        assert loud.low is not None
        assert quiet.value - quiet.low < loud.value - loud.low
    assert fits[0].held_out_mean < fits[1].held_out_mean
    assert fits[0].r_squared > fits[1].r_squared


def test_on_data_from_eq8_the_full_form_errs_least_then_the_additive_then_none() -> None:
    for seed in range(5):
        made = groups(TRUE, SIZES, noise_ms=0.2, seed=seed)
        full, additive, none = (fitted(made, form).of(F).held_out_mean for form in ("full", "additive", "none"))
        assert full < additive < none


LEVELS = [
    Leveling(draw=0.1, capacity=0.8, fairness=0.0),
    Leveling(draw=0.1, capacity=0.9, fairness=1.0, draws={"a": 0.2, "g": 0.12, "h": 0.3}),
    Leveling(draw=0.15, capacity=0.7, fairness=0.4, cache=0.1, draws={"c": 0.3}),
]
LARGE = [2] * 6 + [3] * 6 + [4] * 4 + [6] * 4 + [8] * 4


@pytest.mark.parametrize("law", LEVELS, ids=["in proportion", "max-min", "between"])
def test_our_form_finds_the_coefficients_that_made_the_data(law: Leveling) -> None:
    fit = fitted(groups(law, LARGE), "mosaic")
    found = fit.of(F)
    assert isinstance(fit.interference(bandwidths()), LeveledBandwidth)
    assert (found.named["capacity"], found.named["fairness"], found.named["cache"]) == pytest.approx(
        (law.capacity, law.fairness, law.cache), abs=0.02
    )
    assert found.held_out_mean < 0.01


def test_our_form_predicts_larger_groups_than_it_was_fitted_to() -> None:
    law = LEVELS[1]
    form = fitted(groups(law, [2] * 8 + [3] * 8 + [5] * 8, noise_ms=0.1), "mosaic").interference(bandwidths())
    assert mean_error(form, groups(law, [8] * 10, seed=7)) < 0.02


def mean_error(form, found: list[GroupSample]) -> float:
    errors = []
    for group in found:
        for member in group.members:
            beside = [(other.module, other.quota) for other in group.members if other is not member]
            extra = form.extra_ms(member.module, F, quota=member.quota, alone_ms=member.alone_ms[0], beside=beside)
            errors.append(abs((member.alone_ms[0] + extra) / member.times_ms[0] - 1))
    return statistics.fmean(errors)


def test_intervals_of_our_form_hold_the_truth_about_as_often_as_they_say() -> None:
    held, told = 0, 0
    for seed in range(8):
        law = LEVELS[2]
        fit = fitted(groups(law, LARGE, noise_ms=0.2, seed=seed), "leveled").of(F)
        for c in fit.coefficients:
            if c.low is not None and c.name in ("capacity", "fairness", "cache"):
                assert c.high is not None
                told += 1
                held += c.low <= getattr(law, c.name) <= c.high
    assert told >= 20
    assert held >= 0.85 * told


def test_what_the_groups_do_not_tell_has_no_interval() -> None:
    fit = fitted(groups(Leveling(draw=0.1, capacity=1.5), [2] * 12, noise_ms=0.05), "leveled").of(F)
    unknown = {c.name for c in (*fit.coefficients, *fit.draws) if c.low is None}
    assert {"fairness", "idle"} <= unknown
    assert all(c.high is None for c in (*fit.coefficients, *fit.draws) if c.low is None)


def test_a_pairwise_law_is_found_and_our_form_has_to_earn_its_bends() -> None:
    law = Sharing(pressure=0.1, product=0.5)
    fit = fitted(groups(law, SIZES), "pairwise").of(F)
    assert fit.named == pytest.approx({"pressure": 0.1, "product": 0.5})
    chosen = fitted(groups(law, SIZES, noise_ms=0.5), "mosaic")
    assert isinstance(chosen.interference(bandwidths()), SharedBandwidth)


def test_both_phases_get_the_same_of_our_two_forms() -> None:
    made = groups(Sharing(product=0.5), SIZES, noise_ms=0.5) + groups(LEVELS[0], LARGE, phase=B)
    fit = fitted(made, "mosaic")
    assert isinstance(fit.interference(bandwidths()), LeveledBandwidth)
    assert all(phase.is_leveled for phase in fit.phases)


def test_a_fit_whose_coefficients_are_of_another_form_is_refused() -> None:
    fit = fitted(groups(TRUE, SIZES), "full")
    with pytest.raises(InvalidProfileError, match="the form 'pairwise' lacks the coefficients pressure, product"):
        replace(fit, form="pairwise")
    drawn = (Coefficient(name="a", value=0.1, low=None, high=None),)
    with pytest.raises(InvalidProfileError, match="with 1 draws are of no form"):
        replace(fit.phases[0], draws=drawn)


def test_groups_that_ran_faster_together_give_no_gain() -> None:
    fit = fitted(groups(Eq8(e1=-0.5), SIZES, noise_ms=0.05), "pairwise")
    assert isinstance(fit.interference(bandwidths()), SharedBandwidth)
    assert fit.interference(bandwidths()).is_zero


def test_each_phase_is_fitted_by_itself_and_stands_in_where_the_other_is_missing() -> None:
    both = groups(TRUE, SIZES) + groups(Eq8(e1=1.0, e2=8.0), SIZES, phase=B)
    fit = fitted(both, "full")
    assert fit.of(B).named == pytest.approx({"e1": 1.0, "e2": 8.0, "e3": 0.0}, abs=1e-9)
    assert fitted(groups(TRUE, SIZES), "full").of(B).phase is F


def test_pairs_of_which_one_was_timed_are_fitted_too() -> None:
    pairs = [
        pair(m, n, 1 + 0.3 * share_of(n, 2), phase=F, quota=4, beside_quota=2)
        for m in MODULES
        for n in MODULES
        if m != n
    ]
    fit = fit_interference([], bandwidths(), "pairwise", device=DEVICE, pairs=pairs).of(F)
    assert fit.named == pytest.approx({"pressure": 0.3, "product": 0.0}, abs=1e-9)
    assert fit.num_samples == 56


def test_no_groups_at_all_are_refused() -> None:
    with pytest.raises(InvalidProfileError, match="no modules were measured side by side"):
        fitted([], "full")


@pytest.mark.parametrize(("form", "needed"), [("full", 2), ("additive", 1), ("mosaic", 1), ("leveled", 4)])
def test_too_few_groups_say_how_many_more_are_needed(form: Form, needed: int) -> None:
    with pytest.raises(InvalidProfileError, match=f"2 groups of modules .* at least {needed} more groups"):
        fitted(groups(TRUE, [2, 3]), form)


def test_groups_that_are_alike_say_what_to_vary() -> None:
    once = groups(TRUE, [2])
    with pytest.raises(InvalidProfileError, match=r"cannot tell e1, e2, e3 apart \(condition number .*groups of 3"):
        fitted(once * 6, "full")


def test_just_enough_groups_have_no_left_out_errors_and_intervals_where_there_are_any() -> None:
    fit = fitted(groups(TRUE, [2, 3, 2]), "additive").of(F)
    assert fit.held_out is None
    assert fit.held_out_mean is None
    assert all(c.low is not None for c in fit.coefficients)


def test_members_that_take_no_time_are_left_out() -> None:
    idle = [replace(g, members=tuple(replace(m, alone_ms=(0.0,)) for m in g.members)) for g in groups(TRUE, [2, 2])]
    assert fitted(groups(TRUE, SIZES) + idle, "full").of(F).num_groups == len(SIZES)


def test_a_member_of_unknown_bandwidth_is_named() -> None:
    with pytest.raises(InvalidProfileError, match="is not known; profile it with hardware counters"):
        fit_interference(groups(TRUE, SIZES), Bandwidths([]), "full", device=DEVICE)


@pytest.mark.parametrize("form", ["none", "additive", "full", "pairwise", "leveled", "mosaic"])
def test_a_fit_survives_its_file_and_gives_the_same_interference(form: Form, tmp_path) -> None:
    fit = fitted(groups(TRUE, SIZES, noise_ms=0.2), form)
    save(fit, tmp_path / "fit.json")
    again = load(InterferenceFit, tmp_path / "fit.json")
    assert again == fit
    ask = {"quota": 4, "alone_ms": 5.0, "beside": [("b", 4), ("c", 4)]}
    first, second = (f.interference(bandwidths()).extra_ms("a", F, **ask) for f in (fit, again))
    assert first == second
    assert parse(InterferenceFit, to_json(fit), source="fit.json") == fit


def test_the_form_none_is_no_interference_and_knows_its_errors() -> None:
    fit = fitted(groups(TRUE, SIZES), "none")
    assert isinstance(fit.interference(bandwidths()), NoInterference)
    assert fit.of(F).held_out_mean > 0.1


def test_a_fit_is_used_for_the_modules_of_another_model() -> None:
    fit = fitted(groups(TRUE, SIZES), "full")
    other = Bandwidths(replace(sample(1, 1.0, module=m), bandwidth_utilisation=b) for m, b in (("x", 0.5), ("y", 0.25)))
    form = fit.interference(other)
    assert isinstance(form, FullInterference)
    expected = TRUE.as_written_ms([0.5, 0.25])
    assert form.extra_ms("x", F, quota=1, alone_ms=1.0, beside=[("y", 1)]) == pytest.approx(expected)


def test_what_lies_outside_a_fit_is_said() -> None:
    fit = fitted(groups(TRUE, SIZES), "full")
    domain = fit.of(F).domain
    inside = {("x", F): [domain.least_share, domain.most_share]}
    assert fit.outside(inside, device=DEVICE, num_modules=4) == ()
    assert fit.outside({("x", F): [0.3, 0.99]}, device=DEVICE) == (
        f"'x' forward uses 0.30 to 0.99 of the bandwidth; fitted groups had {domain.least_share:.2f} to "
        f"{domain.most_share:.2f}: measure a group with it",
    )
    assert fit.outside(inside, device=DEVICE, num_modules=8) == (
        "8 modules may share a device; fitted groups had at most 4",
    )
    assert fit.outside(inside, device=device_of(4)) == (
        "interference was fitted on made-up with 16 slots, this is made-up with 4: fit it here",
    )
    assert fit.outside({("x", B): [0.3]}, device=DEVICE) == (
        "no group was measured in backward; the other phase stands in",
    )


def test_modules_that_our_form_has_not_seen_are_named() -> None:
    fit = fitted(groups(LEVELS[0], LARGE), "leveled")
    inside = [fit.of(F).domain.least_share, fit.of(F).domain.most_share]
    assert fit.outside({("a", F): inside, ("x", F): inside}, device=DEVICE) == (
        "no fitted group had x: what a slot of them draws is taken to be typical of the device; measure groups with "
        "them",
    )
    assert fit.outside({("a", F): inside}, device=DEVICE) == ()


def test_forms_are_ranked_by_the_groups_that_they_have_not_seen() -> None:
    paper = rank_forms(groups(TRUE, SIZES, noise_ms=0.2), bandwidths(), device=DEVICE)
    ranked = [fit.form for fit in paper]
    assert ranked.index("full") < ranked.index("additive") < ranked.index("none")
    ours = rank_forms(groups(LEVELS[1], LARGE, noise_ms=0.05), bandwidths(), device=DEVICE)
    assert ours[0].form == "mosaic"


def test_forms_for_which_there_are_too_few_groups_are_not_ranked() -> None:
    assert [fit.form for fit in rank_forms(groups(TRUE, [2, 3]), bandwidths(), device=DEVICE)] == ["none"]
    with pytest.raises(InvalidProfileError, match="side by side"):
        rank_forms([], bandwidths(), device=DEVICE)
