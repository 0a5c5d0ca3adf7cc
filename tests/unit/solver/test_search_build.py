"""How the search is compiled: so that it gives the same answer on any machine."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[3]
LOOSE = ("-ffast-math", "-funsafe-math-optimizations", "-Ofast", "-fassociative-math", "-ffp-contract=fast")


def test_the_search_rounds_every_product_so_that_processors_with_fused_steps_choose_the_same() -> None:
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    assert "-ffp-contract=off" in setup
    for text in (setup, *(path.read_text(encoding="utf-8") for path in (ROOT / "csrc").rglob("*.cpp"))):
        assert not [flag for flag in LOOSE if flag in text]
