"""The study of pipelines that run at sizes that take a moment: figures have a source, samples, or a reason."""

from __future__ import annotations

from functools import partial

import pytest

from bench.pipeline.measured.steps import Sizes, steps
from bench.ranks.launch import on_ranks
from bench.record import Figure

SIZES = Sizes(width=64, layers=2, microbatches=2, steps=1, rounds=1, plan_s=0.0)


@pytest.fixture(scope="module")
def llama() -> list[Figure]:
    return list(on_ranks(partial(steps, name="llama", sizes=SIZES), 2, 100))


def by_name(figures: list[Figure]) -> dict[str, Figure]:
    return {one.name: one for one in figures if one.source == "measured"}


def test_a_chain_is_run_by_all_ways_and_by_torch_with_the_same_losses(llama: list[Figure]):
    found = by_name(llama)
    for name in ("1f1b", "gpipe", "torch's Schedule1F1B"):
        ratio = found[f"llama, 2 ranks: {name}: step over the planned one's, ratio"]
        assert ratio.value is not None, ratio.reason
        assert ratio.value > 0
    assert len(found["llama, 2 ranks: planned: step, ms"].samples) == 1
