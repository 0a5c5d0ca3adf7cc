"""The demo: what it leaves, and its proof of equality."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from engine_cases import Stages, colocated

from mosaic import artifact
from mosaic.backends.host.backend import HostBackend
from mosaic.cli.main import run
from mosaic.demo import loop
from mosaic.demo import run as demo
from mosaic.demo.data import load
from mosaic.demo.loop import DemoSettings
from mosaic.demo.model import TriModal
from mosaic.demo.record import RunRecord, summary_rows
from mosaic.plan import Plan
from mosaic.profile import Profile
from mosaic.profiler import ProfileSettings

pytest.importorskip("sklearn", reason="needs the extra demo")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's output, with fewer steps than usual, and measured once on however busy a machine."""
    output = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "_MAX_ROUNDS_S", 0.0)  # as on a machine so busy that two rounds take all the time
        patch.setattr(demo, "ProfileSettings", lambda **_: ProfileSettings(sample_seconds=0.02, foreign_share=2.0))
        patch.setattr(loop, "DemoSettings", partial(DemoSettings, steps_per_round=2))
        assert run(["demo", "--backend", "host", "--output", str(output), "--rounds", "3"]) == 0
    return output


def test_the_demo_leaves_every_file_whole(folder: Path):
    profile, plan = artifact.load(Profile, folder / "profile.json"), artifact.load(Plan, folder / "plan.json")
    assert plan.profile == profile.fingerprint
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert {event.get("args", {}).get("module") for event in events} >= {"image", "audio", "text"}


def test_equality_is_proven_by_another_plan_where_the_timed_one_has_no_modules_side_by_side():
    stages: Stages = [{"image": 1}, {"audio": 1}, {"text": 1}]
    triples, settings = load(), DemoSettings(kind="host", equality_steps=2)
    (sample,) = settings.draw(triples, 1, torch.device("cpu"))
    with colocated(TriModal(), sample, stages, num_slots=3) as handle:
        equality, timeline = demo.compare(settings, triples, handle, HostBackend(3), lambda: None)
    assert {span.module for span in timeline.spans} >= {"image", "audio", "text"}
    assert equality["max_abs_difference"] == equality["equality_tolerance"] == 0.0
    assert not equality["equality_of_timed_plan"]


def test_the_demo_proves_equality_and_records_its_measurements(folder: Path):
    record = artifact.load(RunRecord, folder / "run.json")
    as_it_was = {name: cell for name, _, cell in summary_rows(replace(record, colocated=False))}
    assert as_it_was["speed-up"] == "none: the loop ran as it was"
    assert record.bitwise_equal
    assert record.max_abs_difference == 0.0
    assert record.equality_of_timed_plan == record.colocated
    assert len(record.step_times_ms_plain) == len(record.step_times_ms_colocated) == 4
    assert len(record.round_speedups) == 2
    assert "2 of 3 rounds were timed in 0 s" in record.notes
    assert all(math.isfinite(value) and value > 0 for value in record.round_speedups)
    assert record.chance == pytest.approx(1 / 200)
    assert set(record.retrieval) == set(record.retrieval_plain)
    assert record.machine.num_slots >= 1
