"""``mosaic bench`` on machines with and without a GPU."""

from __future__ import annotations

import json

import pytest
from user_models import FILE

from mosaic.backends.cuda import driver as cuda
from mosaic.cli.main import run
from mosaic.errors import BackendUnavailableError
from mosaic.microbench import QUESTIONS


@pytest.fixture
def no_gpu(monkeypatch):
    def missing():
        raise BackendUnavailableError("no NVIDIA driver", found="nothing", needed="an NVIDIA driver")

    monkeypatch.setattr(cuda, "describe_driver", missing)


@pytest.mark.parametrize("question", list(QUESTIONS))
def test_without_a_gpu_each_question_says_what_it_needs_and_exits_with_4(question, no_gpu, tmp_path, capsys):
    assert run(["bench", question, "--output", str(tmp_path)]) == 4
    assert "needed: an NVIDIA driver" in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("question", list(QUESTIONS))
def test_a_dry_run_on_the_host_leaves_table_json_and_picture(question, tmp_path, capsys):
    arguments = ["bench", question, "--backend", "host", "--size", "tiny", "--output", str(tmp_path), "--json", "-"]
    assert run(arguments) == 0
    output = capsys.readouterr()
    assert json.loads(output.out) == json.loads((tmp_path / f"{question}.json").read_text())
    assert "these times say nothing about a GPU" in " ".join(output.err.split())
    assert (tmp_path / f"{question}.png").read_bytes().startswith(b"\x89PNG")


def test_a_budget_of_nothing_still_leaves_a_file_that_says_so(tmp_path):
    arguments = ["bench", "scaling", "--backend", "host", "--size", "tiny", "--seconds", "0", "--output", str(tmp_path)]
    assert run(arguments) == 0
    assert json.loads((tmp_path / "scaling.json").read_text())["left_out"]


@pytest.mark.parametrize(("question", "key"), [("scaling", "points"), ("overlap", "times")])
def test_a_users_modules_can_be_measured(question, key, tmp_path):
    arguments = ["bench", question, "--backend", "host", "--size", "tiny", "--model", f"{FILE}:make"]
    assert run([*arguments, "--output", str(tmp_path)]) == 0
    written = json.loads((tmp_path / f"{question}.json").read_text())
    assert written[key]
    named = written["modules"] if question == "overlap" else {point["work"].split()[0] for point in written["points"]}
    assert set(named) == {"left", "right"}


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
