"""A folder of days: the data that is new, versions with their links and history, and hooks that fail."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.retrain.small_folder import write_day, write_folder, write_recipe
from mosaic.checkpoint.folder import sha256_of
from mosaic.errors import MosaicError
from mosaic.retrain import hooks, steering, versions
from mosaic.retrain.folder import DayState, Folder, Outcome, new_dates, replay_dates
from mosaic.retrain.recipe import Promote, read_recipe

A, B, C = "2026-11-20", "2026-11-21", "2026-11-22"
BEGUN = {"replay": (), "parent": None, "champion": None, "anchor": None, "version": "0001", "began": ""}


def new(folder: Folder) -> tuple[str, ...]:
    return new_dates(folder, read_recipe(folder.recipe))


def replay(folder: Folder) -> tuple[str, ...]:
    return replay_dates(folder, read_recipe(folder.recipe))


def end(folder: Folder, day: str, outcome: Outcome, *dates: str) -> None:
    folder.day(day).set(DayState(day=day, new=dates or (day,), outcome=outcome, **BEGUN))  # type: ignore[arg-type]


def test_ready_days_named_as_dates_are_new_and_missed_ones_are_taken_together(tmp_path: Path):
    folder = write_folder(tmp_path, A, B)
    (write_day(folder.path, C) / "_SUCCESS").unlink()
    write_day(folder.path, "20261123")
    write_day(folder.path, "2026-02-30")
    assert new(folder) == (A, B)
    end(folder, B, "promoted", A, B)
    assert (new(folder), replay(folder)) == ((), (A, B))
    (folder.path / "data" / C / "_SUCCESS").touch()
    assert new(folder) == (C,)
    write_recipe(folder.path, sources={"new": {"path": "data [1]/{day}"}})
    (folder.path / "data").rename(folder.path / "data [1]")
    assert new(folder) == (C,)


def test_only_promoted_days_whose_data_is_there_are_replayed(tmp_path: Path):
    folder = write_folder(tmp_path, A, B, C)
    for day, outcome in ((A, "refused"), (B, "promoted"), (C, "promoted")):
        end(folder, day, outcome)
    assert replay(folder) == (B, C)
    (folder.path / "data" / B / "_SUCCESS").unlink()
    assert replay(folder) == (C,)


def add(folder: Folder, name: str) -> None:
    (folder.path / "weights").write_text(name)
    more = dict.fromkeys(("created", "code", "mosaic", "torch"), "")
    sha256 = sha256_of(folder.path / "weights")
    card = versions.Card(version=name, day=A, parent=None, step=1, sha256=sha256, values={}, **more)
    versions.add(folder, card, folder.path / "weights", folder.path / "train.py")


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Three versions, of which the last is in force."""
    folder = write_folder(tmp_path)
    for name in ("0001", "0002", "0003"):
        add(folder, name)
        versions.promote(folder, name, by="gate")
    return folder


def test_a_reader_resolves_the_link_once_and_always_finds_a_version(folder: Folder):
    ended, seen = threading.Event(), []

    def read() -> None:
        while not ended.is_set():
            version = versions.champion(folder.path)
            seen.append((version.name, version.weights.read_text(), version.card.version))

    reader = threading.Thread(target=read)
    reader.start()
    for turn in range(200):
        versions.point(folder, "champion", f"000{turn % 3 + 1}")
    ended.set()
    reader.join()
    assert seen
    assert all(name == weights == of_card for name, weights, of_card in seen)


def test_rolling_back_goes_to_the_version_before_also_if_lines_are_torn(folder: Folder):
    whole = folder.history.read_bytes()
    folder.history.write_bytes(b'{"event": "prom' + b"\n" + whole + b'{"event": "promoted", "champion": "00')
    assert "champion: 0003" in steering.status_of(folder.path)
    steering.rollback(folder.path)
    assert versions.linked(folder, "champion") == "0002"
    assert "champion: 0002, rolled back from 0003 at 20" in "\n".join(steering.status_of(folder.path))
    assert whole in folder.history.read_bytes()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda path: path.write_text("0O03"), "0003/model.safetensors is gone, or has other bytes"),
        (lambda path: path.unlink(), "0003/model.safetensors is gone, or has other bytes"),
        (lambda path: shutil.rmtree(path.parent), "there is no version '0003'"),
    ],
)
def test_a_damaged_version_is_neither_served_nor_promoted_but_named_and_another_one_is(
    folder: Folder, spoil: Callable[[Path], object], said: str
):
    spoil(versions.find(folder, "3").weights)
    for use in (lambda: versions.champion(folder.path), lambda: steering.promote(folder.path, "0003")):
        with pytest.raises(MosaicError, match=said):
            use()
    status = "\n".join(steering.status_of(folder.path))
    assert f"the champion cannot be served ({said}" in status.replace(f"{folder.path}/versions/", "")
    assert "restore versions/0003" in status
    steering.promote(folder.path, "2")
    assert versions.champion(folder.path).name == "0002"


def test_a_champion_that_a_copy_made_a_folder_is_an_error_with_the_way_out(folder: Folder):
    target = (folder.path / "champion").resolve()
    (folder.path / "champion").unlink()
    shutil.copytree(target, folder.path / "champion")
    with pytest.raises(MosaicError, match=r"is not a link.*mosaic retrain promote"):
        versions.champion(folder.path)


def test_a_promotion_by_a_person_sets_the_anchor_too(folder: Folder):
    steering.promote(folder.path, "1")
    assert (versions.linked(folder, "champion"), versions.linked(folder, "anchor")) == ("0001", "0001")
    assert versions.is_overruled(folder, "0003")


def test_old_versions_and_checkpoints_go_but_those_of_champion_anchor_and_the_champion_before_stay(folder: Folder):
    versions.point(folder, "anchor", "0001")
    for name in ("0004", "0005", "0006"):
        add(folder, name)
    for day, version in ((A, "0004"), (B, "0002"), (C, "0006")):
        folder.day(day).set(DayState(day=day, new=(day,), outcome="promoted", **(BEGUN | {"version": version})))
        (folder.day(day).checkpoints / "00000001-step-1").mkdir(parents=True)
        folder.day(day).model.touch()
    versions.drop_old(folder, 2)
    for day in folder.days():
        assert (day.checkpoints.exists(), day.model.exists()) == (day.path.name != A,) * 2
    assert [each.name for each in versions.all_versions(folder)] == ["0001", "0002", "0003", "0005", "0006"]


@pytest.mark.parametrize(
    ("command", "words"),
    [("exit 3", "ended with 3"), ("./not-there", "ended with 127"), ("sleep 60 & sleep 60", "was ended after 0.3 s")],
)
def test_a_hook_that_fails_or_hangs_is_tried_again_and_stops_no_other(tmp_path: Path, command: str, words: str):
    folder, root = Folder(tmp_path), tmp_path.resolve()
    heard = "echo $MOSAIC_VERSION $MOSAIC_VERSION_FOLDER $MOSAIC_DAY_FOLDER >> heard"
    promote = Promote(hooks=(command, heard), timeout=0.3, tries=2)
    for _ in range(2):  # remembered once
        hooks.remember(folder, promote, "0001", A)
    (first,) = hooks.run_pending(folder, promote, "0001")
    assert words in first
    assert "tried again in the next run" in first
    assert [hook.tries for hook in hooks.pending(folder)] == [1]
    (second,) = hooks.run_pending(folder, promote, "0001")
    assert "given up" in second
    assert hooks.pending(folder) == ()
    assert (tmp_path / "heard").read_text().split() == ["0001", f"{root}/versions/0001", f"{root}/days/{A}"]
    hooks.remember(folder, promote, "0002", A)
    assert hooks.run_pending(folder, promote, "0003") == ()  # dropped with its version
    assert hooks.pending(folder) == ()
