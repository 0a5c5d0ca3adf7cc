"""The table of the seven days, and how their folder is edited and watched."""

from __future__ import annotations

import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn", reason="needs the extra demo")

from mosaic.artifact import parse_toml
from mosaic.demo.days.node import Node, Run, with_setting
from mosaic.demo.days.play import FIRST_DAY, MODALITIES, Today, other_ranks
from mosaic.demo.days.starter import TEMPLATES, template
from mosaic.errors import MosaicError
from mosaic.retrain.folder import DayFolder
from mosaic.retrain.recipe import Recipe


@pytest.mark.parametrize(
    ("table", "key", "value", "read"), [("budget", "steps", "7", 7), ("promote", "hooks", '["true"]', ("true",))]
)
def test_one_setting_of_a_recipe_changes_and_all_others_stay(table: str, key: str, value: str, read: object):
    text = template("retrain.toml").decode()
    changed = with_setting(text, table, key, value)
    recipe = parse_toml(Recipe, changed, source="retrain.toml")
    assert getattr(getattr(recipe, table), key) == read
    before, after = tomllib.loads(text), tomllib.loads(changed)
    after.get(table, {}).pop(key, None)
    before.get(table, {}).pop(key, None)
    assert {name: part for name, part in after.items() if part} == {name: part for name, part in before.items() if part}


def node_with_template(path: Path) -> Node:
    for name in TEMPLATES:
        (path / name).write_bytes(template(name))
    return Node(path, lambda line: None)


def test_text_that_a_file_has_not_once_is_not_replaced(tmp_path: Path):
    node = node_with_template(tmp_path)
    with pytest.raises(MosaicError, match="0 times"):
        node.edit("train.py", "MODALITIES = ()", "")
    assert (tmp_path / "train.py").read_bytes() == template("train.py")
    node.edit("train.py", MODALITIES, "MODALITIES = SHAPES")  # the new task is one line
    assert "MODALITIES = SHAPES" in (tmp_path / "train.py").read_text()


def test_a_run_that_ends_before_what_was_waited_for_is_an_error_that_says_so(tmp_path: Path):
    printed: list[str] = []
    run = Run(DayFolder(tmp_path), [sys.executable, "-c", "print('hello'); exit(3)"], printed.append)
    with pytest.raises(MosaicError, match="ended with 3 before step 5"):
        run.wait_for_step(5)
    assert run.wait() == 3
    assert printed == ["hello"]


def test_two_ranks_train_on_cores_where_a_machine_has_one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    monkeypatch.setattr("mosaic.demo.days.node._RETRAIN", (sys.executable, "-c", code))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "all")
    printed: list[str] = []
    for gpus, devices in ((0, "all"), (1, ""), (2, "all")):
        folder = tmp_path / str(gpus)
        folder.mkdir()
        node = replace(node_with_template(folder), say=printed.append)
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        with pytest.raises(MosaicError, match="before step 5"):
            list(other_ranks(Today(node, FIRST_DAY, steps=10)))
        assert printed[-1] == devices
