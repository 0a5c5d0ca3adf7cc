"""Findings that defeat partitions of SMs, judged from what was seen."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from mosaic.backends.cuda.environment import NvmlAnswers, ask_nvml, find_here, find_in_process, find_on_device


def names_of_findings(environ: dict[str, str], *, num_streams: int | None = 2) -> list[str]:
    return [finding.name for finding in find_in_process(environ, num_streams=num_streams)]


@pytest.mark.parametrize(
    ("percentage", "is_found"),
    [(None, False), ("100", False), (" 100.0 ", False), ("50", True), ("99.9", True), ("all", True), ("", True)],
)
def test_a_share_of_threads_under_mps_is_found_and_all_of_them_are_fine(percentage: str | None, is_found: bool):
    name = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
    environ = {} if percentage is None else {name: percentage}
    assert names_of_findings({**environ, "CUDA_DEVICE_MAX_CONNECTIONS": "32"}) == [name] * is_found


@pytest.mark.parametrize(
    ("setting", "num_streams", "is_enough"),
    [
        (None, 7, True),
        (None, 8, False),
        ("1", 1, False),
        ("2", 1, True),
        ("32", 31, True),
        ("33", 1, False),
        ("many", 1, False),
        (None, None, True),
    ],
)
def test_each_stream_and_the_loops_own_need_a_queue(setting: str | None, num_streams: int | None, is_enough: bool):
    environ = {} if setting is None else {"CUDA_DEVICE_MAX_CONNECTIONS": setting}
    assert (names_of_findings(environ, num_streams=num_streams) == []) == is_enough


def test_an_mps_daemon_is_found_by_its_pipe(tmp_path: Path):
    environ = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    assert names_of_findings(environ) == []
    (tmp_path / "control").write_text("a file is no pipe")
    assert names_of_findings(environ) == []
    (tmp_path / "control").unlink()
    os.mkfifo(tmp_path / "control")
    (finding,) = find_in_process(environ)
    assert (finding.name, finding.description) == ("MPS", f"an MPS daemon listens at {tmp_path / 'control'}")


@pytest.mark.parametrize(
    ("processes", "own", "others"),
    [
        ((), 7, ""),
        ((7,), 7, ""),
        ((7, 8), 7, "8"),
        ((8,), 7, ""),  # in a container this process may be known by another id
        ((8, 9), 7, "8, 9"),
        ((8,), None, "8"),
    ],
)
def test_other_processes_on_the_device_are_found(processes: tuple[int, ...], own: int | None, others: str):
    findings = list(find_on_device(NvmlAnswers(processes=processes), own=own))
    assert bool(findings) == bool(others)
    assert all(f"(ids {others})" in finding.description for finding in findings)


def fake_nvml(*, fails: bool = False) -> SimpleNamespace:
    """``pynvml`` with one device, which does not know of MIG."""
    unsupported = Mock(side_effect=RuntimeError("Not Supported"))
    return SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=Mock(side_effect=RuntimeError("Driver/library version mismatch") if fails else None),
        nvmlShutdown=Mock(),
        nvmlDeviceGetHandleByUUID=lambda uuid: {"GPU-1": uuid}[uuid],
        nvmlDeviceGetComputeRunningProcesses=lambda _: [SimpleNamespace(pid=pid) for pid in (9, os.getpid())],
        nvmlDeviceGetMigMode=unsupported,
    )


@pytest.mark.parametrize("module", [None, fake_nvml(fails=True)])
def test_nvml_that_cannot_be_asked_says_why(monkeypatch: pytest.MonkeyPatch, module: Any):
    monkeypatch.setitem(sys.modules, "pynvml", module)
    assert ask_nvml("GPU-1").problem


def test_this_process_is_judged_by_its_own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    monkeypatch.delenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", raising=False)
    findings = find_here("GPU-1", num_streams=2)
    assert [finding.name for finding in findings] == ["CUDA_DEVICE_MAX_CONNECTIONS", "other processes"]
    assert "(ids 9)" in findings[1].description
