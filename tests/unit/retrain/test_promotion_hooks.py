"""Commands that run after a promotion may fail or hang."""

from __future__ import annotations

from pathlib import Path

import pytest

from mosaic.retrain.folder import Folder
from mosaic.retrain.hooks import pending, remember, run_pending
from mosaic.retrain.recipe import Promote

DAY = "2026-11-22"


def test_a_hook_gets_the_version_its_folder_and_the_day(tmp_path: Path):
    folder, root = Folder(tmp_path), tmp_path.resolve()
    promote = Promote(hooks=("echo $MOSAIC_VERSION $MOSAIC_VERSION_FOLDER $MOSAIC_DAY_FOLDER > heard",))
    remember(folder, promote, "0001", DAY)
    assert run_pending(folder, promote, "0001") == ()
    assert (tmp_path / "heard").read_text().split() == ["0001", f"{root}/versions/0001", f"{root}/days/{DAY}"]
    assert pending(folder) == ()


@pytest.mark.parametrize(
    ("command", "words"),
    [("exit 3", "ended with 3"), ("./not-there", "ended with 127"), ("sleep 60 & sleep 60", "was ended after 0.3 s")],
)
def test_a_hook_that_fails_or_hangs_is_tried_again_and_stops_no_other(tmp_path: Path, command: str, words: str):
    folder = Folder(tmp_path)
    promote = Promote(hooks=(command, "echo again >> heard"), timeout="0.3s", tries=2)
    remember(folder, promote, "0001", DAY)
    (first,) = run_pending(folder, promote, "0001")
    assert words in first
    assert "tried again in the next run" in first
    assert [hook.tries for hook in pending(folder)] == [1]
    (second,) = run_pending(folder, promote, "0001")
    assert "given up" in second
    assert pending(folder) == ()
    assert (tmp_path / "heard").read_text().split() == ["again"]


def test_a_hook_is_remembered_once_and_dropped_with_its_version(tmp_path: Path):
    folder, promote = Folder(tmp_path), Promote(hooks=("false",))
    for _ in range(2):
        remember(folder, promote, "0001", DAY)
    assert len(pending(folder)) == 1
    assert run_pending(folder, promote, "0002") == ()
    assert pending(folder) == ()
