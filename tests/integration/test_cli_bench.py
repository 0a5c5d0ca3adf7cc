"""``mosaic bench`` on machines with and without a GPU."""

from __future__ import annotations

import json

import pytest

from mosaic import artifact
from mosaic.backends.cuda.driver import driver as cuda
from mosaic.cli.main import run
from mosaic.errors import BackendUnavailableError
from mosaic.microbench import QUESTIONS

MODEL = """
import torch
from torch import nn

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)
    def forward(self, x):
        return self.left(x) + self.right(x)

class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
    def forward(self, x):
        return self.second(self.first(x))

def make():
    return Two(), torch.ones(2, 8)

def make_chain():
    return Chain(), torch.ones(2, 8)
"""


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
    arguments = ["bench", question, "--backend", "host", "--tiny", "--output", str(tmp_path), "--json", "-"]
    assert run(arguments) == 0
    output = capsys.readouterr()
    result = artifact.load(QUESTIONS[question].result, tmp_path / f"{question}.json")
    assert artifact.parse(QUESTIONS[question].result, output.out, source="stdout") == result
    assert "these times say nothing about a GPU" in " ".join(output.err.split())
    assert (tmp_path / f"{question}.png").read_bytes().startswith(b"\x89PNG")


def test_a_budget_of_nothing_still_leaves_a_file_that_says_so(tmp_path):
    arguments = ["bench", "scaling", "--backend", "host", "--tiny", "--seconds", "0", "--output", str(tmp_path)]
    assert run(arguments) == 0
    assert json.loads((tmp_path / "scaling.json").read_text())["left_out"]


@pytest.mark.parametrize(("question", "key"), [("scaling", "points"), ("overlap", "times")])
def test_a_users_modules_can_be_measured(question, key, tmp_path):
    path = tmp_path / "two_linears.py"
    path.write_text(MODEL)
    arguments = ["bench", question, "--backend", "host", "--tiny", "--model", f"{path}:make"]
    assert run([*arguments, "--output", str(tmp_path)]) == 0
    written = json.loads((tmp_path / f"{question}.json").read_text())
    assert written[key]
    named = written["modules"] if question == "overlap" else {point["work"].split()[0] for point in written["points"]}
    assert set(named) == {"left", "right"}


def test_modules_that_wait_for_each_other_do_not_overlap(tmp_path, capsys):
    path = tmp_path / "a_chain.py"
    path.write_text(MODEL)
    arguments = ["bench", "overlap", "--backend", "host", "--tiny", "--model", f"{path}:make_chain"]
    assert run([*arguments, "--output", str(tmp_path)]) == 1
    assert "independent of each other" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pool", "--model", "a.py:make"], "--model goes with scaling and overlap"),
        (["pool", "--device", "1"], "device 1 is not there"),
        (["pool", "--seconds", "-1"], "a budget is not negative"),
    ],
)
def test_what_does_not_fit_together_is_an_error(arguments, message, tmp_path, capsys):
    assert run(["bench", *arguments, "--backend", "host", "--output", str(tmp_path)]) == 1
    assert message in " ".join(capsys.readouterr().err.split())


def test_profiling_on_a_gpu_that_is_not_there_exits_with_4(no_gpu, tmp_path):
    path = tmp_path / "two_linears.py"
    path.write_text(MODEL)
    output = tmp_path / "profile.json"
    assert run(["profile", "--model", f"{path}:make", "--backend", "cuda", "--output", str(output)]) == 4
    assert not output.exists()
