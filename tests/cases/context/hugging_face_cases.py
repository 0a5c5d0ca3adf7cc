"""Tiny language models of transformers, in double, and their gradients with dense masks on one process."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import torch
import transformers as tf
from attention_cases import MASKS
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from mosaic.context.words import MaskWords

MASK: MaskWords = MASKS["gemma, packed, padded"]
VOCABULARY = 50
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
FULL = ["full_attention"] * 2
WINDOWS: dict[str, Any] = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
"""Shorter than an image of the mask and than a block."""


SPARSE = {"num_experts_per_tok": 2}
WITHOUT_HEADS = {name: size for name, size in SIZES.items() if name != "head_dim"}
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3": (tf.Qwen3ForCausalLM, SIZES),
    "llama": (tf.LlamaForCausalLM, SIZES),
    "gemma3": (tf.Gemma3ForCausalLM, SIZES | WINDOWS),
    "qwen3_moe": (tf.Qwen3MoeForCausalLM, SIZES | SPARSE | {"num_experts": 4, "moe_intermediate_size": 16}),
    "gpt2": (  # learned positions
        tf.GPT2LMHeadModel,
        {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
        | dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0),
    ),
    "minicpm3": (  # latent attention: values are wider than keys
        tf.MiniCPM3ForCausalLM,
        SIZES
        | {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 12}
        | {"num_key_value_heads": 4},
    ),
    "mistral": (tf.MistralForCausalLM, SIZES | {"sliding_window": 24}),  # a window in each layer
    "gemma2": (  # scores of random weights are small: a small cap bends them
        tf.Gemma2ForCausalLM,
        SIZES | WINDOWS | {"attn_logit_softcapping": 0.05, "query_pre_attn_scalar": 8, "hidden_activation": "gelu"},
    ),
    "gpt_oss": (tf.GptOssForCausalLM, SIZES | WINDOWS | SPARSE | {"num_local_experts": 4}),  # a sink for each head
    "stablelm": (tf.StableLmForCausalLM, WITHOUT_HEADS),  # its layers drop keywords that they do not know
    "nemotron": (tf.NemotronForCausalLM, WITHOUT_HEADS),  # likewise
}


def make(family: str) -> nn.Module:
    torch.manual_seed(0)
    kind, settings = FAMILIES[family]
    model: nn.Module = kind(kind.config_class(**settings))
    model.loss_type = "ForCausalLM"  # GPT-2 warns without
    if "num_experts_per_tok" in settings:
        model.set_experts_implementation("eager")  # the grouped product has no double
    for module in model.modules():
        if isinstance(module, Gemma2RMSNorm | Gemma3RMSNorm):
            module.forward = functools.partial(norm_in_double, module)  # type: ignore[method-assign]
    return model.double()


def norm_in_double(module: Gemma2RMSNorm | Gemma3RMSNorm, x: torch.Tensor) -> torch.Tensor:
    """Gemma's norm, which sums its weights' gradients over tokens in 32 bits whatever the model's type is."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.eps) * (1 + module.weight)


def tokens() -> dict[str, torch.Tensor]:
    """Ids and labels of the whole sequence; the first third has no labels."""
    ids = torch.randint(1, VOCABULARY, (1, MASK.num_tokens), generator=torch.Generator().manual_seed(1))
    labels = ids.masked_fill(torch.tensor(MASK.documents) < 0, -100)
    labels[:, : MASK.num_tokens // 3] = -100
    return {"input_ids": ids, "labels": labels}


def plainly(model: nn.Module, given: dict[str, torch.Tensor]) -> float:
    """One step on one process with a dense mask; leaves gradients in the model, returns the loss."""
    documents = torch.tensor(MASK.documents)
    labels = given["labels"].clone()
    first = torch.nonzero(documents[1:] != documents[:-1]).squeeze(1) + 1
    labels[:, first] = -100  # no token says the first one of another document
    config = model.config
    window = getattr(config, "sliding_window", None)
    masks = {"full_attention": dense_mask(None), "sliding_attention": dense_mask(window)}
    is_mixed = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    softmax, is_capped = torch.softmax, bool(getattr(config, "attn_logit_softcapping", None))
    if is_capped:
        model.set_attn_implementation("eager")  # which alone has caps, and a softmax in 32 bits
    with mock.patch.object(
        nn.functional, "softmax", lambda values, dim, dtype=None: softmax(values, dim, None if is_capped else dtype)
    ):
        loss = model(
            input_ids=given["input_ids"],
            labels=labels,
            attention_mask=masks if is_mixed else masks["sliding_attention" if window else "full_attention"],
            position_ids=torch.from_numpy(MASK.positions())[None],
            use_cache=False,
        ).loss
    loss.backward()
    return float(loss.detach())


def dense_mask(window: int | None) -> torch.Tensor:
    """What dense attention adds to the scores."""
    padding = torch.tensor(MASK.documents) < 0
    seen = torch.from_numpy(MASK.dense(window))
    seen |= padding[:, None] & torch.eye(len(padding), dtype=torch.bool)  # dense attention wants a key each
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill_(~seen, -1e300)[None, None]


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def difference(own: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The most by which a parameter's gradient differs, as a share of its length."""
    assert own.keys() == other.keys()
    return max(float((own[name] - other[name]).norm() / other[name].norm()) for name in own)
