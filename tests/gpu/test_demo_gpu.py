"""The demo on a GPU: its files, its comparison with plain training, and times by the device's clock."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

import mosaic
from mosaic import artifact
from mosaic.backends.cuda.backend import CudaBackend
from mosaic.demo import loop
from mosaic.demo import run as demo
from mosaic.demo.model import Size
from mosaic.demo.record import RunRecord
from mosaic.report.progress import Progress

pytest.importorskip("sklearn", reason="needs the extra demo")
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("method", ["auto", "distmm"])
def test_the_demo_on_a_gpu_leaves_its_files_and_agrees_with_plain_training(
    method: str, cuda_backend: CudaBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    small = Size(width=64, depth=2, hidden=64, batch_size=16, learning_rate=1e-3)
    monkeypatch.setattr(loop, "SIZES", {"cuda": small})
    monkeypatch.setattr(mosaic, "Options", partial(mosaic.Options, method=method))
    settings = loop.DemoSettings(kind="cuda", rounds=2, steps_per_round=3, equality_steps=3)
    demo.run_demo(settings, tmp_path, cuda_backend, Progress(Console(quiet=True)), Console(quiet=True))
    record = artifact.load(RunRecord, tmp_path / "run.json")
    assert record.machine == cuda_backend.device
    assert record.max_abs_difference <= record.equality_tolerance == 1e-4
    assert len(record.step_times_ms_plain) == len(record.step_times_ms_colocated) == 6
    assert record.colocated or method == "auto"
    assert all((tmp_path / name).is_file() for name in ("profile.json", "plan.json", "timeline.png", "trace.json"))
