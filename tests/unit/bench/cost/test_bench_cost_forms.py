"""Forms are fitted, chosen and judged by three sets of groups, all by one loss; how many numbers are free is told."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from bench.cost.estimates import damped
from bench.cost.forms import AS_WRITTEN, STUDIED, fit_form
from bench.cost.groups import ALL_SIZES, CHOSEN, error_name, fit_forms, group_names, judge_forms
from bench.cost.truth import OTHER, SAME, Group, Member, Truth, draw_groups
from mosaic.cost import Eq8, FullInterference, Interference, LeveledBandwidth, Leveling, SharedBandwidth, Sharing
from mosaic.cost.interference.forms import FORMS
from mosaic.profile import PairSample, Phase

F = Phase.FORWARD
NAMES = "abcdef"


class Known:
    """Bandwidths that grow with the quota, at a pace of each module's own."""

    def bandwidth(self, module, phase, degree, quota):
        return min(1.0, (0.02 + 0.02 * NAMES.index(module)) * quota)


def group_of(placed, form: Interference) -> Group:
    members = []
    for index, (name, quota) in enumerate(placed):
        beside = (*placed[:index], *placed[index + 1 :])
        extra = form.extra_ms(name, F, quota=quota, alone_ms=1.0, beside=beside)
        members.append(Member(module=name, phase=F, quota=quota, alone_ms=1.0, beside_ms=1.0 + extra))
    return tuple(members)


def truth_of(form: Interference, *, num_fit: int = 8) -> Truth:
    dice, taken = random.Random(0), set()
    fit, choose, same, other = (
        tuple(
            group_of(placed, form)
            for placed in draw_groups(
                names, sizes=(2, 3), count=count, quotas=(2, 4, 6, 8), num_slots=16, dice=dice, taken=taken
            )
        )
        for names, count in (("abcd", num_fit), ("abcd", 4), ("abcd", 4), ("bdef", 4))
    )
    return Truth(
        source="simulated",
        head="made up: ",
        bandwidths=Known(),
        fit=fit,
        choose=choose,
        judge={SAME: same, OTHER: other},
        again=same,
    )


def errors_of(words: str, truth: Truth) -> float:
    studied = next(one for one in STUDIED if one.words.startswith(words))
    return float(np.mean(fit_form(studied, truth).errors(truth, truth.judge[OTHER])))


def test_every_form_of_the_package_is_judged_and_eq_8_as_written_beside_it():
    assert {studied.form for studied in STUDIED} == {*FORMS, AS_WRITTEN}
    assert all(str(len(studied.low)) in studied.words for studied in STUDIED if studied.form != "measured")


@pytest.mark.parametrize(
    ("words", "form"),
    [
        ("pairwise (2)", SharedBandwidth({F: Sharing(pressure=0.3, product=0.7)}, Known())),
        ("Eq. 8 fit for planning", FullInterference({F: Eq8(e1=-0.05, e2=0.2, e3=0.3)}, Known())),
        ("ours (5)", LeveledBandwidth({F: Leveling(draw=0.15, capacity=0.7, fairness=0.2, cache=0.3)}, Known())),
    ],
)
def test_a_form_finds_itself_in_groups_of_modules_that_it_was_not_fitted_to(words, form):
    assert errors_of(words, truth_of(form)) < 0.01 < errors_of("unaware", truth_of(form))


def test_the_one_loss_finds_a_minimum_within_bounds():
    target, low, high = np.array([0.3, -2.0]), np.array([0.0, -1.0]), np.array([1.0, 1.0])
    found, cost = damped(lambda values: values - target, np.array([0.9, 0.9]), low, high)
    assert found == pytest.approx([0.3, -1.0], abs=1e-6)
    assert cost == pytest.approx(1.0)


def test_no_group_is_in_two_sets_and_each_has_its_size_and_slots():
    dice, taken = random.Random(0), set()
    sets = [
        draw_groups(NAMES, sizes=(3, 4), count=6, quotas=(2, 3, 6), num_slots=16, dice=dice, taken=taken)
        for _ in range(3)
    ]
    keys = [frozenset(placed) for groups in sets for placed in groups]
    assert len(set(keys)) == len(keys) == 36
    assert all(len(placed) in (3, 4) and sum(quota for _, quota in placed) <= 16 for of in sets for placed in of)


def test_figures_are_named_before_they_are_made_and_tell_the_form_and_its_coefficients():
    truth = truth_of(SharedBandwidth({F: Sharing(pressure=0.3, product=0.7)}, Known()))
    pair = PairSample(module="a", beside="b", phase=F, quota=8, beside_quota=8, times_ms=(1.4,), alone_ms=(1.0,))
    paired = replace(truth, pairs=(pair,))
    figures = {figure.name: figure for figure in judge_forms(paired, fit_forms(paired), (2, 3))}
    assert set(figures) == set(group_names("made up: ", (SAME, OTHER), (2, 3)))
    chosen = figures[error_name("made up: ", OTHER, ALL_SIZES, CHOSEN)]
    assert chosen.labels["form"].startswith("pairwise")
    assert chosen.labels["coefficients"] == "2"
    unaware = figures[error_name("made up: ", OTHER, ALL_SIZES, STUDIED[0].words)]
    assert unaware.value > 0.05
    pairs = next(studied.words for studied in STUDIED if studied.form == "measured")
    assert figures[error_name("made up: ", SAME, 2, pairs)].labels["coefficients"] == "1"


def test_a_form_without_enough_members_says_how_many_there_are():
    truth = truth_of(SharedBandwidth({F: Sharing(pressure=0.3)}, Known()), num_fit=1)
    studied = next(one for one in STUDIED if one.draws)
    with pytest.raises(ValueError, match="5 members of groups for 9 coefficients"):
        fit_form(studied, replace(truth, fit=truth.fit))
