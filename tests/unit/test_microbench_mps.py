"""MPS for ``overlap``: a daemon of our own, never one that is there already, and always ended."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from mosaic.backends.host.backend import HostBackend
from mosaic.errors import BackendUnavailableError
from mosaic.microbench import BenchSettings
from mosaic.microbench.overlap import measure_overlap
from mosaic.microbench.sharing import mps as mps_module
from mosaic.microbench.sharing.mps import private_daemon, rounds_under_mps

CONTROL = """#!/bin/sh
echo "$1 $CUDA_MPS_PIPE_DIRECTORY" >> {log}
if [ "$1" = "-d" ]; then {start}; else cat >> {log}; fi
"""


def put_program(folder: Path, monkeypatch: pytest.MonkeyPatch, start: str = "exit 0") -> Path:
    log = folder / "log"
    program = folder / "nvidia-cuda-mps-control"
    program.write_text(CONTROL.format(log=log, start=start))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "of-somebody-else")
    return log


def test_a_daemon_has_pipes_of_its_own_and_is_told_to_quit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    log = put_program(tmp_path, monkeypatch)
    with pytest.raises(KeyError), private_daemon() as pipes:  # noqa: PT012
        assert pipes.is_dir()
        assert log.read_text().split() == ["-d", str(pipes)]
        raise KeyError
    assert log.read_text().split() == ["-d", str(pipes), str(pipes), "quit"]
    assert not pipes.exists()


def test_a_daemon_that_may_not_be_started_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    put_program(tmp_path, monkeypatch, start="echo 'no permission here' >&2; exit 1")
    with pytest.raises(BackendUnavailableError, match="no permission here"), private_daemon():
        pass


def test_without_the_program_there_is_no_mps(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BackendUnavailableError, match="no nvidia-cuda-mps-control"), private_daemon():
        pass


class FakeClient:
    """Stands for a process; the second one ends later."""

    made: list[str]

    def __init__(self, module: str, argument: str) -> None:
        self.made.append(argument)
        self.number = len(self.made)
        self.pid = 0

    def __enter__(self) -> FakeClient:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def ask(self, request: dict[str, int]) -> int:
        return request["at_ns"] + request["steps"] * self.number * 1_000_000


def test_a_round_ends_with_the_later_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    put_program(tmp_path, monkeypatch)
    monkeypatch.setattr(FakeClient, "made", [], raising=False)
    monkeypatch.setattr(mps_module, "Child", FakeClient)
    settings = dataclasses.replace(BenchSettings.tiny(), rounds=3, steps_per_round=4)
    assert rounds_under_mps((40, 60), 0, settings, backward=True) == (2.0, 2.0, 2.0)
    assert ['"percentage": 40' in FakeClient.made[0], '"percentage": 60' in FakeClient.made[1]] == [True, True]


def test_processes_that_fail_are_a_reason_and_the_daemon_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    log = put_program(tmp_path, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(BackendUnavailableError, match="did not answer"):
        rounds_under_mps((50, 50), 99, BenchSettings.tiny(), backward=False)
    assert log.read_text().split()[-1] == "quit"


def test_on_the_host_mps_is_a_row_with_the_reason():
    result = measure_overlap(HostBackend(num_slots=2), BenchSettings.tiny())
    assert [absent.reason for absent in result.absent if absent.what == "mps"] == [
        "MPS cannot be had (found: the host backend; needed: a GPU)"
    ]
