"""Contrastive training as in OpenCLIP, with one line more: the one that ends in ``# <- mosaic``.

Autocast in bfloat16, or in float16 under a GradScaler; gradient accumulation over cached features; gradients clipped;
a warm-up and a cosine; the loss over the features of all ranks. The classic CLIP, whose text tower is spread over the
model itself. Batches are drawn, so there is nothing to download:

    python examples/openclip.py                                    # seconds, on CPU cores
    python examples/openclip.py --size full --device cuda          # ViT-B/32
    python examples/openclip.py --precision amp --accum-freq 4
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed
from torch import nn
from torch.nn import functional

import mosaic


@dataclass(frozen=True)
class Size:
    image: int
    patch: int
    vision_width: int
    text_width: int
    layers: int
    context: int
    vocabulary: int
    embed: int
    batch: int


SIZES = {
    "tiny": Size(16, 8, 48, 32, 2, 12, 64, 24, 4),
    "full": Size(224, 32, 768, 512, 12, 77, 49408, 512, 256),  # ViT-B/32
}


class Transformer(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width,
                width // 16 if width < 64 else width // 64,
                4 * width,
                0.0,
                "gelu",
                batch_first=True,
                norm_first=True,
            )
            for _ in range(layers)
        )

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, src_mask=mask)
        return x


class VisionTransformer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.vision_width
        self.conv1 = nn.Conv2d(3, width, size.patch, size.patch, bias=False)
        self.class_embedding = nn.Parameter(width**-0.5 * torch.randn(width))
        self.positional_embedding = nn.Parameter(width**-0.5 * torch.randn((size.image // size.patch) ** 2 + 1, width))
        self.ln_pre, self.ln_post = nn.LayerNorm(width), nn.LayerNorm(width)
        self.transformer = Transformer(width, size.layers)
        self.proj = nn.Parameter(width**-0.5 * torch.randn(width, size.embed))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.conv1(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_embedding.to(x.dtype).expand(len(x), 1, -1), x], dim=1)
        x = self.ln_pre(x + self.positional_embedding.to(x.dtype))
        return self.ln_post(self.transformer(x)[:, 0]) @ self.proj


class CLIP(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.text_width
        self.visual = VisionTransformer(size)
        self.transformer = Transformer(width, size.layers)
        self.token_embedding = nn.Embedding(size.vocabulary, width)
        self.positional_embedding = nn.Parameter(0.01 * torch.randn(size.context, width))
        self.ln_final = nn.LayerNorm(width)
        self.text_projection = nn.Parameter(width**-0.5 * torch.randn(width, size.embed))
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
        mask = torch.full((size.context, size.context), float("-inf")).triu(1)
        self.register_buffer("attn_mask", mask, persistent=False)

    def encode_image(self, images: torch.Tensor) -> torch.Tensor:
        return functional.normalize(self.visual(images), dim=-1)

    def encode_text(self, texts: torch.Tensor) -> torch.Tensor:
        x = self.token_embedding(texts) + self.positional_embedding
        x = self.ln_final(self.transformer(x, mask=self.attn_mask))
        x = x[torch.arange(len(x), device=x.device), texts.argmax(dim=-1)] @ self.text_projection
        return functional.normalize(x, dim=-1)

    def forward(self, images: torch.Tensor, texts: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            "image_features": self.encode_image(images),
            "text_features": self.encode_text(texts),
            "logit_scale": self.logit_scale.exp(),
        }


def gather(features: torch.Tensor) -> torch.Tensor:
    """Returns the features of all ranks, with gradients for one's own; of a single process, its own."""
    if not torch.distributed.is_initialized():
        return features
    gathered = [torch.empty_like(features) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(gathered, features.detach())
    gathered[torch.distributed.get_rank()] = features
    return torch.cat(gathered)


def clip_loss(image_features: torch.Tensor, text_features: torch.Tensor, logit_scale: torch.Tensor) -> torch.Tensor:
    logits = logit_scale * gather(image_features) @ gather(text_features).T
    labels = torch.arange(len(logits), device=logits.device)
    return (functional.cross_entropy(logits, labels) + functional.cross_entropy(logits.T, labels)) / 2


def draw_batch(size: Size, device: str, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.randn(size.batch, 3, size.image, size.image, generator=generator)
    texts = torch.randint(1, size.vocabulary - 1, (size.batch, size.context), generator=generator)
    texts[:, -1] = size.vocabulary - 1  # end of text: the largest id
    return images.to(device), texts.to(device)


def cosine(step: int, warmup: int, steps: int) -> float:
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def main(arguments: Sequence[str] | None = None) -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=["fp32", "amp_bf16", "amp"], default="amp_bf16")
    parser.add_argument("--accum-freq", type=int, default=1)
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    size = SIZES[args.size]
    model = CLIP(size).to(args.device)
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.2}, {"params": others, "weight_decay": 0.0}], lr=5e-4, betas=(0.9, 0.98)
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: cosine(step, 4, args.steps))
    scaler = torch.amp.GradScaler(args.device, init_scale=2.0**10, enabled=args.precision == "amp")
    kind = torch.float16 if args.precision == "amp" else torch.bfloat16
    generator = torch.Generator().manual_seed(1)

    def forward(batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
        with torch.autocast(args.device, kind, enabled=args.precision != "fp32"):
            return model(*batch)

    mosaic.colocate(model, sample=lambda: forward(draw_batch(size, args.device, torch.Generator())))  # <- mosaic

    losses = []
    model.train()
    for _ in range(args.steps):
        batches = [draw_batch(size, args.device, generator) for _ in range(args.accum_freq)]
        optimizer.zero_grad()
        if args.accum_freq == 1:
            loss = clip_loss(**forward(batches[0]))
            scaler.scale(loss).backward()
        else:  # the loss needs the features of all batches; activations of one fit
            with torch.no_grad():
                cached = [forward(batch) for batch in batches]
            for index, batch in enumerate(batches):
                out = forward(batch)
                features = {
                    key: torch.cat([c[key] if i != index else out[key] for i, c in enumerate(cached)])
                    for key in ("image_features", "text_features")
                }
                loss = clip_loss(**features, logit_scale=out["logit_scale"])
                scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, math.log(100))
        losses.append(loss.item())
    return model, optimizer, losses


if __name__ == "__main__":
    print(*(f"{loss:.4f}" for loss in main()[2]))
