"""Versions, the links to them, and the history that knows the way back."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from mosaic.retrain import steering, versions
from mosaic.retrain.folder import Folder
from mosaic.retrain.versions import Card

RECIPE = """
model = "train.py:a"
data = "train.py:a"
loss = "train.py:a"
score = "train.py:a"
sources = { frozen = "frozen", new = { path = "data/{day}" } }
budget = { batch = 1 }
"""


def add(folder: Folder, name: str) -> None:
    (folder.path / "weights").write_text(name)
    more = dict.fromkeys(("created", "sha256", "code", "mosaic", "torch"), "")
    card = Card(version=name, day="2026-11-20", parent=None, step=1, values={}, **more)  # type: ignore[arg-type]
    versions.add(folder, card, folder.path / "weights", folder.path / "train.py")


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Three versions, of which the last is in force."""
    (tmp_path / "train.py").write_text("")
    (tmp_path / "retrain.toml").write_text(RECIPE)
    folder = Folder(tmp_path)
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


def test_a_promotion_by_a_person_sets_the_anchor_too(folder: Folder):
    steering.promote(folder.path, "1")
    assert (versions.linked(folder, "champion"), versions.linked(folder, "anchor")) == ("0001", "0001")
    assert versions.is_overruled(folder, "0003")
    assert not versions.is_overruled(folder, "0004")


def test_old_versions_go_but_champion_anchor_and_the_champion_before_stay(folder: Folder):
    versions.point(folder, "anchor", "0001")
    for name in ("0004", "0005", "0006"):
        add(folder, name)
    versions.drop_old(folder, 2)
    assert [each.name for each in versions.all_versions(folder)] == ["0001", "0002", "0003", "0005", "0006"]
