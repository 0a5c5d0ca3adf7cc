"""Parts of ``python -m bench.gpu``: what it looks for first, what it counts, and how results become tables."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from bench import tables
from bench.gpu.parts import MEASUREMENTS, MODEL_NAMES
from bench.record import Figure, Part, Study, median_figure, missing_figure
from mosaic import models
from mosaic.artifact import load, save
from mosaic.device import Device

H200 = Device(name="NVIDIA H200", kind="cuda", num_slots=16, sms_per_slot=8, remainder_sms=4, memory_bytes=1 << 37)


def figure(part: str, name: str, value: float | None, **labels: str) -> Figure:
    if value is None:
        return dataclasses.replace(missing_figure(name, "it cannot be had", labels), part=part)
    made = median_figure(name, [value * 0.9, value, value * 1.1] * 3, labels=labels)
    return dataclasses.replace(made, part=part)


def step(value: float | None, variant: str, model: str = "clip", batch: str = "8", **labels: str) -> Figure:
    return figure(f"models/{model}/{batch}", "step_ms", value, variant=variant, model=model, batch=batch, **labels)


FIGURES = (
    step(50.0, "plain"),
    step(None, "plain, one CUDA graph"),
    step(45.0, "green lanes", plan="even split by hand"),
    figure("models/clip/8", "speedup", 1.11, variant="green lanes", plan="even split by hand", model="clip", batch="8"),
    step(44.0, "green lanes, SM targets", plan="even split by hand", launching="captured"),
    step(40.0, "mosaic", plan="gahc"),
    figure("models/clip/8", "speedup", 1.25, variant="mosaic", plan="gahc", model="clip", batch="8"),
    Figure(name="bound_ms", source="predicted", value=20.0, part="models/clip/8"),
    figure("scaling", "time_ms", 8.0, work="gemm", quota="8"),
    figure("scaling", "time_ms", 4.0, work="gemm", quota="16"),
    figure("pool", "create_ms", 37.0, way="context and stream", quota="4"),
)


def study(**changes: object) -> Study:
    made = Study(
        study="gpu",
        command="python -m bench.gpu --out out",
        created="2026-12-01T10:00:00+00:00",
        commit="abc123",
        python_version="3.12.3",
        torch_version="2.11.0",
        machine=H200,
        foreign_cpu_share=None,
        figures=FIGURES,
        driver_version="580.1 (CUDA 13.0)",
        parts=(Part(name="models/clip/8", asks="how long?", status="cut short", left_out=("plain streams",)),),
    )
    return dataclasses.replace(made, **changes)


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(tables, "RESULTS", tmp_path / "bench" / "results")
    return tmp_path / "bench" / "results"


def test_the_process_that_starts_measurements_never_loads_torch():
    code = "import sys, bench.gpu.run; print(sorted({'torch', 'mosaic._C', 'mosaic.profiler'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tables.TOP, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_measurement_can_be_resolved_and_asks_a_question():
    for measurement in MEASUREMENTS.values():
        assert callable(measurement.resolve())
        assert measurement.asks.endswith("?")
        assert measurement.seconds > 0
    assert MODEL_NAMES == models.PAPER_MODELS


def test_all_of_it_fits_into_nine_minutes_with_the_build_and_the_ladder():
    assert sum(measurement.seconds for measurement in MEASUREMENTS.values()) <= 7.5 * 60


def test_a_kept_result_is_filed_under_its_device_date_and_commit(results: Path, tmp_path: Path):
    save(study(), tmp_path / "made.json")
    kept = tables.keep(tmp_path / "made.json")
    assert kept == results / "h200" / "2026-12-01-abc123.json"
    assert load(Study, kept) == study()


def test_tables_are_made_from_the_newest_result_that_has_them(results: Path):
    newer = study(
        created="2026-12-02T10:00:00+00:00", figures=(figure("scaling", "time_ms", 1.0, work="gemm", quota="16"),)
    )
    save(study(), results / "h200" / "2026-12-01-abc123.json")
    save(newer, results / "h200" / "2026-12-02-abc124.json")
    assert "2026-12-02" in tables.TABLES["scaling"]()
    assert "2026-12-01" in tables.TABLES["pool"]()
