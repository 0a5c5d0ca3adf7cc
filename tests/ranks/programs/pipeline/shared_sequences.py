"""Sequences that ranks share in pipelines, beside the plain loop; each function is one rank's program."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import OPTConfig, OPTForCausalLM

import mosaic
from mosaic.backends.host import HostBackend
from mosaic.context import ContextSettings, MaskWords, causal, gemma, packed
from mosaic.errors import (
    InfeasibleError,
    InvalidScheduleError,
    RankFailedError,
    UnsplittableError,
    UnsupportedModelError,
)
from mosaic.ranks.pipeline.handle import Pipeline
from ranks.begun import in_turn
from ranks.programs.pipeline.shared_layers import llama
from ranks.programs.pipeline.trained import PATCHES, begin, check_equal, llava, microbatch, options


def as_written(microbatch: Mapping[str, Any]) -> MaskWords:
    return causal(microbatch["input_ids"].shape[1])


def shared(**more: Any) -> ContextSettings:
    return ContextSettings(**{"ranks": 2, "mask": as_written, "block": 4, **more})


def steps() -> list[list[dict[str, Any]]]:
    """Ragged, some without images, lengths that are no whole blocks."""
    torch.manual_seed(5)
    return [[microbatch(count, 9 + count) for count in step] for step in ((2, 0, 3, 1), (1, 0, 4))]


def begun(make: Any = llava, **asked: Any) -> tuple[Pipeline, nn.Module, nn.Module]:
    return begin(make, steps()[0], **{"context": shared(), **asked})


def of_two(rank: int, size: int, place: Path) -> None:
    """Two ranks share the sequences of LLaVA, and images where there are two or more; two balancers, and a trial."""
    for settings, trial in ((shared(), False), (shared(method="headtail"), True)):
        pipe, model, plain = begun(context=settings, trial=trial)
        assert "2 ranks a sequence" in pipe.describe()
        encoded: list[int] = []
        layer = next(one for name, one in model.named_modules() if name.endswith("vision_tower.encoder.layers.0.mlp"))
        hook = layer.register_forward_pre_hook(
            lambda _, args, encoded=encoded: encoded.append(len(args[0])) if type(args[0]) is torch.Tensor else None
        )
        check_equal(pipe, model, plain, steps()[:1], ahead=True)
        hook.remove()
        assert trial or set(encoded) == ({1, 2} if rank == 0 else {1}), encoded
        check_equal(pipe, model, plain, steps()[1:])
        losses = pipe.evaluate(steps()[1])
        pipe.remove()
        with torch.no_grad():
            own, other = ([one(**each).loss for each in steps()[1]] for one in (model, plain))
        assert torch.allclose(losses.double(), torch.stack(own).double(), rtol=1e-6)
        assert torch.allclose(torch.stack(own), torch.stack(other), rtol=1e-8)


def beside_others(rank: int, size: int, place: Path) -> None:
    """Ranks that share layers beside them; a checkpoint goes to a grid without them and back; a kept way."""
    pipe, model, plain = begun(llama, tensor=2)
    assert model.model.layers[0].self_attn.q_proj.weight.shape == (16, 16)
    check_equal(pipe, model, plain, text())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    pipe.save(place / "kept", step=1, optimizer=optimizer)
    pipe.remove()
    for context in (None, shared()):
        pipe, other, _ = begun(llama, context=context, data=2 if context is None else None)
        pipe.load(place / "kept", optimizer=torch.optim.AdamW(other.parameters(), 0.01))
        check_equal(pipe, other, copy.deepcopy(plain), text())
        way = pipe.plan
        pipe.remove()
    pipe, model, plain = begun(llama, plan=way)
    check_equal(pipe, model, plain, text())
    pipe.remove()


def text() -> list[list[dict[str, Any]]]:
    torch.manual_seed(6)
    return [[microbatch(0, 10 + count) for count in range(3)]]


def packed_documents(images: int) -> tuple[dict[str, Any], MaskWords]:
    """Two documents and padding; an image of the first sees all of itself."""
    given = microbatch(images, 14)
    first, last, tokens = PATCHES * images + 5, PATCHES * images + 11, given["input_ids"].shape[1]
    image_of = np.where(np.arange(first) < PATCHES * images, np.arange(first) // PATCHES, -1)
    mask = packed([gemma(image_of), causal(last - first)], num_tokens=tokens)
    given["labels"][0, [first, *range(last, tokens)]] = -100
    given["attention_mask"][0, last:] = 0
    return given, mask


def packed_and_padded(rank: int, size: int, place: Path) -> None:
    """Masks that the plain model has to be told: packed documents, images that see all of themselves, padding."""
    torch.manual_seed(5)
    masks: dict[int, MaskWords] = {}
    trained = []
    for images in (3, 0, 2):
        given, mask = packed_documents(images)
        masks[given["input_ids"].shape[1]] = mask
        trained.append(given)
    settings = shared(mask=lambda given: masks[given["input_ids"].shape[1]])
    torch.manual_seed(1)
    model = llava()
    plain = copy.deepcopy(model)

    def tell(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        mask = masks[kwargs["input_ids"].shape[1]]
        dense = torch.from_numpy(mask.dense() | np.eye(mask.num_tokens, dtype=bool))[None, None]
        positions = torch.from_numpy(mask.positions())[None]
        return args, {**kwargs, "attention_mask": dense, "position_ids": positions}

    plain.register_forward_pre_hook(tell, with_kwargs=True)
    pipe = mosaic.pipeline(model, trained, trial=False, options=options(), context=settings)
    check_equal(pipe, model, plain, [trained, trained[::-1]])
    pipe.remove()


def refused(rank: int, size: int, place: Path) -> None:
    """Refusals with their messages; the ranks go on."""

    def check(message: str, error: type[Exception], make: Any = llava, **asked: Any) -> None:
        made: list[nn.Module] = []
        with pytest.raises(error, match=message):
            begun(lambda: made.append(make()) or made[0], **asked)
        for module in made[0].modules():
            assert getattr(getattr(module, "config", None), "_attn_implementation", None) != "mosaic_context"

    check("context=3, and there are 2 ranks", ValueError, context=shared(ranks=3))
    check("OPTDecoder draws random numbers, as dropout does", UnsplittableError, dropping)
    check("attention_dropout=0.2", UnsupportedModelError, lambda: llava(dropout=0.2))
    check("in no language model of transformers", UnsplittableError, Plain)
    check("mask= 8 of 8 in each row", ValueError, context=shared(mask=lambda _: causal(8)))
    check("1 blocks for 2 ranks", ValueError, context=shared(block=512))
    check("the partition has lanes", InfeasibleError, options=options(partition="colocated"), backend=HostBackend(2))
    pipe, model, _ = begun(lambda: dropping().eval())
    model.train()
    with pytest.raises(UnsplittableError, match="OPTDecoder draws random numbers, as dropout does"):
        pipe.step(text()[0])
    pipe.remove()
    own = crossed if rank else as_written
    check("ranks .1. of the context group have a different mask", RankFailedError, context=shared(mask=own))
    masks = [as_written]
    pipe, model, _ = begun(context=shared(mask=lambda given: masks[-1](given)))
    masks.append(own)
    with pytest.raises(InvalidScheduleError, match="rank 1 have other masks"):
        pipe.step(steps()[0])
    pipe.remove()
    assert model.model.language_model.config._attn_implementation == "sdpa"


def crossed(microbatch: Mapping[str, Any]) -> MaskWords:
    return gemma(np.zeros(microbatch["input_ids"].shape[1], dtype=np.int64))


def dropping() -> nn.Module:
    sizes = {"hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}
    config = OPTConfig(**sizes, word_embed_proj_dim=16, pad_token_id=0, bos_token_id=0, eos_token_id=0)
    return OPTForCausalLM(config).double()


class Plain(nn.Module):
    """Layers that are no language model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(32, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, input_ids: torch.Tensor, **given: Any) -> torch.Tensor:
        hidden = self.words(input_ids)
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return hidden.mean()


def of_four(rank: int, size: int, place: Path) -> None:
    """Two places whose layers two ranks have each, with layers made again."""
    pipe, model, plain = begun(options=options(partition="mixed-v"), memory_bytes=300_000)
    check_equal(pipe, model, plain, steps()[1:])
    pipe.remove()


on_two_ranks = in_turn(of_two, packed_and_padded, refused)
on_four_ranks = in_turn(of_four, beside_others)
