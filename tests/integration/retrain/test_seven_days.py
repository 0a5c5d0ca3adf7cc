"""Two of the demo's days, shortened: one as others, and one with a new task."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("sklearn", reason="needs the extra demo")
pytest.importorskip("espeakng_loader", reason="needs the extra demo")

from mosaic.demo.days.play import Played, Scale, play
from mosaic.retrain.folder import Folder

DAYS = (2, 4)
SCALE = Scale(num_rows=300, num_frozen=500, steps=40)


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("days") / "node"


@pytest.fixture(scope="module")
def played(folder: Path, lines: list[str]) -> dict[int, Played]:
    return {one.number: one for one in play(folder, lines.append, numbers=DAYS, scale=SCALE)}


@pytest.mark.parametrize(
    ("number", "found"),
    [
        (2, ["promoted"]),
        (4, ["promoted", "old tensors equal at step 0"]),
    ],
)
def test_a_day_of_the_demo_ends_as_it_says(played: dict[int, Played], lines: list[str], number: int, found: list[str]):
    checks = played[number].checks
    assert played[number].met, "\n".join(lines)
    assert len(checks) == len(found)
    assert all(words in check.result for words, check in zip(found, checks, strict=True))


def test_each_day_has_a_page_that_begins_with_how_it_ended(played: dict[int, Played], folder: Path):
    assert played
    days = Folder(folder).days()
    words = ["PROMOTED", "PROMOTED"]
    assert len(days) == len(words)
    for day, word in zip(days, words, strict=True):
        assert word in day.page.read_text(encoding="utf-8")
