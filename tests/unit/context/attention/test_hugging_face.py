from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from attention_cases import BLOCK
from hugging_face_cases import FULL, MASK, SIZES, make, tokens
from torch import nn

from mosaic.context.attention import Attend, ContextBatch, attach
from mosaic.context.attention.hugging_face import attention
from mosaic.context.plan import plan_context
from mosaic.errors import UnsupportedModelError


def inputs() -> dict[str, Any]:
    return ContextBatch(attend=Attend(plan_context(MASK, 1, block=BLOCK))).inputs(**tokens())


def tiny(kind: Any, **settings: Any) -> nn.Module:
    return kind(kind.config_class(**settings))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "windows both ways": (
        lambda: tiny(tf.Gemma3ForCausalLM, **SIZES, use_bidirectional_attention=True),
        "has windows in both directions; mask words express only backward windows",
    ),
    "chunks": (
        lambda: tiny(tf.Qwen3ForCausalLM, **SIZES, layer_types=["full_attention", "chunked_attention"]),
        "has layers of chunked_attention; mask words and windows cannot express them: build it",
    ),
    "dropout": (
        lambda: tiny(tf.LlamaForCausalLM, **SIZES, attention_dropout=0.1),
        "has attention_dropout=0.1; ranks would drop different pairs than one rank does: set it to 0",
    ),
    "a router's loss": (
        lambda: tiny(
            tf.MixtralForCausalLM, **SIZES, num_local_experts=2, sliding_window=None, output_router_logits=True
        ),
        "adds a loss of its router, .* set output_router_logits=False",
    ),
    "positions of its own": (
        lambda: tiny(tf.BartForCausalLM, d_model=8, decoder_layers=1, decoder_attention_heads=2),
        "BartForCausalLM takes no position_ids",
    ),
    "positions by the longest": (
        lambda: tiny(tf.Qwen3ForCausalLM, **SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0}),
        "has rope_type='dynamic', which depends on the largest position .* use another",
    ),
    "a model of no family": (
        lambda: nn.Linear(1, 1),
        "Linear is not a model of transformers; attach its language model",
    ),
    "queries by places": (
        lambda: tiny(tf.Llama4ForCausalLM, **SIZES, layer_types=FULL, num_local_experts=2),
        "has attn_temperature_tuning, which counts this rank's tokens .* set it to False",
    ),
    "an encoder": (
        lambda: tiny(tf.T5ForConditionalGeneration, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2),
        "has an encoder and a decoder",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_models_that_would_give_other_numbers_are_refused(what: str):
    make_model, says = REFUSED[what]
    model = make_model()
    before = getattr(model, "config", None) and model.config._attn_implementation
    with pytest.raises(UnsupportedModelError, match=says):
        attach(model)
    assert before is None or model.config._attn_implementation == before


def test_layers_that_never_ask_for_attention_are_noticed():
    model = make("llama")
    model.model.layers[0].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    attach(model)
    with pytest.raises(UnsupportedModelError, match="1 of 2 layers of LlamaForCausalLM attended over context ranks"):
        model(**inputs())


def test_a_layer_whose_window_is_not_the_configurations_is_noticed():
    model = make("gemma3")
    model.model.layers[0].self_attn.sliding_window = 7
    attach(model)
    with pytest.raises(UnsupportedModelError, match=r"has windows {24: 1, None: 1}, but layers passed {7: 1, None"):
        model(**inputs())


def test_recomputed_layers_that_drop_their_keywords_are_refused():
    model = make("stablelm")
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    attach(model)
    with pytest.raises(ValueError, match="cannot be recomputed: disable gradient checkpointing"):
        model(**inputs()).loss.backward()


@pytest.mark.parametrize(
    ("altered", "says"),
    [
        ({"context": None}, r"LlamaForCausalLM attends over context ranks; call it with ContextBatch\(...\).inputs"),
        ({"attention_mask": torch.ones(1, 288)}, "attention_mask is passed beside context"),
        ({"output_router_logits": True}, "adds a loss of the router"),
        ({"use_cache": True}, "a cache of keys and values is not supported; call the model with use_cache=False"),
        ({"use_cache": None}, "a cache of keys and values is not supported"),
        ({"position_ids": None}, "position_ids are missing"),
        ({"shift_labels": None}, "labels are passed without shift_labels; .* shift them on the whole sequence"),
        ({"num_items_in_batch": None}, "num_items_in_batch is missing; .* pass the number of labels of the whole"),
    ],
)
def test_calls_that_would_give_other_numbers_are_refused(altered: dict[str, Any], says: str):
    model = make("llama")
    attach(model)
    with pytest.raises(ValueError, match=says):
        model(**inputs() | altered)


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({}, ValueError, "Linear was called without context"),
        ({"dropout": 0.5}, UnsupportedModelError, "passes dropout, which .* set it to 0 or None in the configuration"),
        ({"position_bias": torch.zeros(2)}, UnsupportedModelError, "passes position_bias, which attention over"),
        ({"s_aux": torch.zeros(2)}, ValueError, r"sinks have shape \(2,\); pass one for each of 1 query heads"),
        ({"attention_mask": torch.ones(1)}, ValueError, "attention_mask is passed beside context"),
    ],
)
def test_layers_that_ask_for_more_are_refused(given: dict[str, Any], error: type[Exception], says: str):
    q = torch.zeros(1, 1, 288, 2)
    context = {} if not given else {"context": inputs()["context"]}
    with pytest.raises(error, match=says):
        attention(nn.Linear(1, 1), q, q, q, **{"attention_mask": None, **given}, **context)
