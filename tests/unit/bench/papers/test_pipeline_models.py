"""Models of both papers: parameters, operations, degrees, bytes."""

from __future__ import annotations

import pytest

from bench.papers.pipeline_layers import LayerStack
from bench.papers.pipeline_models import KNOWN_SHAPES, find_known_model


@pytest.mark.parametrize("name", KNOWN_SHAPES)
def test_shapes_have_the_parameters_of_their_names(name: str) -> None:
    shape = KNOWN_SHAPES[name]
    billions = {"llama-1b": 1.2, "whisper-1b": 1.4}.get(name) or int(name.rpartition("-")[2].removesuffix("b"))
    margin = {"vit-5b": 0.15, "eva-clip-8b": 0.07}.get(name, 0.05)
    assert shape.parameters(with_head=shape.causal) / 1e9 == pytest.approx(billions, rel=margin)


@pytest.mark.parametrize("name", ["vlm-s", "t2v-s", "vlm-xl-16k"])
def test_a_step_has_six_operations_for_each_parameter_and_token_and_those_of_attention(name: str) -> None:
    known = find_known_model(name)
    microbatch = known.microbatch()
    for module in known.model().modules:
        assert isinstance(module, LayerStack)
        units = module.units(microbatch)
        load = module.intake.load(microbatch, units)
        shape, tokens = module.shape, load.sequences * load.tokens
        scores = 4 * tokens * load.tokens * shape.query_width * shape.layers / (2 if shape.causal else 1)
        across = 4 * tokens * load.context * shape.query_width * shape.layers if shape.cross else 0
        # keys and values across are of the text's tokens, not of these; a table of tokens is only looked up
        weights = (
            shape.layers * shape.layer_parameters + (shape.patch + shape.vocabulary * module.has_head) * shape.hidden
        )
        weights -= 2 * shape.hidden * shape.key_width * shape.layers if shape.cross else 0
        assert 3 * module.forward_flops(microbatch, units) == pytest.approx(
            6 * weights * tokens + 3 * (scores + across), rel=0.03
        )
