"""The demo: what it leaves, and its proof of equality."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from engine_cases import Stages, colocated

from mosaic import artifact
from mosaic.backends.host.backend import HostBackend
from mosaic.cli.main import run
from mosaic.demo import run as demo
from mosaic.demo.data import DigitTriples, batches, load
from mosaic.demo.equality import compare
from mosaic.demo.loop import retrieval
from mosaic.demo.model import TriModal
from mosaic.demo.plain import LoopSettings
from mosaic.demo.record import RunRecord
from mosaic.plan import Plan
from mosaic.profile import Profile
from mosaic.profiler import ProfileSettings

pytest.importorskip("sklearn", reason="needs the extra demo")
pytest.importorskip("espeakng_loader", reason="needs the extra demo")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the demo leaves, with fewer steps than it takes, and measured once whatever else runs here."""
    output = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "_WARM_STEPS", 1)
        patch.setattr(demo, "_MAX_ROUNDS_S", 0.0)  # as on a machine so busy that two rounds take all the time
        patch.setattr(demo, "ProfileSettings", lambda **_: ProfileSettings(sample_seconds=0.02, foreign_share=2.0))
        patch.setattr(demo, "DemoSettings", partial(demo.DemoSettings, steps_per_round=2))
        assert run(["demo", "--backend", "host", "--output", str(output), "--rounds", "3"]) == 0
    return output


@pytest.fixture(scope="module")
def cache(folder: Path) -> Path:
    """The folder of the data set, which the demo has made."""
    return folder / "cache"


def test_the_demo_leaves_every_file_whole(folder: Path):
    assert {path.name for path in folder.glob("*.*")} == {
        "profile.json",
        "plan.json",
        "run.json",
        "timeline.png",
        "trace.json",
    }
    assert (
        artifact.load(Plan, folder / "plan.json").profile == artifact.load(Profile, folder / "profile.json").fingerprint
    )
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG")
    names = {
        event.get("args", {}).get("module") for event in json.loads((folder / "trace.json").read_text())["traceEvents"]
    }
    assert {"image", "audio", "text"} <= names


def test_the_demo_proves_equality_with_lanes_that_overlap(folder: Path):
    record = artifact.load(RunRecord, folder / "run.json")
    assert record.bitwise_equal
    assert record.max_abs_difference == 0.0
    assert record.equality_overlap > 0.0
    assert record.equality_of_timed_plan == record.colocated


def test_equality_is_proven_by_another_plan_where_the_timed_one_has_no_modules_side_by_side(triples: DigitTriples):
    stages: Stages = [{"image": 1}, {"audio": 1}, {"text": 1}]
    (sample,) = batches(triples.train, 8, 0, 1)
    settings = LoopSettings(cache=Path(), seed=0, kind="host", batch_size=8, steps=2)
    with colocated(TriModal(), sample, stages, num_slots=3) as handle:
        found = compare(settings, triples, handle, HostBackend(3), steps=2, advance=lambda: None)
    assert found.max_abs_difference == found.tolerance == 0.0
    assert found.overlap > 0.0
    assert not found.is_of_timed_plan


def test_the_demo_records_what_it_measured(folder: Path):
    record = artifact.load(RunRecord, folder / "run.json")
    assert len(record.step_times_ms_plain) == len(record.step_times_ms_colocated) == 4
    assert len(record.round_speedups) == 2
    assert "2 of 3 rounds were timed in 0 s" in record.notes
    assert all(math.isfinite(value) and value > 0 for value in record.round_speedups)
    assert record.chance == pytest.approx(1 / 200)
    assert set(record.retrieval) == set(record.retrieval_plain)
    assert record.machine.num_slots >= 1


@pytest.fixture(scope="module")
def triples(cache: Path) -> DigitTriples:
    return load(cache)


def test_retrieval_of_identical_embeddings_is_not_counted_as_right(triples: DigitTriples):
    class Same(torch.nn.Module):
        def forward(self, image: Path, audio: Path, text: Path) -> dict[str, torch.Tensor]:
            alike = torch.ones(200, 4) / 2
            return {"image": alike, "audio": alike, "text": alike}

    found = retrieval(Same(), triples.test)
    assert all(share <= 0.005 for share in found.values())
