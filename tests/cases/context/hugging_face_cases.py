"""Tiny language models of transformers, in double, and their gradients with dense masks on one process."""

from __future__ import annotations

import functools
from typing import Any

import torch
from attention_cases import MASKS
from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MiniCPM3Config,
    MiniCPM3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
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


def make(family: str) -> nn.Module:
    torch.manual_seed(0)
    if family == "qwen3":
        model: nn.Module = Qwen3ForCausalLM(Qwen3Config(**SIZES))
    elif family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
    elif family == "qwen3_moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts))
        model.set_experts_implementation("eager")  # the grouped product has no double
    elif family == "gpt2":  # learned positions
        drops = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
        ids = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
        model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_head=4, n_layer=2, **ids, **drops))
        model.loss_type = "ForCausalLM"  # or it warns
    elif family == "minicpm3":  # latent attention: values are wider than keys
        ranks = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 12}
        model = MiniCPM3ForCausalLM(MiniCPM3Config(**SIZES | ranks | {"num_key_value_heads": 4}))
    else:
        model = Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, layer_types=FULL, sliding_window=None))
    for module in model.modules():
        if isinstance(module, Gemma3RMSNorm):
            module.forward = functools.partial(norm_in_double, module)  # type: ignore[method-assign]
    return model.double()


def norm_in_double(module: Gemma3RMSNorm, x: torch.Tensor) -> torch.Tensor:
    """Gemma's norm, which sums its weights' gradients over tokens in 32 bits whatever the model's type is."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.eps) * (1 + module.weight)


FAMILIES = ("qwen3", "llama", "gemma3", "qwen3_moe", "gpt2", "minicpm3")


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
    seen = torch.from_numpy(MASK.dense())
    seen |= (documents < 0)[:, None] & torch.eye(len(documents), dtype=torch.bool)  # dense attention wants a key each
    loss = model(
        input_ids=given["input_ids"],
        labels=labels,
        attention_mask=seen[None, None],
        position_ids=torch.from_numpy(MASK.positions())[None],
        use_cache=False,
    ).loss
    loss.backward()
    return float(loss.detach())


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def difference(own: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The most by which a parameter's gradient differs, as a share of its length."""
    assert own.keys() == other.keys()
    return max(float((own[name] - other[name]).norm() / other[name].norm()) for name in own)
