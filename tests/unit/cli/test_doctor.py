"""``mosaic doctor`` on machines with and without a GPU."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_driver.harness import FakeDriver
from rich.console import Console

from mosaic.cli.doctor import examine_machine

COLLECT = """
import dataclasses, io
from rich.console import Console
from mosaic.cli.doctor import examine_machine
diagnosis = examine_machine({})
page = io.StringIO()
diagnosis.print(Console(file=page, width=200))
result = {
    **diagnosis.facts,
    "findings": [dataclasses.asdict(finding) for finding in diagnosis.findings],
    "printed": page.getvalue(),
}
"""


def texts(report: dict[str, Any], severity: str) -> list[str]:
    return [finding["description"] for finding in report["findings"] if finding["severity"] == severity]


def test_without_a_gpu_the_doctor_lists_what_works(tmp_path: Path):
    (tmp_path / "libcuda.so.1").write_text("not a library")  # hides a real one of this machine
    script = f"import json, sys\n{COLLECT}\nassert 'torch' not in sys.modules\nprint(json.dumps(result))"
    environment = FakeDriver(tmp_path).environment()
    child = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    report = json.loads(child.stdout)
    assert (report["driver"], report["devices"]) == (None, [])
    assert texts(report, "error") == []
    for words in ("No NVIDIA GPU can be used here.", "planning for any described device", "the host backend"):
        assert words in report["printed"]


def test_a_gpu_is_described_with_its_slots(fake_driver: FakeDriver):
    report = fake_driver.run(COLLECT, version=13000)
    assert report["driver"]["version"] == "13.0"
    (device,) = report["devices"]
    assert (device["num_sms"], device["compute_capability"]) == (132, "9.0")
    assert device["slots"] == {"num_slots": 16, "sms_per_slot": 8, "remainder_sms": 4}
    assert "Fake GPU" in report["printed"]


BUSY = """
from mosaic.backends.cuda import environment
from mosaic.cli import doctor
environment.ask_nvml = lambda uuid: environment.NvmlAnswers(processes=(4711,), mig=True)
doctor._torch = lambda: {"version": "2.13.0+cpu", "cuda": None}
"""


@pytest.mark.parametrize(
    ("before", "driver", "severity", "words"),
    [
        ("", {"version": 12040}, "error", "StreamCreate (12.5)"),
        ("", {"fail": "cuInit=803"}, "error", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
        ("", {"fail": "cuDevSmResourceSplitByCount=915"}, "error", "device 0 cannot be split"),
        ("import sys; sys.modules['mosaic._C'] = None\n", {}, "error", "the extension mosaic._C does not load"),
        (BUSY, {}, "warning", "device 0: other processes use this GPU (ids 4711)"),
        (BUSY, {}, "warning", "device 0: this GPU is in MIG mode"),
        (BUSY, {}, "warning", "torch 2.13.0+cpu is built without CUDA"),
    ],
)
def test_a_fault_of_the_machine_is_a_finding(
    fake_driver: FakeDriver, before: str, driver: dict[str, Any], severity: str, words: str
):
    report = fake_driver.run(before + COLLECT, **driver)
    assert any(words in text for text in texts(report, severity))
    assert not any("the cuda backend" in line for line in report["works"]) or not texts(report, "error")


def test_settings_that_defeat_partitions_are_named_as_they_are():
    page = io.StringIO()
    environ = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "[50]", "CUDA_DEVICE_MAX_CONNECTIONS": "4"}
    examine_machine(environ).print(Console(file=page, width=200))
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=[50]" in page.getvalue()
    assert "CUDA_DEVICE_MAX_CONNECTIONS=4" in page.getvalue()
