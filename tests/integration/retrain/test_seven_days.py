"""Two of the demo's days, shortened: one as others, and one with a new task."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("sklearn", reason="needs the extra demo")

from mosaic.demo.days.play import play
from mosaic.retrain.folder import Folder

DAYS = (2, 4)


def test_days_of_the_demo_end_as_they_say_and_their_pages_begin_with_it(tmp_path: Path):
    lines: list[str] = []
    for played in play(tmp_path / "node", lines.append, numbers=DAYS, num_rows=300, num_frozen=500, steps=40):
        assert played.met, "\n".join(lines)
        assert "promoted" in played.checks[0].result
    days = Folder(tmp_path / "node").days()
    assert len(days) == len(DAYS)
    assert all("PROMOTED" in day.page.read_text(encoding="utf-8") for day in days)
