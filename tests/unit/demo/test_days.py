"""The folder that ``init`` writes, its days, and how the demo edits and watches it."""

from __future__ import annotations

import json
import sys
import tomllib
from datetime import date
from pathlib import Path

import pytest

pytest.importorskip("sklearn", reason="needs the extra demo")

from mosaic.artifact import parse_toml
from mosaic.demo.days.digits import DayKind, template, write_day, write_starter
from mosaic.demo.days.play import Node, Run
from mosaic.errors import MosaicError
from mosaic.retrain.folder import DayFolder
from mosaic.retrain.recipe import Recipe

DAY = date(2026, 11, 22)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("starter") / "robot"
    write_starter(folder, DAY)
    return folder


def test_what_is_there_is_not_overwritten_and_nothing_else_is_written(tmp_path: Path):
    (tmp_path / "train.py").write_text("mine")
    with pytest.raises(MosaicError, match=r"train\.py is there already"):
        write_starter(tmp_path, DAY)
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    assert (tmp_path / "train.py").read_text() == "mine"


def test_the_same_seed_makes_the_same_bytes(tmp_path: Path):
    for name in ("once", "again"):
        write_day(tmp_path / name, DayKind(num_rows=30, mix={"image+audio": 0.5, "imu": 0.5}), seed=3)
    for file in ("rows.safetensors", "index.jsonl"):
        assert (tmp_path / "once" / file).read_bytes() == (tmp_path / "again" / file).read_bytes()


def clusters(folder: Path, kind: str) -> set[str]:
    rows = [json.loads(line) for line in (folder / "index.jsonl").read_text().splitlines()]
    return {row["cluster"] for row in rows if row["cluster"].startswith(kind)}


@pytest.mark.parametrize("kind", ["writer", "voice"])
def test_the_frozen_set_shares_no_voice_and_no_block_of_scans_with_a_day(folder: Path, kind: str):
    frozen, day = (clusters(folder / "data" / name, kind) for name in ("frozen", "2026-11-22"))
    assert len(frozen) >= 20
    assert len(day) >= 20
    assert not frozen & day


@pytest.mark.parametrize(
    ("table", "key", "value", "read"), [("budget", "steps", "7", 7), ("promote", "hooks", '["true"]', ("true",))]
)
def test_one_setting_of_a_recipe_changes_and_all_others_stay(
    tmp_path: Path, table: str, key: str, value: str, read: object
):
    text = template("retrain.toml").decode()
    path = tmp_path / "retrain.toml"
    path.write_text(text)
    Node(tmp_path, print).set(**{f"{table}__{key}": value})
    changed = path.read_text()
    recipe = parse_toml(Recipe, changed, source="retrain.toml")
    assert getattr(getattr(recipe, table), key) == read
    before, after = tomllib.loads(text), tomllib.loads(changed)
    after.get(table, {}).pop(key, None)
    before.get(table, {}).pop(key, None)
    assert {name: part for name, part in after.items() if part} == {name: part for name, part in before.items() if part}


def test_a_run_that_ends_before_what_was_waited_for_is_an_error_that_says_so(tmp_path: Path):
    printed: list[str] = []
    run = Run(DayFolder(tmp_path), [sys.executable, "-c", "print('hello'); exit(3)"], printed.append, {})
    with pytest.raises(MosaicError, match="ended with 3 before step 5"):
        run.wait_for_step(5)
    assert run.wait() == 3
    assert printed == ["hello"]
