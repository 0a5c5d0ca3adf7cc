"""``mosaic doctor`` with a GPU, without one, and with what can be wrong about one."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
from typing import Any

import pytest
from fake_driver.harness import FakeDriver
from rich.console import Console

from mosaic.cli.doctor.findings import (
    find_in_environment,
    find_in_host,
    find_in_launch_order,
    find_in_packages,
    find_in_torch,
)
from mosaic.cli.doctor.machine import collect_report, render
from mosaic.cli.doctor.report import HostReport, PackageReport, TorchReport

COLLECT = """
import dataclasses, io, os
from rich.console import Console
from mosaic.cli.doctor.machine import collect_report, render
report = collect_report({"OMP_WAIT_POLICY": "PASSIVE"})
printed = io.StringIO()
render(report, Console(file=printed, width=200))
result = dataclasses.asdict(report) | {"printed": printed.getvalue()}
"""


def printed(report: Any) -> str:
    page = io.StringIO()
    render(report, Console(file=page, width=200))
    return page.getvalue()


def texts(report: dict[str, Any], severity: str) -> list[str]:
    return [one["what"] for one in report["findings"] if one["severity"] == severity]


@pytest.fixture
def no_driver(tmp_path) -> FakeDriver:
    """A libcuda.so.1 that cannot be loaded, so that a real one of this machine is not found either."""
    (tmp_path / "libcuda.so.1").write_text("not a library")
    return FakeDriver(tmp_path)


def collect_without_driver(no_driver: FakeDriver) -> dict[str, Any]:
    script = f"import json, sys\n{COLLECT}\nassert 'torch' not in sys.modules\nprint(json.dumps(result))"
    child = subprocess.run(
        [sys.executable, "-c", script], env=no_driver.environment(), capture_output=True, text=True, timeout=120
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


def test_without_a_gpu_the_doctor_says_so_and_lists_what_works(no_driver: FakeDriver):
    report = collect_without_driver(no_driver)
    assert (report["driver"], report["devices"]) == (None, [])
    assert texts(report, "error") == []
    assert "No NVIDIA GPU can be used here." in report["printed"]
    assert "planning for any described device" in report["printed"]
    assert "the host backend" in report["printed"]


def test_a_gpu_is_described_with_its_slots(fake_driver: FakeDriver):
    report = fake_driver.run(COLLECT, version=13000)
    assert report["driver"]["version"] == "13.0"
    (entry,) = report["devices"]
    assert entry["device"]["num_sms"] == 132
    assert entry["device"]["compute_capability"] == "9.0"
    assert entry["slots"] == {"fine": False, "num_slots": 16, "sms_per_slot": 8, "remainder_sms": 4}
    assert entry["fine_slots"] == {"fine": True, "num_slots": 66, "sms_per_slot": 2, "remainder_sms": 0}
    assert "Fake GPU" in report["printed"]


@pytest.mark.parametrize(
    ("version", "lost"), [(12000, ["cuDeviceGetDevResource", "cuGreenCtxCreate"]), (12040, ["StreamCreate (12.5)"])]
)
def test_an_old_driver_is_an_error_that_names_the_calls_and_the_driver_needed(
    fake_driver: FakeDriver, version: int, lost: list[str]
):
    report = fake_driver.run(COLLECT, version=version)
    errors = " ".join(texts(report, "error"))
    assert all(call in errors for call in lost)
    assert any("CUDA 12.5 or newer" in one["todo"] for one in report["findings"])
    assert report["devices"][0]["device"]["num_sms"] == 132


@pytest.mark.parametrize(
    ("fail", "words"),
    [
        ("cuInit=803", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
        ("cuDeviceGetCount=999", "cuDeviceGetCount"),
        ("cuDeviceGetName=999", "cuDeviceGetName"),
        ("cuDriverGetVersion=999", "cuDriverGetVersion"),
        ("cuDevSmResourceSplitByCount=915", "device 0 cannot be split"),
    ],
)
def test_a_broken_driver_becomes_an_error_in_the_report_and_no_exception(
    fake_driver: FakeDriver, fail: str, words: str
):
    report = fake_driver.run(COLLECT, fail=fail)
    assert any(words in text for text in texts(report, "error"))


def test_a_driver_without_devices_is_a_note(fake_driver: FakeDriver):
    report = fake_driver.run(COLLECT, fail="cuInit=100")
    assert texts(report, "error") == []
    assert any("no device to offer" in text for text in texts(report, "note"))


def test_a_missing_extension_is_an_error_with_the_command_that_builds_it(fake_driver: FakeDriver):
    report = fake_driver.run("import sys; sys.modules['mosaic._C'] = None\n" + COLLECT)
    assert (report["extension_loads"], report["driver"]) == (False, None)
    assert any("pip install -e ." in one["todo"] for one in report["findings"])


def test_a_missing_nvml_package_is_tolerated(fake_driver: FakeDriver):
    report = fake_driver.run("import sys; sys.modules['pynvml'] = None\n" + COLLECT)
    assert report["nvml"] is None
    assert any("NVML" in text for text in texts(report, "warning"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "4"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "many"),
        ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "50"),
    ],
)
def test_settings_that_defeat_partitions_are_warned_of(name: str, value: str):
    (finding,) = find_in_environment({name: value})
    assert finding.severity == "warning"
    assert f"{name}={value}" in finding.what
    assert "unset it" in finding.todo


def test_the_order_of_nccl_s_launches_is_of_interest_where_several_gpus_are():
    (unset,) = find_in_launch_order({}, num_devices=2)
    assert unset.severity == "note"
    assert "NCCL_LAUNCH_ORDER_IMPLICIT is not set" in unset.what
    (other,) = find_in_launch_order({"NCCL_LAUNCH_ORDER_IMPLICIT": "0"}, num_devices=2)
    assert other.severity == "warning"
    assert find_in_launch_order({"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}, num_devices=2) == []
    assert find_in_launch_order({}, num_devices=1) == []


@pytest.mark.parametrize(
    "environ", [{}, {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}, {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100"}]
)
def test_harmless_settings_are_not_mentioned(environ: dict[str, str]):
    assert find_in_environment(environ) == []


def host(**changed: Any) -> HostReport:
    quiet = HostReport(platform="Linux", python="3.11", num_cores=2, num_cores_installed=2, omp_wait_policy="PASSIVE")
    return dataclasses.replace(quiet, **changed)


def test_one_core_and_spinning_threads_are_noted():
    assert find_in_host(host()) == []
    assert "one CPU core" in find_in_host(host(num_cores=1))[0].what
    assert "OMP_WAIT_POLICY is not set" in find_in_host(host(omp_wait_policy=None))[0].what
    assert "OMP_WAIT_POLICY is ACTIVE" in find_in_host(host(omp_wait_policy="ACTIVE"))[0].what


def test_a_missing_package_names_the_command_that_brings_it():
    needed = PackageReport(name="ortools", version=None, extra=None)
    optional = PackageReport(name="matplotlib", version=None, extra="plot")
    there = PackageReport(name="rich", version="15.0.0", extra=None)
    error, note = find_in_packages([needed, optional, there])
    assert (error.severity, error.todo) == ("error", "pip install ortools")
    assert note.severity == "note"
    assert "mosaic-colocate[plot]" in note.todo


def test_a_cpu_build_of_torch_is_a_warning_only_beside_a_gpu():
    cpu, gpu = TorchReport(version="2.13.0+cpu", cuda=None), TorchReport(version="2.13.0", cuda="13.0")
    assert [find_in_torch(torch, has_gpu=True) == [] for torch in (cpu, gpu, None)] == [False, True, True]
    assert find_in_torch(cpu, has_gpu=False) == []


def test_square_brackets_in_a_finding_are_printed_as_they_are():
    report = collect_report({"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "[50]"})
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=[50]" in printed(report)


def test_a_gpu_can_be_used_by_the_backend_only_with_a_torch_that_has_cuda(fake_driver: FakeDriver):
    swap = """
from mosaic.cli.doctor import machine as doctor
from mosaic.cli.doctor.report import TorchReport
doctor._torch = lambda: TorchReport(version="2.13.0", cuda={cuda!r})
"""
    for built_with, says in (("13.0", "the cuda backend"), (None, "splitting the GPU's SMs into slots")):
        report = fake_driver.run(swap.format(cuda=built_with) + COLLECT)
        assert any(says in line for line in report["works"])
    old = fake_driver.run(swap.format(cuda="13.0") + COLLECT, version=12040)
    assert not any("the cuda backend" in line for line in old["works"])


def test_what_compiles_the_probe_is_named_and_missed_only_beside_a_gpu(fake_driver: FakeDriver):
    report = fake_driver.run(COLLECT)
    assert report["probe"] is not None
    assert f"compiled by NVRTC {report['probe']}" in report["printed"]
    without = fake_driver.run("import sys; sys.modules['cuda.bindings'] = None\n" + COLLECT)
    assert without["probe"] is None
    assert any("cannot be probed" in text for text in texts(without, "warning"))


def test_other_users_of_a_gpu_are_warned_of(fake_driver: FakeDriver):
    busy = """
from mosaic.backends.cuda.environment import NvmlAnswers
from mosaic.cli.doctor import findings as doctor_findings
doctor_findings.ask_nvml = lambda uuid: NvmlAnswers(processes=(4711,), mig=True)
"""
    warnings = texts(fake_driver.run(busy + COLLECT), "warning")
    assert any("device 0: other processes use this GPU (ids 4711)" in text for text in warnings)
    assert any("device 0: this GPU is in MIG mode" in text for text in warnings)
