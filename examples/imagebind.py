"""Six modalities bound to images, with one line more: the one that ends in ``# <- mosaic``.

Preprocessors, trunks and heads in dictionaries, as ImageBind has them, called in a loop over what the batch brings:
some batches come without audio. Image and text towers are frozen, as in the original training.

    python examples/imagebind.py                              # seconds, on CPU cores
    python examples/imagebind.py --size full --device cuda    # the dimensions of imagebind_huge
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
class Tower:
    width: int
    layers: int
    heads: int
    shape: tuple[int, ...]  # of one sample, without the batch
    patch: tuple[int, ...]
    drop: float = 0.0


TINY = {
    "vision": Tower(48, 3, 4, (3, 16, 16), (8, 8)),
    "text": Tower(32, 2, 4, (12,), ()),
    "audio": Tower(32, 2, 4, (1, 16, 16), (8, 8), drop=0.1),
    "depth": Tower(16, 2, 2, (1, 16, 16), (8, 8)),
    "thermal": Tower(32, 2, 4, (1, 16, 16), (8, 8)),
    "imu": Tower(16, 2, 2, (6, 32), (8,), drop=0.7),
}
FULL = {
    "vision": Tower(1280, 32, 16, (3, 224, 224), (14, 14)),
    "text": Tower(1024, 24, 16, (77,), ()),
    "audio": Tower(768, 12, 12, (1, 128, 208), (16, 16), drop=0.1),
    "depth": Tower(384, 12, 8, (1, 224, 224), (16, 16)),
    "thermal": Tower(768, 12, 12, (1, 224, 224), (16, 16)),
    "imu": Tower(512, 6, 8, (6, 2000), (8,), drop=0.7),
}
SIZES = {"tiny": (TINY, 24, 64, 6), "full": (FULL, 1024, 49408, 64)}  # towers, embedding, vocabulary, batch


class Patches(nn.Module):
    """Cuts images, spectrograms or sensor readings into patches and gives each a place."""

    def __init__(self, tower: Tower) -> None:
        super().__init__()
        kind = nn.Conv2d if len(tower.patch) == 2 else nn.Conv1d
        self.stem = kind(tower.shape[0], tower.width, tower.patch, tower.patch)
        places = 1
        for side, step in zip(tower.shape[1:], tower.patch, strict=True):
            places *= side // step
        self.cls = nn.Parameter(0.02 * torch.randn(1, 1, tower.width))
        self.places = nn.Parameter(0.02 * torch.randn(1, places + 1, tower.width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        return torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1) + self.places


class Tokens(nn.Module):
    """Embeds text and gives each token a place."""

    def __init__(self, tower: Tower, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, tower.width)
        self.places = nn.Parameter(0.01 * torch.randn(1, tower.shape[0], tower.width))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embedding(ids) + self.places


class Trunk(nn.Sequential):
    def __init__(self, tower: Tower) -> None:
        layer = (tower.width, tower.heads, 4 * tower.width, tower.drop, "gelu")
        super().__init__(
            *(nn.TransformerEncoderLayer(*layer, batch_first=True, norm_first=True) for _ in range(tower.layers))
        )


class Binding(nn.Module):
    """Each modality's own preprocessor, trunk and head, and a common space."""

    def __init__(self, towers: dict[str, Tower], embed: int, vocabulary: int) -> None:
        super().__init__()
        self.preprocessors = nn.ModuleDict(
            {name: Patches(tower) if tower.patch else Tokens(tower, vocabulary) for name, tower in towers.items()}
        )
        self.trunks = nn.ModuleDict({name: Trunk(tower) for name, tower in towers.items()})
        self.heads = nn.ModuleDict(
            {
                name: nn.Sequential(nn.LayerNorm(tower.width), nn.Linear(tower.width, embed, bias=False))
                for name, tower in towers.items()
            }
        )
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        outputs = {}
        for name, value in inputs.items():
            hidden = self.trunks[name](self.preprocessors[name](value))
            hidden = hidden[:, -1] if name == "text" else hidden[:, 0]
            outputs[name] = functional.normalize(self.heads[name](hidden), dim=-1)
        return outputs


def bind_loss(outputs: dict[str, torch.Tensor], log_scale: torch.Tensor) -> torch.Tensor:
    """Contrasts images with each other modality that is there."""
    anchor = outputs["vision"]
    labels = torch.arange(len(anchor), device=anchor.device)
    losses = []
    for name, other in outputs.items():
        if name != "vision":
            logits = log_scale.exp() * anchor @ other.T
            losses.append(functional.cross_entropy(logits, labels) + functional.cross_entropy(logits.T, labels))
    return torch.stack(losses).mean() / 2


def main(arguments: Sequence[str] | None = None) -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--train-all", action="store_true", help="image and text towers, too")
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    towers, embed, vocabulary, batch = SIZES[args.size]
    model = Binding(towers, embed, vocabulary).to(args.device)
    for name in () if args.train_all else ("vision", "text"):
        for part in (model.preprocessors, model.trunks, model.heads):
            part[name].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-4)
    generator = torch.Generator().manual_seed(1)

    def draw(*, audio: bool = True) -> dict[str, torch.Tensor]:
        found = {}
        for name, tower in towers.items():
            if name == "text":
                found[name] = torch.randint(vocabulary, (batch, *tower.shape), generator=generator).to(args.device)
            elif audio or name != "audio":
                found[name] = torch.randn(batch, *tower.shape, generator=generator).to(args.device)
        return found

    first = draw()
    mosaic.colocate(model, sample=(first,))  # <- mosaic

    losses = []
    for step in range(args.steps):
        loss = bind_loss(model(draw(audio=step % 3 != 2)), model.log_scale)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses


if __name__ == "__main__":
    print(*(f"{loss:.4f}" for loss in main()[2]))
