"""``mosaic bench`` on machines with and without a GPU."""

from __future__ import annotations

import json

import pytest
from user_models import FILE

from mosaic.backends.cuda import driver as cuda
from mosaic.cli.main import run
from mosaic.errors import BackendUnavailableError


@pytest.fixture
def no_gpu(monkeypatch):
    def missing():
        raise BackendUnavailableError("no NVIDIA driver", found="nothing", needed="an NVIDIA driver")

    monkeypatch.setattr(cuda, "describe_driver", missing)


def test_without_a_gpu_a_question_says_what_it_needs_and_exits_with_4(no_gpu, tmp_path, capsys):
    assert run(["bench", "pool", "--output", str(tmp_path)]) == 4
    assert "needed: an NVIDIA driver" in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []


def test_a_users_modules_can_be_measured(tmp_path):
    arguments = ["bench", "scaling", "--backend", "host", "--size", "tiny", "--model", f"{FILE}:make"]
    assert run([*arguments, "--output", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "scaling.json").read_text())
    assert {point["work"].split()[0] for point in written["points"]} == {"left", "right"}


def test_modules_that_wait_for_each_other_do_not_overlap(tmp_path, capsys):
    arguments = ["bench", "overlap", "--backend", "host", "--size", "tiny", "--model", f"{FILE}:make_chain"]
    assert run([*arguments, "--output", str(tmp_path)]) == 1
    assert "independent of each other" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pool", "--backend", "host", "--model", "zoo:clip-tiny"], "--model goes with scaling and overlap"),
        (["pool", "--backend", "host:1"], "device 1 is not there"),
        (["pool", "--backend", "host", "--seconds", "-1"], "a budget is not negative"),
    ],
)
def test_what_does_not_fit_together_is_an_error(arguments, message, tmp_path, capsys):
    assert run(["bench", *arguments, "--output", str(tmp_path)]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_profiling_on_a_gpu_that_is_not_there_exits_with_4(no_gpu, tmp_path):
    output = tmp_path / "profile.json"
    assert run(["profile", "--model", f"{FILE}:make", "--backend", "cuda", "--output", str(output)]) == 4
    assert not output.exists()
