"""Models of both papers: parameters, operations, degrees, bytes."""

from __future__ import annotations

import pytest

from bench.papers.pipeline_layers import LayerStack, ModuleLoad, TransformerShape
from bench.papers.pipeline_models import KNOWN_MODELS, find_known_model
from bench.papers.pipeline_shapes import KNOWN_SHAPES
from mosaic.hardware import find_cluster
from mosaic.pipelining.rank_hardware import Degrees
from mosaic.pipelining.workload.microbatch import Microbatch


def module_of(name: str, module: str, **degrees: int) -> LayerStack:
    model = find_known_model(name).model(degrees=Degrees(**degrees) if degrees else None)
    found = next(one for one in model.modules if one.name == module)
    assert isinstance(found, LayerStack)
    return found


@pytest.mark.parametrize("name", KNOWN_SHAPES)
def test_shapes_have_the_parameters_of_their_names(name: str) -> None:
    known = KNOWN_SHAPES[name]
    counted = known.shape.parameters(with_head=known.shape.causal) / 1e9
    margin = {"vit-5b": 0.15, "vit-2b": 0.08, "eva-clip-8b": 0.07}.get(name, 0.05)
    assert counted == pytest.approx(known.billions, rel=margin)


def test_llama_has_its_published_parameters_but_for_norms() -> None:
    assert KNOWN_SHAPES["llama3-8b"].shape.parameters(with_head=True) == pytest.approx(8_030_261_248, rel=1e-4)
    assert KNOWN_SHAPES["llama-1b"].shape.parameters(with_head=True) == pytest.approx(1_235_814_400, rel=1e-4)


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


def test_all_of_both_papers_models_are_there_with_their_degrees() -> None:
    assert len(KNOWN_MODELS) == 11 + 3 * 15
    gpus = {"vlm-s": 16, "vlm-m": 32, "vlm-l": 64, "t2v-s": 16, "t2v-l": 64}
    gpus |= {"vlm-xl-8k": 8192, "vlm-xl-16k": 16384, "t2v-xl-3k": 3072, "t2v-xl-6k": 6144, "lm-7b": 8, "vlm-7b": 8}
    assert {name: find_known_model(name).degrees.num_devices for name in gpus} == gpus
    largest = find_known_model("cornstarch-valm-ml-llm-s")
    assert (largest.ranks, largest.colocated_ranks, largest.degrees.pipeline) == ((2, 4, 3), (5, 1), 9)


@pytest.mark.parametrize("name", ["vlm-l", "t2v-s", "vlm-xl-16k", "cornstarch-valm-ml-llm-m"])
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


def test_frozen_models_train_projectors_only() -> None:
    vision, audio, text = find_known_model("cornstarch-valm-sm-llm-l").model().modules
    assert sum(vision.trains) == sum(audio.trains) == 1
    assert vision.trains[-1]
    assert not any(text.trains)
    assert vision.num_parameters(40, 1) == 1408 * 5120
    frozen = vision.num_parameters(0, 40)
    assert vision.state_bytes(0, 40) == frozen * 2 // 2
    assert vision.state_bytes(40, 1) == vision.num_parameters(40, 1) * 12 // 2  # 2 + 4 + 12 / 2 context ranks


def test_a_plain_layer_keeps_32_bytes_for_each_token_and_width() -> None:
    vision = module_of("vlm-s", "vision", tensor=1)
    layer = vision.layers(Microbatch(images=4), 4)[1]
    tokens, shape = 4 * 676, vision.shape  # Korthikanti's 34 without masks of dropout
    expected = tokens * (2 * (1 + 1 + 3 + 1 + 1 + 1) * shape.hidden + 4 * shape.heads + 2 * 2 * shape.ffn)
    assert layer.strategies[0].kept_bytes == pytest.approx(expected, rel=0.01)


def test_tensor_and_context_parallelism_divide_what_is_kept() -> None:
    microbatch = Microbatch(text_tokens=8192)
    alone = module_of("vlm-s", "text", tensor=1).layers(microbatch, 1)[1].strategies[0].kept_bytes
    split = module_of("vlm-s", "text", tensor=4).layers(microbatch, 1)[1].strategies[0].kept_bytes
    assert split == pytest.approx(alone / 4, rel=1e-6)
    shared = module_of("vlm-s", "text", tensor=4, context=2)
    assert shared.layers(microbatch, 1)[1].strategies[0].kept_bytes == pytest.approx(alone / 8, rel=1e-6)
    assert shared.boundary_bytes(microbatch, 1) == 8192 * 4096 * 2 // 8


def test_layers_between_two_counted_sizes_are_in_proportion() -> None:
    text = module_of("vlm-s", "text")
    sizes = [text.layers(Microbatch(text_tokens=tokens), 1)[1].forward_ms for tokens in (7168, 7400, 7680)]
    assert sizes[0] < sizes[1] < sizes[2]
    assert sizes[1] == pytest.approx(text.timed(ModuleLoad(sequences=1, tokens=7400))[1].forward_ms, rel=0.002)


def test_more_images_take_longer_and_fewer_are_less_efficient() -> None:
    vision = module_of("vlm-s", "vision")
    microbatch = Microbatch(images=24)
    times = [vision.layers(microbatch, units)[1].forward_ms for units in (1, 4, 12, 24)]
    assert times == sorted(times)
    each = [time / units for time, units in zip(times, (1, 4, 12, 24), strict=True)]
    assert each == sorted(each, reverse=True)


def test_recomputing_costs_a_forward() -> None:
    layer = module_of("vlm-s", "text").layers(Microbatch(text_tokens=8192), 1)[1]
    by_name = {one.name: one for one in layer.strategies}
    assert by_name["recompute"].extra_backward_ms == layer.forward_ms
    assert by_name["recompute"].kept_bytes == 8192 * 4096 * 2 // 4  # its input


def test_a_module_on_fewer_sms_takes_longer() -> None:
    vision = module_of("vlm-s", "vision")
    microbatch = Microbatch(images=8)
    assert vision.on_share(0.5).layers(microbatch, 8)[1].forward_ms > vision.layers(microbatch, 8)[1].forward_ms


def test_modules_skip_microbatches_without_their_modality_and_refuse_units_that_are_not_there() -> None:
    vision, text = find_known_model("vlm-s").model().modules
    only_text, only_images = Microbatch(text_tokens=5), Microbatch(images=2)
    assert (vision.units(only_text), text.units(only_text)) == (0, 1)
    assert (vision.units(only_images), text.units(only_images)) == (2, 1)
    for units in (0, 3):
        with pytest.raises(ValueError, match="of a microbatch that has 2"):
            vision.layers(only_images, units)


def test_a_video_without_text_passes_through_the_decoder_alone() -> None:
    text, video = find_known_model("t2v-s").model().modules
    silent = Microbatch(video_s=3.0)
    assert (text.units(silent), video.units(silent)) == (0, 1)
    assert video.layers(silent, 1)[0].forward_ms > 0


def test_audio_is_cut_into_windows_of_30_seconds() -> None:
    audio = find_known_model("cornstarch-alm-s-llm-s").model().modules[0]
    assert [audio.units(Microbatch(audio_s=seconds)) for seconds in (0.5, 30.0, 31.0)] == [1, 1, 2]


def test_unknown_names_and_degrees_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown pipelined model 'vlm-xs'; choose one of: lm-7b"):
        find_known_model("vlm-xs")
    with pytest.raises(ValueError, match="16 heads do not divide by tensor=3"):
        find_known_model("vlm-s").model(degrees=Degrees(tensor=3), cluster=find_cluster("h800", 8))
    with pytest.raises(ValueError, match="need 16 devices; the cluster has 8"):
        find_known_model("vlm-s").model(cluster=find_cluster("h800", 8))
    with pytest.raises(ValueError, match="3 heads do not divide by 2 groups"):
        TransformerShape(layers=1, hidden=6, ffn=6, heads=3, groups=2)
    with pytest.raises(ValueError, match="layers=0"):
        TransformerShape(layers=0, hidden=6, ffn=6, heads=3, groups=3)
