"""LLaVA of transformers, in a tiny size, in pipelines and over context ranks, each beside the plain loop."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from story_ranks import join
from torch import nn
from transformers import CLIPVisionConfig, LlamaConfig, LlamaForCausalLM, LlavaConfig, LlavaForConditionalGeneration

import mosaic
from mosaic.context import causal, gemma, packed, plan_context
from mosaic.context.attention import Attend, ContextBatch, attach, sum_gradients

IMAGE, PATCHES = 31, 4
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 4,
}
TEXT: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "vocab_size": 32}
Microbatch = dict[str, Any]


def make_llava() -> nn.Module:
    torch.manual_seed(0)
    vision = CLIPVisionConfig(**SIZES, image_size=8, patch_size=4)
    config = LlavaConfig(vision_config=vision, text_config=LlamaConfig(**TEXT), image_token_index=IMAGE)
    return LlavaForConditionalGeneration(config).double()


def make_microbatch(images: int, words: int) -> Microbatch:
    ids = torch.randint(0, IMAGE, (1, PATCHES * images + words))
    ids[0, : PATCHES * images] = IMAGE
    made = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    return {**made, "pixel_values": torch.randn(images, 3, 8, 8, dtype=torch.float64)} if images else made


def make_step(*images: int) -> list[Microbatch]:
    """Microbatches with so many images each, and as many words as they like."""
    torch.manual_seed(sum(images))
    return [make_microbatch(count, 6 + 2 * count) for count in images]


def check_steps(rank: int, steps: Sequence[Sequence[Microbatch]], **asked: Any) -> str:
    """Trains in a pipeline and in the plain loop, holds both equal, and returns what the pipeline said of itself."""
    model = make_llava()
    plain = copy.deepcopy(model)
    pipe = mosaic.pipeline(model, steps[0], **asked)
    described = pipe.describe()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.05) for one in (model, plain)]
    for step in pipe.ahead(steps):
        losses = pipe.step(step)
        expected = []
        for microbatch in step:
            loss = plain(**microbatch).loss
            (loss / len(step)).backward()
            expected.append(loss.item())
        torch.testing.assert_close(losses.double(), torch.tensor(expected).double(), rtol=1e-6, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    own, num_here = model.state_dict(), 0
    for name, value in plain.state_dict().items():
        if not own[name].is_meta:
            torch.testing.assert_close(own[name], value, rtol=1e-9, atol=1e-11)
            num_here += 1
    assert num_here
    pipe.remove()
    return described


def llava(rank: int, size: int, place: Path) -> None:
    """As the page has it: one line, planned and tried."""
    join(rank, size, place)
    described = check_steps(rank, [make_step(1, 1, 1, 1), make_step(2, 1, 1, 2)])
    assert f"on {size} ranks" in described


def ragged(rank: int, size: int, place: Path) -> None:
    """Steps of other numbers of microbatches, of which some, or all, have no images."""
    join(rank, size, place)
    check_steps(rank, [make_step(2, 0, 3), make_step(0, 0), make_step(1, 0, 2, 4)], trial=False)


def lanes(rank: int, size: int, place: Path) -> None:
    """The vision tower has lanes beside the language model on each rank."""
    join(rank, size, place)
    options = mosaic.PlannerOptions(partition="colocated")
    described = check_steps(rank, [make_step(2, 1, 3, 1), make_step(1, 2)], options=options, trial=False)
    assert "lane" in described, described
    assert "no lanes" not in described, described


def context(rank: int, size: int, place: Path) -> None:
    """Two packed documents, one with an image, shared out over the ranks; gradients of one process."""
    join(rank, size, place)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**TEXT)).double()
    plain = copy.deepcopy(model)
    image = np.full(40, -1)
    image[8:24] = 0
    mask = packed([gemma(image), causal(56)], num_tokens=96)
    ids = torch.randint(0, IMAGE, (1, mask.num_tokens))

    attach(model)
    plan = plan_context(mask, ranks=size, block=16)
    own = ContextBatch(attend=Attend(plan))
    loss = model(**own.inputs(input_ids=ids, labels=ids)).loss
    loss.backward()
    sum_gradients(model.parameters())
    total = loss.detach().clone()
    dist.all_reduce(total)

    labels = ids.clone()
    labels[:, 40] = -100  # the first token of a document is not what the one before goes on with
    positions = torch.cat([torch.arange(40), torch.arange(56)])[None]
    dense = torch.from_numpy(mask.dense())[None, None]
    expected = plain(input_ids=ids, attention_mask=dense, position_ids=positions, labels=labels, use_cache=False).loss
    expected.backward()
    torch.testing.assert_close(total, expected.detach(), rtol=1e-6, atol=0)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)
