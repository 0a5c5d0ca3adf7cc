"""Today's data before it is trained on: what is told, what quarantines the day."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mosaic.retrain.data_check import DataCheck, DataCheckSettings, DayFigures, InputFigures, check_data, day_figures
from mosaic.retrain.gate import Scores

SETTINGS = DataCheckSettings()


def figures(seed: int, *, rows: int = 500, right: float = 0.9, **other: object) -> DayFigures:
    """A day of ten labels, half of its rows with audio."""
    draw = np.random.default_rng(seed)
    scores = Scores.of(
        "0041",
        "fresh",
        {
            "value": (draw.random(rows) < right).astype(float),
            "label": draw.integers(0, 10, rows),
            "modality": ["image+audio" if draw.random() < 0.5 else "image" for _ in range(rows)],
        },
    )
    inputs = {"image": InputFigures(mean=0.13 + 0.002 * float(draw.normal()), spread=0.3)}
    return replace(day_figures(f"2026-11-{seed:02}", scores, unreadable={}, inputs=inputs), **other)


BEFORE = tuple(figures(seed) for seed in range(1, 9))


def checked(
    today: DayFigures, before: Sequence[DayFigures] = BEFORE, settings: DataCheckSettings = SETTINGS
) -> DataCheck:
    return check_data(today, before, settings)


def failed(check: DataCheck) -> list[str]:
    return [finding.name for finding in check.findings if not finding.passed]


def sentence(check: DataCheck, name: str) -> str:
    return next(each.sentence for each in check.findings if each.name == name)


def test_half_of_the_labels_wrong_quarantines_a_day_that_is_usual_otherwise():
    assert (checked(figures(9)).quarantine, checked(figures(9)).reason) == (False, "")
    check = checked(figures(9, right=0.9 / 2 + 0.1 / 2))
    assert check.quarantine
    assert check.reason.startswith("The champion's mean value on today's rows is 0.4940, usually 0.9")
    assert "look at today's labels" in check.reason


def test_honest_drift_is_let_through_up_to_the_budget_and_told():
    check = checked(figures(9, right=0.75))
    assert not check.quarantine
    assert "the data drifts, or some labels are wrong" in sentence(check, "champion's error")
    drifted = figures(9, right=0.55)
    assert checked(drifted).quarantine
    assert not checked(drifted, settings=DataCheckSettings(max_drop=0.5)).quarantine


def test_a_missing_modality_is_planned_for_and_quarantines_only_if_it_is_required():
    today = figures(9, modalities={"image": 500})
    check = checked(today)
    assert not check.quarantine
    assert "audio is missing today" in sentence(check, "modalities")
    assert "modalities" not in {each.name for each in checked(today, (*BEFORE, today)).findings}
    assert "audio is new today" in sentence(checked(figures(10), (*BEFORE, today)), "modalities")
    settings = DataCheckSettings(required_modalities=("audio",))
    for before in (BEFORE, (*BEFORE, today)):
        assert failed(checked(today, before, settings)) == ["modalities"]


def test_other_units_of_an_input_and_frozen_rows_quarantine_the_day():
    check = checked(figures(9, inputs={"image": InputFigures(mean=33.0, spread=76.0)}))
    assert failed(check) == ["mean image"]
    assert "other units or scales" in check.reason
    check = check_data(figures(9), BEFORE, SETTINGS, today_rows={"a", "b"}, frozen_rows={"b", "c"})
    assert check.quarantine
    assert check.reason.startswith("1 of today's 2 rows are frozen rows")
