"""The study of ranks at sizes that take a moment: every figure has a name, a source, samples, or a reason."""

from __future__ import annotations

from functools import partial

from bench.ranks.launch import on_ranks
from bench.ranks.measured import links, moved, peak


def test_what_is_measured_on_two_ranks_has_a_name_and_samples():
    found = list(on_ranks(partial(moved, model="clip", batch=2, steps=2), 2, 120))
    names = [figure.name for figure in found]
    assert len(set(names)) == len(names)
    ratio = next(figure for figure in found if figure.name.startswith("rows moved in a step over the least"))
    assert ratio.value is not None
    assert ratio.value >= 1.0
    for figure in found:
        assert figure.value is None or len(figure.samples) == int(figure.labels["samples"])
    assert any(figure.name.startswith("overlap") for figure in found)
    sources = {figure.name: figure.source for figure in on_ranks(links, 2, 120)}
    assert sources["rows of 64 KiB from 2 ranks to one, ms"] == "measured"
    assert sources["rows of 64 KiB from 2 ranks to one, predicted, ms"] == "predicted"
    (grown,) = on_ranks(partial(peak, model="clip", batch=2, with_mosaic=False), 2, 120)
    assert grown.value == max(grown.samples) > 0
