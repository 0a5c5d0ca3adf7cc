"""LLaVA in a pipeline: a plain loop over steps of microbatches, and the line more that ends in ``# <- mosaic``.

The model is Hugging Face's own, from a configuration; microbatches are ragged, some without images. On CPU cores::

    torchrun --nproc-per-node 4 examples/pipeline.py
    torchrun --nproc-per-node 2 examples/pipeline.py --check          # beside the plain loop: the same gradients
    torchrun --nproc-per-node 4 examples/pipeline.py --check --context 2     # two ranks share each sequence

A run that is killed goes on from its last checkpoint, with any number of ranks::

    torchrun --nproc-per-node 4 --max-restarts 3 examples/pipeline.py --steps 1000 --checkpoint runs/llava
"""

from __future__ import annotations

import argparse
import copy
import itertools
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import mosaic
from mosaic.context import ContextSettings, MaskWords, causal
from mosaic.report.pipeline_picture import PipelineRun, draw_pipelines

IMAGE_TOKEN = 255
PATCHES = 16
"""Of an image, each a token."""
SAVE_EVERY = 2
"""Steps."""


def make_model(width: int, layers: int) -> nn.Module:
    tower: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
    }
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=CLIPVisionConfig(image_size=32, patch_size=8, **tower),
            text_config=LlamaConfig(vocab_size=256, num_key_value_heads=4, **tower),
            image_token_index=IMAGE_TOKEN,
        )
    )


def microbatch(images: int, words: int, draw: torch.Generator) -> dict[str, Any]:
    ids = torch.randint(0, IMAGE_TOKEN, (1, PATCHES * images + words), generator=draw)
    ids[0, : PATCHES * images] = IMAGE_TOKEN
    found = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    return {**found, "pixel_values": torch.randn(images, 3, 32, 32, generator=draw)} if images else found


def make_steps(steps: int, microbatches: int) -> Iterator[list[dict[str, Any]]]:
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        images = torch.randint(0, 6, (microbatches,), generator=draw).tolist()
        yield [microbatch(count, 160 - PATCHES * count, draw) for count in images]


def who_sees_whom(microbatch: Mapping[str, Any]) -> MaskWords:
    return causal(microbatch["input_ids"].shape[1])


def difference(model: nn.Module, plain: nn.Module) -> float:
    """Returns by how much gradients differ, as a share of each one's length."""
    own = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    other = {name: one.grad for name, one in plain.named_parameters() if one.grad is not None}
    return max((float((own[name] - other[name]).norm() / (1e-6 + other[name].norm())) for name in own), default=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="steps of training")
    parser.add_argument("--microbatches", type=int, default=8, help="of a step")
    parser.add_argument("--width", type=int, default=128, help="of both towers")
    parser.add_argument("--layers", type=int, default=6, help="of each tower")
    parser.add_argument("--context", type=int, default=1, help="ranks that share each sequence")
    parser.add_argument("--check", action="store_true", help="compare with the plain loop")
    parser.add_argument("--checkpoint", type=Path, help="where to save every other step, and to go on from")
    parser.add_argument("--picture", type=Path, help="where to draw the last step, measured above simulated")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = make_model(args.width, args.layers)
    plain = copy.deepcopy(model) if args.check else None
    (sample,) = make_steps(1, args.microbatches)

    shared = ContextSettings(ranks=args.context, mask=who_sees_whom, block=16) if args.context > 1 else None
    pipe = mosaic.pipeline(model, sample, context=shared)  # <- mosaic
    is_first = int(os.environ["RANK"]) == 0
    if is_first:
        print(pipe.describe())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    others = None if plain is None else torch.optim.SGD(plain.parameters(), lr=0.05)
    kept = pipe.load(args.checkpoint, optimizer=optimizer, missing_ok=True) if args.checkpoint else None
    first = kept.step if kept else 0
    steps = itertools.islice(make_steps(args.steps, args.microbatches), first, None)
    for number, batch in enumerate(pipe.ahead(steps), first):
        began = time.perf_counter()
        losses = pipe.step(batch)
        took = time.perf_counter() - began
        said = f"step {number}: loss {losses.mean():.4f}, {1e3 * took:.0f} ms"
        if plain is not None and others is not None:
            for one in batch:
                (plain(**one).loss / len(batch)).backward()
            said += f", gradients differ by {difference(model, plain):.1e} on rank {pipe.world.rank}"
            others.step()
            others.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        if is_first:
            print(said)
        if args.checkpoint and (number + 1) % SAVE_EVERY == 0:
            pipe.save(args.checkpoint, step=number + 1, optimizer=optimizer)
    if args.picture and first < args.steps:
        played = pipe.timeline()
        if is_first:
            runs = [
                PipelineRun(title=title, graph=graph, start_ns=start_ns)
                for title, (graph, start_ns) in (("measured", played.measured), ("simulated", played.simulated))
            ]
            draw_pipelines(runs, args.picture, title="The last step")
    pipe.remove()


if __name__ == "__main__":
    main()
