"""Lightning's Trainer and Fabric, with one line more: the one that ends in ``# <- mosaic``.

A model with an image, a sound and a text encoder and a common space. In ``--form trainer`` a LightningModule with its
optimizer and a schedule; in ``--form fabric`` one's own loop with ``fabric.setup`` and ``fabric.backward``.

    python examples/lightning_loop.py                                           # seconds, on CPU cores
    python examples/lightning_loop.py --form fabric --precision bf16-mixed
    python examples/lightning_loop.py --size full --device cuda
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import mosaic

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Size:
    image: int
    patch: int
    frames: int
    words: int
    widths: tuple[int, int, int]
    layers: int
    embed: int
    batch: int


SIZES = {
    "tiny": Size(16, 8, 16, 8, (48, 32, 32), 2, 24, 4),
    "full": Size(224, 16, 400, 77, (768, 768, 512), 12, 512, 64),
}


class Encoder(nn.Module):
    def __init__(self, stem: nn.Module, width: int, size: Size) -> None:
        super().__init__()
        self.stem = stem
        layer = nn.TransformerEncoderLayer(width, width // 16, 4 * width, 0.1, "gelu", batch_first=True)
        self.body = nn.TransformerEncoder(layer, size.layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, size.embed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = x.flatten(2).transpose(1, 2) if x.ndim == 4 else x
        return functional.normalize(self.head(self.body(x).mean(1)), dim=-1)


class TriModal(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        image, sound, text = size.widths
        self.image = Encoder(nn.Conv2d(3, image, size.patch, size.patch), image, size)
        self.sound = Encoder(nn.Linear(40, sound), sound, size)
        self.text = Encoder(nn.Embedding(1000, text), text, size)

    def forward(self, images: torch.Tensor, sounds: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        image, sound, text = self.image(images), self.sound(sounds), self.text(words)
        labels = torch.arange(len(image), device=image.device)
        pairs = ((image, sound), (image, text))
        return sum(functional.cross_entropy(10 * left @ right.T, labels) for left, right in pairs)


class Drawn(Dataset[Batch]):
    """Batches that are drawn by number, the same ones each time."""

    def __init__(self, size: Size, count: int) -> None:
        self.size, self.count = size, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Batch:
        size, generator = self.size, torch.Generator().manual_seed(index)
        images = torch.randn(size.batch, 3, size.image, size.image, generator=generator)
        sounds = torch.randn(size.batch, size.frames, 40, generator=generator)
        return images, sounds, torch.randint(1000, (size.batch, size.words), generator=generator)


class Task(lightning.LightningModule):
    def __init__(self, model: TriModal) -> None:
        super().__init__()
        self.model = model
        self.losses: list[float] = []

    def training_step(self, batch: Batch, index: int) -> torch.Tensor:
        loss = self.model(*batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


Trained = tuple[torch.optim.Optimizer, list[float]]


def with_trainer(model: TriModal, loader: DataLoader[Batch], args: argparse.Namespace) -> Trained:
    task = Task(model)
    trainer = lightning.Trainer(
        accelerator=args.device,
        devices=1,
        precision=args.precision,
        max_epochs=1,
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, loader)
    return trainer.optimizers[0], task.losses


def with_fabric(model: TriModal, loader: DataLoader[Batch], args: argparse.Namespace) -> Trained:
    fabric = lightning.Fabric(accelerator=args.device, devices=1, precision=args.precision)
    fabric.launch()
    wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    losses = []
    for batch in fabric.setup_dataloaders(loader):
        loss = wrapped(*batch)
        fabric.backward(loss)
        fabric.clip_gradients(wrapped, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return optimizer.optimizer, losses


FORMS = {"trainer": with_trainer, "fabric": with_fabric}


def main(arguments: Sequence[str] | None = None) -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--form", choices=FORMS, default="trainer")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=["32-true", "bf16-mixed"], default="32-true")
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    size = SIZES[args.size]
    model = TriModal(size).to(args.device)
    data = Drawn(size, args.steps)
    loader = DataLoader(data, batch_size=None)

    def first() -> torch.Tensor:
        with torch.autocast(args.device, torch.bfloat16, enabled=args.precision == "bf16-mixed"):
            images, sounds, words = (value.to(args.device) for value in data[0])
            if args.form == "fabric" and args.precision == "bf16-mixed":  # Fabric casts batches itself
                images, sounds = images.bfloat16(), sounds.bfloat16()
            return model(images, sounds, words)

    mosaic.colocate(model, sample=first)  # <- mosaic

    return model, *FORMS[args.form](model, loader, args)


if __name__ == "__main__":
    print(*(f"{loss:.4f}" for loss in main()[2]))
