"""Two models trained in one step on one device, with one line more: the one that ends in ``# <- mosaic``.

A small captioner learns from a large one while both learn from the captions: two backbones, two losses and a
distillation between them (the paper's Fig. 2d: models that share a device and are trained jointly). What
``colocate`` is given is a module that holds both; the loop calls them one by one, as it did.

    python examples/joint.py                              # seconds, on CPU cores
    python examples/joint.py --size full --device cuda
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

import mosaic


@dataclass(frozen=True)
class Size:
    small: int
    large: int
    layers: int
    image: int
    patch: int
    vocabulary: int
    words: int
    batch: int


SIZES = {
    "tiny": Size(32, 64, 2, 16, 8, 64, 8, 4),
    "full": Size(768, 2048, 16, 224, 16, 32000, 64, 16),
}


def transformer(width: int, layers: int) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(width, width // 16, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


class Eye(nn.Module):
    def __init__(self, width: int, size: Size) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, size.patch, size.patch)
        self.body = transformer(width, size.layers)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.body(self.stem(images).flatten(2).transpose(1, 2))


class Language(nn.Module):
    def __init__(self, width: int, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, width)
        self.body = transformer(width, size.layers)
        self.out = nn.Linear(width, size.vocabulary, bias=False)

    def forward(self, seen: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        x = torch.cat([seen, self.embedding(words)], dim=1)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return self.out(self.body(x, mask=mask)[:, seen.shape[1] :])


class Captioner(nn.Module):
    def __init__(self, width: int, size: Size) -> None:
        super().__init__()
        self.eye, self.language = Eye(width, size), Language(width, size)

    def forward(self, images: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return self.language(self.eye(images), words[:, :-1])


def main(
    arguments: Sequence[str] | None = None,
) -> tuple[nn.Module, nn.Module, list[torch.optim.Optimizer], list[float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    size = SIZES[args.size]
    small, large = Captioner(size.small, size).to(args.device), Captioner(size.large, size).to(args.device)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(small.parameters(), lr=1e-3),
        torch.optim.SGD(large.parameters(), lr=1e-2, momentum=0.9),
    ]
    generator = torch.Generator().manual_seed(1)

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        images = torch.randn(size.batch, 3, size.image, size.image, generator=generator)
        words = torch.randint(size.vocabulary, (size.batch, size.words), generator=generator)
        return images.to(args.device), words.to(args.device)

    def step(images: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        wide, narrow = large(images, words), small(images, words)
        target = words[:, 1:].flatten()
        own = functional.cross_entropy(wide.flatten(0, 1), target) + functional.cross_entropy(
            narrow.flatten(0, 1), target
        )
        soft = functional.kl_div(narrow.log_softmax(-1), wide.detach().softmax(-1), reduction="batchmean")
        return own + 0.1 * soft

    batch = draw()
    mosaic.colocate(nn.ModuleDict({"small": small, "large": large}), sample=lambda: step(*batch))  # <- mosaic

    losses = []
    for _ in range(args.steps):
        loss = step(*draw())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return small, large, optimizers, losses


if __name__ == "__main__":
    print(*(f"{loss:.4f}" for loss in main()[-1]))
