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


@pytest.mark.parametrize("name", ["vlm-l", "t2v-s", "vlm-xl-16k", "cornstarch-alm-m-llm-m"])
def test_every_model_gives_finite_layers_that_fit_its_devices(name: str) -> None:
    known = find_known_model(name)
    model, microbatch = known.model(), known.microbatch()
    assert {feed.target for feed in model.feeds} <= {model.modules[-1].name}
    for module in model.modules:
        layers = module.layers(microbatch, module.units(microbatch))
        assert len(layers) == len(module.trains)
        assert all(layer.forward_ms > 0 and layer.backward_ms > 0 for layer in layers)
        for layer in layers:
            keep, *others = layer.strategies
            assert keep.name == "keep"
            assert {one.name for one in others} == {"recompute"}
            assert all(0 <= one.kept_bytes <= keep.kept_bytes for one in others)
            assert layer.workspace_bytes >= 0
    resident = sum(module.state_bytes(0, len(module.trains)) for module in model.modules)
    memory = known.cluster().hardware.memory_bytes
    assert resident < memory * known.degrees.pipeline
