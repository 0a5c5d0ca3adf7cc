"""The pictures of ``mosaic bench``: what they show, and that they cope with nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from mosaic.report.charts import Bar, Line, Words, draw_bars, draw_lines, draw_matrix

WORDS = Words(title="A title", subtitle="Where and when", x_axis="milliseconds", y_axis="speed")


def test_pictures_have_their_words_values_and_reasons(tmp_path: Path):
    lines = [Line(name="gemm", points=((0.5, 0.6, 0.5, 0.7), (1.0, 1.0, 0.9, 1.1))), Line(name="empty", points=())]
    draw_lines(lines, WORDS, tmp_path / "lines.svg", level=1.0)
    bars = [
        Bar(name="lend", group="pool", value=2.0, quartiles=(1.0, 3.0), text="2 ms"),
        Bar(name="other", text="not measured: no GPU"),
    ]
    draw_bars(bars, WORDS, tmp_path / "bars.svg")
    draw_matrix(["a", "b"], ["c", "d"], {("a", "c"): 1.25, ("b", "d"): 0.75}, WORDS, tmp_path / "matrix.svg")
    told = {path.stem: path.read_text() for path in tmp_path.iterdir()}
    assert all(f"<!-- {word} -->" in told["lines"] for word in ("gemm", "A title"))
    assert "<!-- 2 ms -->" in told["bars"]
    assert "not measured: no GPU" in told["bars"]
    assert [told["matrix"].count(f"<!-- {cell} -->") for cell in ("1.25", "0.75")] == [1, 1]


def test_nothing_measured_is_a_picture_that_says_so(tmp_path: Path):
    draw_lines([], WORDS, tmp_path / "lines.svg")
    draw_bars([], WORDS, tmp_path / "bars.svg")
    draw_matrix([], [], {}, WORDS, tmp_path / "matrix.svg")
    assert all("nothing was measured" in path.read_text() for path in tmp_path.iterdir())


def test_other_suffixes_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"\.png or \.svg"):
        draw_bars([], WORDS, tmp_path / "bars.gif")
