"""A damaged file in a folder of ``mosaic retrain`` is named, with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.retrain.small_folder import write_folder
from mosaic.cli.main import run


@pytest.mark.parametrize("command", ["status", "run"])
def test_a_damaged_file_is_named_with_a_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str):
    day = write_folder(tmp_path / "node", "2026-11-20").day("2026-11-20")
    day.path.mkdir(parents=True)
    (day.path / "state.json").write_text("{ torn")
    assert run(["retrain", command, str(tmp_path / "node")]) == 1
    printed = " ".join(capsys.readouterr().err.split())
    assert "days/2026-11-20/state.json: not valid JSON" in printed
    assert "restore this file from a backup" in printed
    assert "Traceback" not in printed
