"""`mosaic run` refuses options that exclude each other."""

from __future__ import annotations

import pytest

from mosaic.cli import main


@pytest.mark.parametrize("extra", [["--plan", "p.json"], ["--method", "gahc"]])
def test_comparing_all_methods_and_naming_one_is_refused(extra: list[str], capsys: pytest.CaptureFixture[str]):
    assert main.run(["run", "--model", "zoo:clip-tiny", "--compare", *extra]) == 2
    assert "leave --plan and --method out" in capsys.readouterr().err
