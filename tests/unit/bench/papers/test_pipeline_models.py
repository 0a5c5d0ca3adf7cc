"""Models of both papers have the parameters of their names."""

from __future__ import annotations

import pytest

from bench.papers.pipeline_models import KNOWN_SHAPES


@pytest.mark.parametrize("name", KNOWN_SHAPES)
def test_shapes_have_the_parameters_of_their_names(name: str) -> None:
    shape = KNOWN_SHAPES[name]
    billions = {"llama-1b": 1.2, "whisper-1b": 1.4}.get(name) or int(name.rpartition("-")[2].removesuffix("b"))
    margin = {"vit-5b": 0.15, "eva-clip-8b": 0.07}.get(name, 0.05)
    assert shape.parameters(with_head=shape.causal) / 1e9 == pytest.approx(billions, rel=margin)
