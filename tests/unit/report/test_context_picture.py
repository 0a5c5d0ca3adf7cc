from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.papers.masks import DRAWN
from mosaic.context import causal, packed, plan_context
from mosaic.report.context_picture import context_canvas, draw_context
from mosaic.report.palette import colors_of

COLORS = list(colors_of(f"rank {rank}" for rank in range(3)).values())


def rgb(color: str) -> list[float]:
    return [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]


def test_each_visible_pair_has_the_colour_of_its_querys_rank():
    plan = plan_context(packed([causal(40), causal(30)]), 3, block=8, method="ring")
    pixels = context_canvas([plan]).figure.axes[0].images[0].get_array()
    seen = plan.mask.dense()
    assert np.array_equal((pixels != 1).any(axis=2), seen)
    for query in range(70):
        expected = rgb(COLORS[plan.distribution.rank_of[query // 8]])
        assert np.allclose(pixels[query][seen[query]], expected)


def test_long_sequences_are_drawn_by_tiles():
    plan = plan_context(DRAWN["mp"](4096, 0), 3)
    canvas = context_canvas([plan, plan_context(DRAWN["mp"](4096, 0), 3, method="zigzag")], title="Two ways")
    pixels = canvas.figure.axes[0].images[0].get_array()
    assert pixels.shape == (32, 32, 3)
    tiles = plan.blocks.tiles(range(32))
    assert (pixels != 1).any(axis=2).sum() == len(tiles.columns)
    said = [text.get_text() for text in canvas.figure.texts]
    assert "Two ways" in said
    assert any(text.startswith("zigzag: rank with most has 1.") for text in said)
    assert "lighter: tiles seen in part" in said


@pytest.mark.parametrize(("ranks", "told"), [(12, range(12)), (40, range(0, 40, 3))])
def test_every_bar_is_a_ranks_and_the_legend_is_within_the_page(ranks: int, told: range):
    canvas = context_canvas([plan_context(packed([causal(300)], num_tokens=330), ranks, block=8)])
    bars = canvas.figure.axes[2]
    assert [label.get_text() for label in bars.get_yticklabels()] == [str(rank) for rank in told]
    said = [text.get_text() for text in canvas.figure.texts]
    assert {"text", "images", "padding"} <= set(said)
    assert ("ranks' colours repeat" in said) == (ranks == 40)


def test_a_picture_is_written_and_nothing_is_refused(tmp_path: Path):
    draw_context(plan_context(causal(64), 2, block=8), tmp_path / "mask.png")
    assert (tmp_path / "mask.png").stat().st_size > 5_000
    with pytest.raises(ValueError, match="there are no plans to draw"):
        context_canvas([])
    with pytest.raises(ValueError, match=r"use .png or .svg"):
        draw_context(plan_context(causal(64), 2, block=8), tmp_path / "mask.gif")
