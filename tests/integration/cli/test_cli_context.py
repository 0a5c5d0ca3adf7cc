"""``mosaic plan --context``."""

from __future__ import annotations

from pathlib import Path

import pytest

from mosaic.cli.main import run


def test_a_causal_mask_is_shared_out_beside_other_methods_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    picture = tmp_path / "mask.png"
    assert run(["plan", "--context", "4", "--tokens", "4096", "--picture", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert picture.stat().st_size > 10_000
    assert "4096 tokens over 4 ranks" in printed
    for word in ("headtail", "ring", "random", "counted, not measured"):
        assert word in printed


def test_a_mask_comes_from_a_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "mine.py").write_text(
        "from mosaic.context import gemma\n"
        "def make():\n    return gemma([-1] * 600 + [0] * 300)\n"
        "def draw(tokens, seed):\n    return gemma([-1] * (tokens - seed) + [0] * seed)\n"
        "def wrong():\n    return 3\n"
    )
    assert run(["plan", "--context=2", "--mask", f"{tmp_path}/mine.py:make", "--method", "ring", "--chunk", "2"]) == 0
    assert "900 tokens over 2 ranks" in capsys.readouterr().out
    assert run(["plan", "--context=2", "--mask", f"{tmp_path}/mine.py:draw", "--tokens=1000", "--seed=200"]) == 0
    assert "1000 tokens over 2 ranks" in capsys.readouterr().out
    assert run(["plan", "--context=2", "--mask", f"{tmp_path}/mine.py:wrong"]) == 1
    assert "returned int; return a mosaic.context.MaskWords" in capsys.readouterr().err
    assert run(["plan", "--context=2", "--mask", "sparse"]) == 2
    assert "mask=sparse names no function; write causal, or FILE:FUNCTION" in capsys.readouterr().err


def test_too_few_tokens_for_the_ranks_say_what_to_do(capsys: pytest.CaptureFixture[str]):
    assert run(["plan", "--context", "8", "--tokens", "512"]) == 2
    assert "4 blocks for 8 ranks; each rank needs one: use fewer ranks, smaller blocks" in capsys.readouterr().err
