"""New data, read off the folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.retrain.small_folder import write_day, write_folder
from mosaic.retrain.folder import DayState, Folder, Outcome, new_dates, replay_dates
from mosaic.retrain.recipe import read_recipe

A, B, C = "2026-11-20", "2026-11-21", "2026-11-22"
BEGUN = {"replay": (), "parent": None, "champion": None, "anchor": None, "version": "0001", "began": ""}


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return write_folder(tmp_path, A, B)


def new(folder: Folder) -> tuple[str, ...]:
    return new_dates(folder, read_recipe(folder.recipe))


def replay(folder: Folder) -> tuple[str, ...]:
    return replay_dates(folder, read_recipe(folder.recipe))


def end(folder: Folder, day: str, outcome: Outcome, *dates: str) -> None:
    folder.day(day).set(DayState(day=day, new=dates or (day,), outcome=outcome, **BEGUN))  # type: ignore[arg-type]


def test_days_that_were_missed_are_new_together(folder: Folder):
    assert new(folder) == (A, B)
    end(folder, B, "promoted", A, B)
    assert new(folder) == ()
    assert replay(folder) == (A, B)


def test_a_folder_counts_once_it_is_marked_ready_and_is_named_as_a_date(folder: Folder):
    (write_day(folder.path, C) / "_SUCCESS").unlink()
    write_day(folder.path, "20261123")
    write_day(folder.path, "2026-02-30")
    assert new(folder) == (A, B)
    (folder.path / "data" / C / "_SUCCESS").touch()
    assert new(folder) == (A, B, C)


def test_only_promoted_days_whose_data_is_there_are_replayed(folder: Folder):
    write_day(folder.path, C)
    for day, outcome in ((A, "refused"), (B, "promoted"), (C, "promoted")):
        end(folder, day, outcome)
    assert replay(folder) == (B, C)
    (folder.path / "data" / B / "_SUCCESS").unlink()
    assert replay(folder) == (C,)
