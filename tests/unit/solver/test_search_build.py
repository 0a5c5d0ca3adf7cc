"""How the search is compiled: so that it gives the same answer on any machine."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import setuptools

ROOT = Path(__file__).parents[3]
LOOSE = ("-ffast-math", "-funsafe-math-optimizations", "-Ofast", "-fassociative-math", "-ffp-contract=fast")


@pytest.fixture
def extensions(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The extensions of setup.py, by name."""
    found: list[Any] = []
    monkeypatch.setattr(setuptools, "setup", lambda **given: found.extend(given["ext_modules"]))
    runpy.run_path(str(ROOT / "setup.py"))
    return {extension.name: extension for extension in found}


def test_the_search_rounds_every_product_so_that_processors_with_fused_steps_choose_the_same(
    extensions: dict[str, Any],
) -> None:
    assert extensions["mosaic._search"].extra_compile_args[-1:] == ["-ffp-contract=off"]
    for extension in extensions.values():
        texts = [(ROOT / source).read_text(encoding="utf-8") for source in extension.sources]
        assert texts
        assert not [flag for flag in LOOSE if flag in (*extension.extra_compile_args, *texts)]
        assert not [flag for flag in LOOSE for text in texts if flag in text]
