"""Parts of ``python -m bench.gpu``: what it looks for first, what it counts, and how results become tables."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from bench import tables
from bench.gpu import preflight
from bench.gpu import tables as gpu_tables
from bench.gpu.bench import Bench
from bench.gpu.ladder import SM_TARGET_SPEEDUP
from bench.gpu.parts import MEASUREMENTS, MODEL_NAMES
from bench.gpu.questions import measure_overlap
from bench.gpu.run import command_text, without_folders
from bench.gpu.tables import text_table
from bench.processes import begin_section, last_lines, run_logged, shorten_section
from bench.record import Figure, Part, Study, median_figure, missing_figure
from bench.roofline import ADAMW_BYTES, count_step
from mosaic import models
from mosaic.artifact import load, save
from mosaic.backends.cuda import sm_targets
from mosaic.backends.host.backend import HostBackend
from mosaic.device import Device
from mosaic.errors import MosaicError
from mosaic.microbench import Budget
from mosaic.microbench.overlap import Overlap, Row, VariantTime
from mosaic.microbench.result import NotMeasured, Spread

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


def test_a_missing_package_is_found_without_importing_anything(monkeypatch: pytest.MonkeyPatch):
    gone = preflight.Package("no-such-package", "no_such_package.inner", "")
    there = preflight.Package("pytest", "pytest", "")
    monkeypatch.setattr(preflight, "PACKAGES", (gone, there))
    assert preflight.missing_packages() == (gone,)


def test_the_process_that_starts_measurements_never_loads_torch():
    code = "import sys, bench.gpu.run; print(sorted({'torch', 'mosaic._C', 'mosaic.profiler'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tables.TOP, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_server_that_measurements_are_forked_from_leaves_the_driver_alone():
    code = (
        "import importlib, sys, torch\n"
        "from bench.gpu.parts import PRELOADED\n"
        "asked = []\n"
        "torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = lambda *_: asked.append(1)\n"
        "[importlib.import_module(name) for name in PRELOADED]\n"
        "print(asked, 'mosaic._C' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tables.TOP, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] False"


def test_a_command_that_fails_or_hangs_is_ended_and_leaves_its_output(tmp_path: Path):
    log = tmp_path / "logs" / "log"
    shell = ["/bin/sh", "-c"]
    with pytest.raises(subprocess.CalledProcessError):
        run_logged([*shell, "echo spoken; exit 3"], log, folder=tmp_path, seconds=60, environment={})
    assert last_lines(log) == "spoken"
    with pytest.raises(subprocess.TimeoutExpired):
        run_logged(
            [*shell, "echo begun; sleep 1000"], log, folder=tmp_path, seconds=1, environment={"PATH": "/usr/bin:/bin"}
        )
    assert last_lines(log) == "spoken\nbegun"
    start = begin_section(log, "the next")
    assert last_lines(log, since=start) == ""
    assert last_lines(log, 1) == "==== the next"
    run_logged([*shell, "seq 1000"], log, folder=tmp_path, seconds=60, environment={"PATH": "/usr/bin:/bin"})
    shorten_section(log, since=start, most_bytes=20)
    assert last_lines(log, since=start) == "1\n2\n3\n4\n5\n\n[...]\n\n999\n1000"


def test_what_is_published_names_no_folder_of_this_machine():
    assert command_text(["--out", "/home/somebody/out", "--minutes", "8"]) == (
        "python -m bench.gpu --out out --minutes 8"
    )
    assert without_folders(f"no such file: {tables.TOP}/bench/x.py, {sys.prefix}/lib/y.py") == (
        "no such file: bench/x.py, lib/y.py"
    )


def test_every_measurement_can_be_resolved_and_asks_a_question():
    for measurement in MEASUREMENTS.values():
        assert callable(measurement.resolve())
        assert measurement.asks.endswith("?")
        assert measurement.seconds > 0
    assert MODEL_NAMES == models.PAPER_MODELS


def test_all_of_it_fits_into_nine_minutes_with_the_build_and_the_ladder():
    assert sum(measurement.seconds for measurement in MEASUREMENTS.values()) <= 7.5 * 60


def test_counts_of_a_step_are_those_of_its_products():
    model = nn.Linear(8, 4, bias=False)
    x = torch.ones(16, 8)
    count = count_step(model, lambda: model(x).sum())
    assert count.parameters == 32
    assert count.flops == 2 * (2 * 16 * 8 * 4)  # forward, and the weight's gradient
    assert count.moved_bytes == 2 * 32 * 4 + 32 * (4 + ADAMW_BYTES) + 2 * x.nbytes
    assert model.weight.grad is None


def test_overlap_hands_out_what_it_has_before_anything_later_can_fail(monkeypatch: pytest.MonkeyPatch):
    measured = VariantTime(
        variant="plain streams",
        kind="plain",
        quotas=None,
        passes="forward",
        launching="eager",
        step_ms=Spread.of([3.0]),
    )

    def rows(self: Overlap) -> Iterator[Row]:
        yield measured
        yield NotMeasured(what="partitions 8+8, forward, eager", reason="cuDNN error")
        raise RuntimeError("the device fell off")

    monkeypatch.setattr(Overlap, "rows", rows)
    found = measure_overlap(Bench(backend=HostBackend(num_slots=2), budget=Budget(), dry_run=True))
    first, second = next(found), next(found)
    assert (first.name, first.value, first.labels["variant"]) == ("step_ms", 3.0, "plain streams")
    assert (second.name, second.value, second.reason) == ("absent", None, "cuDNN error")
    with pytest.raises(RuntimeError, match="fell off"):
        next(found)


def test_a_kept_result_is_filed_under_its_device_date_and_commit(results: Path, tmp_path: Path):
    save(study(), tmp_path / "made.json")
    kept = tables.keep(tmp_path / "made.json")
    assert kept == results / "h200" / "2026-12-01-abc123.json"
    assert load(Study, kept) == study()


def test_a_dry_run_is_neither_kept_nor_shown(results: Path, tmp_path: Path):
    save(study(dry_run=True), tmp_path / "made.json")
    with pytest.raises(MosaicError, match="dry run"):
        tables.keep(tmp_path / "made.json")
    save(study(dry_run=True), results / "h200" / "2026-12-01-abc123.json")
    assert [tables.TABLES[name]() for name in ("models", "overlap", "scaling", "pool")] == ["not measured yet\n"] * 4


def test_tables_are_made_from_the_newest_result_that_has_them(results: Path):
    newer = study(
        created="2026-12-02T10:00:00+00:00", figures=(figure("scaling", "time_ms", 1.0, work="gemm", quota="16"),)
    )
    save(study(), results / "h200" / "2026-12-01-abc123.json")
    save(newer, results / "h200" / "2026-12-02-abc124.json")
    assert "2026-12-02" in tables.TABLES["scaling"]()
    assert "2026-12-01" in tables.TABLES["pool"]()


def test_a_kept_speed_up_by_sm_targets_becomes_what_mosaic_knows_of_the_device(
    results: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    older, newer = (figure("first/products", SM_TARGET_SPEEDUP, value) for value in (0.9, 1.2))
    save(study(figures=(older,)), results / "h200" / "2026-12-01-abc123.json")
    save(study(figures=(newer,), created="2026-12-02T10:00:00+00:00"), results / "h200" / "2026-12-02-abc124.json")
    made = tmp_path / "sm_targets.json"
    made.write_text(tables.sm_targets())
    monkeypatch.setattr(sm_targets, "SM_TARGETS", made)
    sm_targets._speedups.cache_clear()
    assert sm_targets.sm_target_speedup("NVIDIA H200") == 1.2
    assert sm_targets.sm_target_pays("NVIDIA H200")
    assert not sm_targets.sm_target_pays("NVIDIA H300")


HEAD = "NVIDIA H200, torch 2.11.0, driver 580.1 (CUDA 13.0), 2026-12-01, commit abc123; medians.\n\n"


def test_the_table_of_models_keeps_measured_and_predicted_apart():
    assert gpu_tables.models_table(study()) == (
        HEAD + "| model | batch | plain, measured | plain, one CUDA graph, measured | plain streams, measured "
        "| green lanes, measured | green lanes, graphs, measured | green lanes, SM targets, measured "
        "| mosaic, measured | mosaic, graphs, measured | roofline's bound, predicted |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
        "| clip | 8 | 50 ms | - | - | 45 ms (1.11x, 0.999 to 1.22), even split by hand | - "
        "| 44 ms, captured, even split by hand "
        "| 40 ms (1.25x, 1.12 to 1.38) | - | 20 ms |\n\n"
        "* plain, one CUDA graph not measured (clip 8): it cannot be had\n"
        "* models/clip/8 cut short: plain streams\n"
    )


def test_a_variant_whose_losses_differ_is_marked():
    differing = figure("models/clip/8", "loss_difference", 0.5, variant="mosaic", plan="gahc")
    assert "LOSSES DIFFER by 0.5" in gpu_tables.models_table(study(figures=(*FIGURES, differing)))


def test_the_table_for_the_terminal_says_what_is_a_dry_run():
    made = study(
        dry_run=True, figures=tuple(dataclasses.replace(f, dry_run=True, part="models/clip/8") for f in FIGURES)
    )
    text = text_table(made)
    assert "DRY RUN" in text
    assert text.count("(dry run)") == len(FIGURES)
    assert "not measured: it cannot be had" in text
    assert "no time for: plain streams" in text
