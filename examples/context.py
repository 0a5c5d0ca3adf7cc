"""Documents of text and images packed into one sequence, trained over ranks that share it by the work of its attention.

The language model is Hugging Face's own, from a configuration; images see all of themselves, as Gemma 3's do, and no
document sees another. Each rank encodes its share of the images. Lines that end in ``# <- mosaic`` are what context
parallelism adds. Transformers computes losses in 32 bits, so these agree to seven digits. On CPU cores::

    torchrun --nproc-per-node 2 examples/context.py            # beside one process: the same losses and gradients
    torchrun --nproc-per-node 2 examples/context.py --picture mask.png
"""

from __future__ import annotations

import argparse
import copy
import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from mosaic.context import MaskWords, gemma, packed, plan_context, share_items
from mosaic.context.attention import Attend, ContextBatch, attach, gather_items, sum_gradients
from mosaic.context.words import STREAM_SHIFT

VOCABULARY, IMAGE_TOKEN = 256, 255
PATCHES, PIXELS = 64, 48
"""Of an image, each a token; and of a patch."""


class VisionLanguage(nn.Module):
    """A projected patch takes the place of each image token."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.vision = nn.Sequential(nn.Linear(PIXELS, width), nn.GELU(), nn.Linear(width, width))
        self.language = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=VOCABULARY,
                hidden_size=width,
                intermediate_size=3 * width,
                num_hidden_layers=layers,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=width // 4,
            )
        )

    def merge(self, input_ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        words = self.language.get_input_embeddings()(input_ids)
        return words.masked_scatter((input_ids == IMAGE_TOKEN).unsqueeze(-1), features)


def draw_batch(tokens: int, seed: int) -> tuple[dict[str, torch.Tensor], MaskWords]:
    """Documents of a few images and words each, and who sees whom."""
    draw = np.random.RandomState(seed)
    ids: list[np.ndarray] = []
    masks = []
    while sum(map(len, ids)) < tokens:
        pieces = [draw.randint(0, 200, draw.randint(20, 200))]
        for _ in range(draw.randint(0, 4)):
            pieces += [np.full(PATCHES, IMAGE_TOKEN), draw.randint(0, 200, draw.randint(10, 100))]
        document = np.concatenate(pieces)[: tokens - sum(map(len, ids))]
        is_image = document == IMAGE_TOKEN
        begins = is_image & ~np.r_[False, is_image[:-1]]
        masks.append(gemma(np.where(is_image, np.cumsum(begins), -1)))
        ids.append(document)
    mask = packed(masks)
    input_ids = torch.from_numpy(np.concatenate(ids))[None]
    found = {"input_ids": input_ids, "labels": input_ids.masked_fill(input_ids == IMAGE_TOKEN, -100)}
    count = int((input_ids == IMAGE_TOKEN).sum())
    return {**found, "patches": torch.from_numpy(draw.randn(count, PIXELS))}, mask


def image_rows(mask: MaskWords) -> list[int]:
    """Returns the tokens of each image."""
    stream = mask.words >> STREAM_SHIFT & 63
    edges = np.flatnonzero(np.diff(stream, prepend=0, append=0) | np.diff(mask.documents, prepend=-1, append=-1))
    return [int(end - begin) for begin, end in itertools.pairwise(edges) if stream[begin] > 0]


def plain_loss(model: VisionLanguage, batch: dict[str, torch.Tensor], mask: MaskWords) -> torch.Tensor:
    """The loss of the whole sequence on one process, with a dense mask."""
    labels = batch["labels"].clone()
    labels[:, torch.from_numpy(np.flatnonzero(np.diff(mask.documents)) + 1)] = -100
    inputs: dict[str, Any] = {"attention_mask": torch.from_numpy(mask.dense())[None, None], "use_cache": False}
    inputs["position_ids"] = torch.from_numpy(mask.positions())[None]
    embeds = model.merge(batch["input_ids"], model.vision(batch["patches"]))
    return model.language(inputs_embeds=embeds, labels=labels, **inputs).loss


def difference(model: nn.Module, plain: nn.Module) -> float:
    """Returns the most by which gradients differ, as a share of each one's length."""
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return max(float((own.grad - other.grad).norm() / other.grad.norm()) for own, other in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="steps of training")
    parser.add_argument("--tokens", type=int, default=2048, help="of a sequence")
    parser.add_argument("--width", type=int, default=64, help="of the language model")
    parser.add_argument("--layers", type=int, default=2, help="of the language model")
    parser.add_argument("--picture", type=Path, help="where to draw the last sequence's mask, coloured by rank")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = VisionLanguage(args.width, args.layers).double()
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=3e-3) for one in (model, plain)]
    attach(model.language)  # <- mosaic
    for step in range(args.steps):
        batch, mask = draw_batch(args.tokens, seed=step % 2)
        began = time.perf_counter()
        plan = plan_context(mask, ranks=dist.get_world_size(), block=64)  # <- mosaic
        own = ContextBatch(attend=Attend(plan))  # <- mosaic
        share = share_items(image_rows(mask), dist.get_world_size())  # <- mosaic
        patches = batch["patches"][share.places_of(dist.get_rank())]  # <- mosaic
        features = gather_items(model.vision(patches), share)  # <- mosaic
        embeds = model.merge(batch["input_ids"], features)  # of the whole sequence
        loss = model.language(**own.inputs(inputs_embeds=embeds, labels=batch["labels"])).loss  # <- mosaic
        loss.backward()
        sum_gradients(model.parameters())  # <- mosaic
        took = time.perf_counter() - began
        expected = plain_loss(plain, batch, mask)
        expected.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            shares = " and ".join(f"{load / plan.loads.sum():.1%}" for load in plan.loads)
            print(
                f"step {step}: loss {float(total):.4f}, {1e3 * took:.0f} ms; ranks have {shares} of the work; "
                f"against one process the loss differs by {abs(float(total - expected.detach())):.1e}, "
                f"gradients by {difference(model, plain):.1e}",
                flush=True,
            )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if args.picture and dist.get_rank() == 0:
        from mosaic.report.context_picture import draw_context

        draw_context([plan], args.picture)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
