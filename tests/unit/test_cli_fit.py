"""``--fit``: interference fitted to one model's groups, saved, and used to plan another one."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from planning_cases import linear, profile_of

from mosaic.artifact import load, save
from mosaic.cli.fitting import fit_groups
from mosaic.cli.main import run
from mosaic.cost import Bandwidths, InterferenceFit, Leveling
from mosaic.cost.interference.leveling import demand_of
from mosaic.errors import MosaicError
from mosaic.plan import Plan
from mosaic.profile import GroupMember, GroupSample, Phase, Profile

LAW = Leveling(draw=0.3, capacity=0.8, fairness=0.3)


def profile(names: str, *, num_groups: int = 0, num_slots: int = 8) -> Profile:
    base = profile_of({name: linear(8.0 + index) for index, name in enumerate(names)}, num_slots=num_slots)
    samples = tuple(
        replace(s, bandwidth_utilisation=min(1.0, 0.1 + 0.05 * "abcdwxyz".index(s.module) + 0.05 * s.quota))
        for s in base.samples
    )
    bandwidths, dice = Bandwidths(samples), random.Random(0)
    groups = [
        group(dice.sample(names, 2 + number % 3), phase, bandwidths, dice)
        for number in range(num_groups)
        for phase in Phase
    ]
    return replace(base, samples=samples, groups=tuple(groups))


def group(names: list[str], phase: Phase, bandwidths: Bandwidths, dice: random.Random) -> GroupSample:
    quotas = [dice.choice([1, 2]) for _ in names]
    takers = [LAW.taker(demand_of(bandwidths, name, phase, 1, q)) for name, q in zip(names, quotas, strict=True)]
    members = []
    for name, quota, own in zip(names, quotas, takers, strict=True):
        extra = LAW.extra_share(own, [of for of in takers if of is not own])
        times = ((1 + extra) * math.exp(dice.gauss(0, 0.002)),)
        members.append(GroupMember(module=name, phase=phase, quota=quota, times_ms=times, alone_ms=(1.0,)))
    return GroupSample(members=tuple(members))


@pytest.fixture
def fit(tmp_path: Path) -> Path:
    lines = list(fit_groups(profile("abcd", num_groups=16), "ours", tmp_path / "fit.json"))
    assert lines[0].startswith("interference, forward, 16 groups: capacity 0.")
    assert lines[-1] == f"wrote {tmp_path / 'fit.json'}"
    return tmp_path / "fit.json"


def plan(tmp_path: Path, other: Profile, *options: str) -> int:
    save(other, tmp_path / "profile.json")
    where = ["--profile", str(tmp_path / "profile.json"), "--output", str(tmp_path / "plan.json")]
    return run(["plan", *where, *options])


def test_a_fit_of_one_model_plans_another_one_and_says_what_it_has_not_seen(fit, tmp_path, capsys) -> None:
    assert plan(tmp_path, profile("wxyz"), "--interference", "ours", "--fit", str(fit)) == 0
    assert "no fitted group had w, x, y, z" in " ".join(capsys.readouterr().out.split())
    assert load(Plan, tmp_path / "plan.json").search.method == "exact"
    assert load(InterferenceFit, fit).of(Phase.FORWARD).named["capacity"] == pytest.approx(0.8, abs=0.05)


def test_the_plan_of_a_model_of_the_fit_has_no_such_finding(fit, tmp_path, capsys) -> None:
    assert plan(tmp_path, profile("abcd"), "--interference", "mosaic", "--fit", str(fit)) == 0
    assert "no fitted group had" not in capsys.readouterr().out


def test_a_fit_of_another_form_is_refused(fit, tmp_path, capsys) -> None:
    assert plan(tmp_path, profile("abcd"), "--interference", "full", "--fit", str(fit)) == 1
    assert "form 'mosaic', not of 'full'" in " ".join(capsys.readouterr().err.split())


def test_a_fit_without_a_form_is_refused(fit, tmp_path, capsys) -> None:
    assert plan(tmp_path, profile("abcd"), "--fit", str(fit)) == 1
    assert "--interference ours" in " ".join(capsys.readouterr().err.split())


def test_a_fit_of_another_device_is_refused(fit, tmp_path, capsys) -> None:
    assert plan(tmp_path, profile("abcd", num_slots=4), "--interference", "ours", "--fit", str(fit)) == 1
    assert "with 8 slots, and this is made-up with 4" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "fit.json"),
        (lambda text: text.replace('"schema_version": 2', '"schema_version": 1'), "schema_version=1 is not 2"),
        (lambda text: text.replace('"capacity"', '"knee"'), "fit.json"),
    ],
    ids=["truncated", "old", "of no form"],
)
def test_a_file_that_is_no_fit_is_refused(change, message: str, fit, tmp_path, capsys) -> None:
    fit.write_text(change(fit.read_text()))
    assert plan(tmp_path, profile("abcd"), "--interference", "ours", "--fit", str(fit)) == 1
    assert message.replace(" ", "") in "".join(capsys.readouterr().err.split())


def test_fitting_without_groups_says_what_to_give(tmp_path) -> None:
    with pytest.raises(MosaicError, match="--groups 24"):
        list(fit_groups(profile("abcd"), "ours", tmp_path / "fit.json"))
    assert not (tmp_path / "fit.json").exists()
