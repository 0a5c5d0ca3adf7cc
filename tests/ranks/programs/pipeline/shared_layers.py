"""Layers that ranks share, beside the plain loop; each function is one rank's program."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from executor_cases import no_caption
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import mosaic
from mosaic.errors import ModuleContractError, UnsplittableError
from mosaic.ranks.pipeline.handle import Pipeline
from ranks.begun import in_turn, join
from ranks.programs.pipeline.trained import begin, check_equal, options, train, words

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "head_dim": 8,
    "vocab_size": 32,
    "use_cache": False,
}


def llama(**more: Any) -> nn.Module:
    chosen = {"num_key_value_heads": 2, "attention_bias": True, "tie_word_embeddings": True, **more}
    return LlamaForCausalLM(LlamaConfig(**SMALL, **chosen)).double()


def qwen3() -> nn.Module:
    return Qwen3ForCausalLM(Qwen3Config(**SMALL, num_key_value_heads=2)).double()


def begun(make: Any, **asked: Any) -> tuple[Pipeline, nn.Module, nn.Module]:
    return begin(make, **{"tensor": 2, **asked})


def of_two(rank: int, size: int, place: Path) -> None:
    """Two ranks share all layers; a checkpoint goes to a pipeline and back; a scaler."""
    pipe, model, plain = begun(llama, options=options())
    assert model.model.layers[0].self_attn.q_proj.weight.shape == (16, 16)
    check_equal(pipe, model, plain, [words(0), words(1)])
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    check_skipped(pipe, model, optimizer)
    train(pipe, optimizer, 1)
    before, average = {name: one.detach().clone() for name, one in model.named_parameters()}, copy.deepcopy(model)
    pipe.save(place / "kept", step=1, optimizer=optimizer, companions={"average": average})
    pipe.finish_saving()
    assert all(torch.equal(one, before[name]) for name, one in model.named_parameters())
    train(pipe, optimizer, 1, first=1)
    digest = pipe.digest()
    pipe.remove()
    for tensor in (1, 2):
        pipe, model, _ = begun(llama, tensor=tensor, options=options())
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        average = copy.deepcopy(model)
        pipe.load(place / "kept", optimizer=optimizer, companions={"average": average})
        train(pipe, optimizer, 1, first=1)
        assert tensor == 1 or pipe.digest() == digest
        pipe.export(place / f"{tensor}.safetensors")
        pipe.remove()


def check_skipped(pipe: Pipeline, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """An infinite gradient in one rank's part skips the step on all ranks."""
    before = pipe.digest()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    pipe.step(words(0), scaler=scaler)
    if pipe.world.rank == 1:
        model.model.layers[0].mlp.up_proj.weight.grad[0, 0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    assert scaler.get_scale() == 32.0
    assert pipe.digest() == before


def two_by_two(rank: int, size: int, place: Path) -> None:
    """Pipelines of two places, each of two ranks; norms of heads have parts of their gradients on both."""
    pipe, model, plain = begun(qwen3, trial=True)
    assert pipe.degrees.tensor == 2
    check_equal(pipe, model, plain, [words(0), words(1)[:1]])
    pipe.remove()
    assert model.state_dict().keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(model(**words(0)[0]).loss, plain(**words(0)[0]).loss)


def refused(rank: int, size: int, place: Path) -> None:
    """Layers that cannot be shared are named."""
    up = "model.layers.*.mlp.up_proj"
    for make, plan, kind, said in (
        (lambda: llama(num_key_value_heads=1), None, UnsplittableError, "k_proj has 1 heads, which tensor=2 ranks"),
        (
            lambda: llama(attention_dropout=0.1),
            None,
            UnsplittableError,
            "draws random numbers, as dropout does, and tensor ranks",
        ),
        (llama, {"lm_head": "colwise"}, ValueError, "which is no module of a layer"),
        (llama, {"model.layers.*.mlp": "colwise"}, UnsplittableError, "mlp is a LlamaMLP; colwise splits nn.Linear"),
        (llama, {up: "packed_colwise"}, UnsplittableError, "the style 'packed_colwise' is none of"),
        (llama, {up: "colwise"}, UnsplittableError, "what a colwise module gives has to reach a rowwise one"),
        (llama, {}, ValueError, "LlamaForCausalLM has no tp_plan of its own"),
    ):
        torch.manual_seed(1)
        with pytest.raises(kind, match=said):
            mosaic.pipeline(make(), words(0), tensor=2, tp_plan=plan, trial=False, options=options())
    without_norms = {name: style for name, style in qwen3().tp_plan.items() if "layers" in name and "norm" not in name}
    pipe, _, _ = begun(qwen3, tp_plan=without_norms)
    with pytest.raises(ModuleContractError, match=r"self_attn.[qk]_norm.weight is not split.*add 'model.layers"):
        pipe.step(words(0))


def an_error_of_one(rank: int, size: int, place: Path) -> None:
    """Rank 1 fails where rank 0 waits for its part of a sum."""
    join(rank, size, place)
    pipe, model, _ = begun(llama)
    pipe.step(words(0))
    if rank == 1:
        model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: no_caption())
    pipe.step(words(1))


on_two_ranks = in_turn(of_two, refused)
on_four_ranks = in_turn(two_by_two)
