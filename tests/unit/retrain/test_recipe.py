"""Recipes: errors have the line, the rule and the way out; windows open and close at UTC times."""

from __future__ import annotations

import os
from datetime import UTC, datetime, time
from pathlib import Path

import pytest

from mosaic.cli.main import run as command_line
from mosaic.errors import InvalidRecipeError
from mosaic.retrain.recipe import Budget, Recipe, read_recipe

TEXT = """\
model = "train.py:Towers"
data = "train.py:Rows"
loss = "train.py:loss"
score = "train.py:score"
[sources]
new = { path = "data/{day}" }
frozen = "data/frozen"
[budget]
batch = 16
"""


def read(folder: Path, text: str) -> Recipe:
    (folder / "retrain.toml").write_text(text)
    return read_recipe(folder / "retrain.toml")


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("batch = 16", "", "budget.batch: "),
        ("batch = 16", "bach = 16", "budget.bach: Unexpected keyword argument; docs/retraining.md lists"),
        ("batch = 16", "batch = 5\nranks = 3\nmicro_batches = 4", "budget: batch=5 .*take a batch of 6"),
        ("batch = 16", "batch = 16\nsave = '5 hours'", "budget.save: '5 hours' .*'90s', '5min' or '2h'"),
        ("batch = 16", "batch = 16\nafter = '01:00Z'", "budget: after = 01:00Z .*set until"),
        ("batch = 16", "batch = 16\npipeline = true", "budget.pipeline: Unexpected keyword"),
        ("data/{day}", "data", "sources.new: path='data' needs {day} once.*'data/{day}'"),
        ('model = "train.py:Towers"', 'model = "Towers"', "model: 'Towers' is not FILE:NAME"),
        ('loss = "train.py:loss"', 'loss = "train.py:loss"\ndevice = "gpu"', "device: .*'auto', 'cpu' or 'cuda'"),
        ('loss = "train.py:loss"', 'loss = "train.py:loss"\nexport = "ema"', "there is no 'companions'"),
        ("[budget]", "[gate]\nmargin = 0.0\n[budget]", "gate: margin = 0.0 must be above 0"),
        ("[budget]", "[promote]\ntimeout = '0s'\n[budget]", "promote.timeout: '0s' is no time above 0"),
    ],
)
def test_a_wrong_key_is_refused_with_rule_and_remedy_and_nothing_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], before: str, after: str, said: str
):
    assert before in TEXT
    with pytest.raises(InvalidRecipeError, match=said):
        read(tmp_path, TEXT.replace(before, after))
    assert command_line(["retrain", "run", str(tmp_path)]) == 2
    assert "retrain.toml" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["retrain.toml"]


def test_a_folder_without_a_recipe_says_how_to_make_one(tmp_path: Path):
    assert command_line(["retrain", "run", str(tmp_path)]) == 2
    with pytest.raises(InvalidRecipeError, match="mosaic retrain init"):
        read_recipe(tmp_path / "retrain.toml")
    (tmp_path / "retrain.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidRecipeError, match=r"retrain.toml: not valid TOML"):
        read_recipe(tmp_path / "retrain.toml")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidRecipeError, match="is not a regular file"):
        read_recipe(tmp_path / "pipe")


def at(text: str) -> datetime:
    return datetime.fromisoformat(text)


@pytest.mark.parametrize(
    ("now", "opens", "deadline"),
    [
        ("2026-11-22T00:59Z", "2026-11-22T01:00Z", "2026-11-22T05:30Z"),
        ("2026-11-22T01:00Z", None, "2026-11-22T05:30Z"),
        ("2026-11-22T05:29:59Z", None, "2026-11-22T05:30Z"),
        ("2026-11-22T05:30Z", "2026-11-23T01:00Z", "2026-11-23T05:30Z"),
        ("2026-11-22T23:00Z", "2026-11-23T01:00Z", "2026-11-23T05:30Z"),
    ],
)
def test_a_window_is_open_from_after_to_until(now: str, opens: str | None, deadline: str):
    budget = Budget(batch=1, after=time(1, tzinfo=UTC), until=time(5, 30, tzinfo=UTC))
    assert budget.opens(at(now)) == (None if opens is None else at(opens))
    assert budget.deadline(at(now)) == at(deadline)
