"""Steps of a language model on two gloo ranks that share sequences, or its layers: all ways in turn on the same data.

Packed documents of images and text, as Cornstarch draws them. Ranks that share layers alone are two places of a
pipeline by 1F1B or as planned, whichever is faster, with the masks as matrices, as any user of transformers gives them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import mosaic
from bench.ranks.launch import on_ranks
from bench.record import Figure, median_figure
from mosaic.context import ContextSettings, MaskWords
from mosaic.context.drawn import multimodal_packed

WAYS = {
    "zigzag, all gathered": ("zigzag", "gather"),
    "lpt, all gathered": ("lpt", "gather"),
    "lpt, needed blocks": ("lpt", "needed"),
}
PLACES = "two places, masks as matrices"
VOCABULARY, WIDTH = 512, 256

Microbatch = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large and how often."""

    tokens: int
    """Of each microbatch."""
    microbatches: int
    """Of a step."""
    layers: int
    """Of the model."""
    rounds: int
    """Of the step, beside one that warms up."""


def in_pipeline(sizes: Sizes, seconds: float) -> Iterator[Figure]:
    """A step's forward and backward on two ranks, each with a core."""
    yield from on_ranks(partial(_measured, sizes), 2, seconds)


def _measured(sizes: Sizes, rank: int, size: int) -> Iterator[Figure]:
    masks = [multimodal_packed(sizes.tokens, seed) for seed in range(sizes.microbatches)]
    step = [_microbatch(mask, seed) for seed, mask in enumerate(masks)]
    mask_of = {id(one["input_ids"]): mask for one, mask in zip(step, masks, strict=True)}
    with_matrices = [_with_matrix(one, mask) for one, mask in zip(step, masks, strict=True)]
    pipes = {PLACES: mosaic.pipeline(_model(sizes.layers), with_matrices, data=1)}
    for way, (method, exchange) in WAYS.items():
        settings = ContextSettings(
            ranks=size, mask=lambda one: mask_of[id(one["input_ids"])], method=method, exchange=exchange
        )
        pipes[way] = mosaic.pipeline(_model(sizes.layers), step, context=settings, trial=False)
    times: dict[str, list[float]] = {way: [] for way in pipes}
    for number in range(sizes.rounds + 1):
        losses = []
        for way, pipe in pipes.items():
            dist.barrier()
            began = time.perf_counter()
            losses.append(pipe.step(with_matrices if way == PLACES else step))
            dist.barrier()
            if number:  # the first round warms up
                times[way].append(1e3 * (time.perf_counter() - began))
        for found in losses[1:]:
            torch.testing.assert_close(found, losses[0], rtol=1e-4, atol=1e-5)
    of = f"{sizes.microbatches} microbatches of {sizes.tokens} packed tokens, {sizes.layers} layers, 2 gloo ranks"
    for way, found in times.items():
        yield median_figure(f"{of}: {way}: step, ms", found)
    best = min(list(WAYS)[1:], key=lambda way: statistics.median(times[way]))
    for way in (PLACES, "zigzag, all gathered"):
        ratios = [theirs / own for theirs, own in zip(times[way], times[best], strict=True)]
        yield median_figure(f"{of}: {way}, over the fastest: step, ratio", ratios, labels={"fastest": best})
    for pipe in reversed(pipes.values()):
        pipe.remove()


def _model(layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


def _microbatch(mask: MaskWords, seed: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (1, mask.num_tokens), generator=draw)
    labels = ids.clone()
    labels[0, _firsts(mask)] = -100
    return {"input_ids": ids, "labels": labels}


def _firsts(mask: MaskWords) -> torch.Tensor:
    return torch.from_numpy(np.diff(mask.documents, prepend=-1) != 0)


def _with_matrix(microbatch: Microbatch, mask: MaskWords) -> dict[str, Any]:
    matrix = torch.from_numpy(mask.dense())[None, None]
    positions = torch.from_numpy(mask.positions())[None]
    return {**microbatch, "attention_mask": matrix, "position_ids": positions}
