"""The table of the seven days, and how their folder is edited and watched."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("sklearn", reason="needs the extra demo")

from mosaic.artifact import parse_toml
from mosaic.demo.days.node import Run, with_setting
from mosaic.demo.days.starter import template
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


def test_a_run_that_ends_before_what_was_waited_for_is_an_error_that_says_so(tmp_path: Path):
    printed: list[str] = []
    run = Run(DayFolder(tmp_path), [sys.executable, "-c", "print('hello'); exit(3)"], printed.append)
    with pytest.raises(MosaicError, match="ended with 3 before step 5"):
        run.wait_for_step(5)
    assert run.wait() == 3
    assert printed == ["hello"]
