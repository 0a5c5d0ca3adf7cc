"""The study of pipelines that run, at sizes that take a moment."""

from __future__ import annotations

from functools import partial

from bench.pipeline.measured.steps import Sizes, steps
from bench.ranks.launch import on_ranks

SIZES = Sizes(width=64, layers=2, microbatches=2, steps=1, rounds=1, plan_s=0.0)


def test_a_chain_is_run_by_all_ways_with_the_same_losses():
    work = partial(steps, name="llama", sizes=SIZES)
    figures = {figure.name: figure for figure in on_ranks(work, 2, 100) if figure.source == "measured"}
    for name in ("1f1b", "gpipe"):
        ratio = figures[f"llama, 2 ranks: {name}: step over the planned one's, ratio"]
        assert ratio.value is not None, ratio.reason
        assert ratio.value > 0
    assert len(figures["llama, 2 ranks: planned: step, ms"].samples) == 1
