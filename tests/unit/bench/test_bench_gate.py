"""The study of the gate: its populations are what they say, and its figures are read back as tables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench import pages
from bench.gate import tables
from bench.gate.__main__ import STUDY
from bench.gate.days import Chain, run_days
from bench.gate.parts import LARGE_CHANGE, SMALL_CHANGE, margins, poison, share, slices
from bench.gate.population import Rows
from bench.study_parts import StudyPart
from mosaic.retrain.gate import GateSettings


@pytest.mark.parametrize(("population", "differ"), [(SMALL_CHANGE, 0.02), (LARGE_CHANGE, 0.05)])
@pytest.mark.parametrize("size", [1, 20])
def test_versions_are_as_accurate_as_they_say_and_differ_as_much(population, differ, size):
    drawn = Rows(replace(population, cluster_size=size), 100_000, np.random.default_rng(0))
    old, new = drawn.right(0.95, drawn.luck), drawn.right(0.95, drawn.next_luck())
    assert np.mean(old) == pytest.approx(0.95, abs=0.005)
    assert np.mean(new) == pytest.approx(0.95, abs=0.005)
    assert np.mean(old != new) == pytest.approx(differ, rel=0.15)


def test_shares_come_with_an_interval_also_where_nothing_was_seen():
    none, half = share("none", [False] * 100), share("half", [True, False] * 50)
    assert (none.value, none.low) == (0, 0)
    assert none.high == pytest.approx(3.7, abs=0.1)
    assert (half.value, half.low, half.high) == (50, pytest.approx(40.4, abs=0.1), pytest.approx(59.6, abs=0.1))


def test_the_anchor_ends_a_chain_of_losses():
    settings = GateSettings(resamples=1000, margin=0.03)
    chain = Chain(population=SMALL_CHANGE, rows=1000, days=12, loss=0.01, settings=settings)
    free, held = run_days(chain, 0), run_days(replace(chain, anchored=True), 0)
    assert free.promoted > held.promoted
    assert free.accuracy == pytest.approx(0.95 - 0.01 * free.promoted)
    assert held.accuracy > free.accuracy


def test_renewed_rows_take_the_place_of_others():
    settings = GateSettings(resamples=1000, margin=0.05, renew_rows=100, max_frozen_rows=500)
    chain = Chain(population=SMALL_CHANGE, rows=500, days=3, loss=0.0, settings=settings, anchored=True)
    renewed, same = run_days(chain, 0), run_days(replace(chain, settings=replace(settings, renew_rows=0)), 0)
    assert renewed.promoted == same.promoted == 3
    assert renewed.frozen != same.frozen


def test_every_part_makes_figures_and_the_table_has_a_line_a_margin(tmp_path: Path):
    kept = tmp_path / "host" / "2026-11-22-abc-bench_gate.json"
    parts = (
        StudyPart.alone("margins", 60, lambda: margins(((200, 1, 0.05), (200, 20, 0.05)), trials=3)),
        StudyPart.alone("slices", 60, lambda: slices(trials=2)),
        StudyPart.alone("poison", 60, lambda: poison(trials=2)),
    )
    STUDY.run(parts, path=kept)
    figures = json.loads(kept.read_text())["figures"]
    assert all(figure["value"] is not None for figure in figures)
    lines = tables.margins_table(tmp_path).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| margin 5, 200 rows", "| margin 5, 200 rows in 10 groups"]
    assert len({line.count("|") for line in lines}) == 1
    assert "one slice of 8 loses 12 points: refused for a slice, %" in pages.study_table("bench_gate", tmp_path)


def test_a_table_without_a_study_says_so(tmp_path: Path):
    assert tables.margins_table(tmp_path) == pages.NOT_YET
