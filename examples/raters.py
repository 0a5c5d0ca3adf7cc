"""Several raters over one batch of video clips, without gradients, in the explicit form: two lines for one.

As in V-Bench, where each clip goes through many models, none of which fills a GPU (the paper's section 3.5): one rater
looks at single frames, one at how they change, one at how well the clip fits its caption. The lines that end in
``# <- mosaic`` stand for the one after ``# plain:``.

    python examples/raters.py                              # seconds, on CPU cores
    python examples/raters.py --size full --device cuda --slots 8 4 4
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
    width: int
    layers: int
    frames: int
    image: int
    patch: int
    words: int
    batch: int


SIZES = {"tiny": Size(32, 2, 4, 16, 8, 8, 2), "full": Size(768, 12, 16, 224, 14, 64, 4)}


def transformer(width: int, layers: int) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(width, width // 16, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


class Looks(nn.Module):
    """Rates each frame by itself."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, size.width, size.patch, size.patch)
        self.body = transformer(size.width, size.layers)
        self.score = nn.Linear(size.width, 1)

    def forward(self, clips: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        x = self.body(self.stem(clips.flatten(0, 1)).flatten(2).transpose(1, 2))
        return self.score(x.mean(1)).view(len(clips), -1).mean(1)


class Motion(nn.Module):
    """Rates how the frames follow each other."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv3d(3, size.width, 3, padding=1),
            nn.BatchNorm3d(size.width),
            nn.ReLU(),
            nn.Conv3d(size.width, size.width, 3, stride=2, padding=1),
            nn.ReLU(),
        )
        self.score = nn.Linear(size.width, 1)

    def forward(self, clips: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return self.score(self.layers(clips.transpose(1, 2)).mean((2, 3, 4))).squeeze(-1)


class Fit(nn.Module):
    """Rates how well a clip fits its caption."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, size.width, size.patch, size.patch)
        self.words = nn.Embedding(1000, size.width)
        self.body = transformer(size.width, size.layers)

    def forward(self, clips: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        seen = self.body(self.stem(clips[:, 0]).flatten(2).transpose(1, 2)).mean(1)
        return functional.cosine_similarity(seen, self.body(self.words(words)).mean(1))


def main(arguments: Sequence[str] | None = None) -> tuple[nn.Module, list[dict[str, torch.Tensor]]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--slots", type=int, nargs=3, help="slots of the GPU for looks, motion and fit; a third each by default"
    )
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    size = SIZES[args.size]
    raters = nn.ModuleDict({"looks": Looks(size), "motion": Motion(size), "fit": Fit(size)}).eval().to(args.device)
    generator = torch.Generator().manual_seed(1)
    where = None
    if args.device != "cpu":
        from mosaic.backends.cuda.backend import CudaBackend

        where = CudaBackend()
        third = where.device.num_slots // 3
        args.slots = args.slots or [where.device.num_slots - 2 * third, third, third]
    shares = dict(zip(raters, args.slots, strict=True)) if args.slots else None

    ratings = []
    with torch.no_grad():
        for _ in range(args.steps):
            shape = (size.batch, size.frames, 3, size.image, size.image)
            clips = torch.randn(*shape, generator=generator).to(args.device)
            words = torch.randint(1000, (size.batch, size.words), generator=generator).to(args.device)
            # plain: scores = {name: rater(clips, words) for name, rater in raters.items()}
            with mosaic.parallel(shares, backend=where) as parallel:  # <- mosaic
                scores = {name: parallel.run(name, rater, clips, words) for name, rater in raters.items()}  # <- mosaic
            ratings.append({name: score.clone() for name, score in scores.items()})
    return raters, ratings


if __name__ == "__main__":
    for scores in main()[1]:
        print({name: [round(x, 3) for x in score.tolist()] for name, score in scores.items()})
