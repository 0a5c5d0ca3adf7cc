"""Two towers in Lightning's Trainer with Mosaic's callback: the line that ends in ``# <- mosaic``.

Lightning's checkpoints and its metrics are kept where a folder is named, and training goes on from the last one.

    python examples/lightning_callback.py                            # seconds, on CPU cores
    python examples/lightning_callback.py --folder out --steps 12
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from mosaic.integrations.lightning import MosaicCallback

ROWS, IMAGE, SOUND, SPACE = 8, 96, 40, 32


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(IMAGE, 128), nn.GELU(), nn.Linear(128, SPACE))
        self.sound = nn.Sequential(nn.Linear(SOUND, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, SPACE))

    def forward(self, images: torch.Tensor, sounds: torch.Tensor) -> torch.Tensor:
        logits = self.image(images) @ self.sound(sounds).T
        return functional.cross_entropy(logits, torch.arange(len(images), device=images.device))


class Task(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Towers()

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return self.model(*batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)


def main(arguments: Sequence[str] | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--folder", help="where checkpoints and metrics.csv are kept")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    task, callbacks = Task(), []
    pairs = TensorDataset(torch.randn(4 * ROWS, IMAGE), torch.randn(4 * ROWS, SOUND))
    if args.folder:
        callbacks.append(ModelCheckpoint(args.folder, save_last=True, every_n_train_steps=5))
    callbacks.append(MosaicCallback())  # <- mosaic
    trainer = lightning.Trainer(
        accelerator=args.device,
        devices=1,
        max_steps=args.steps,
        log_every_n_steps=2,
        callbacks=callbacks,
        logger=CSVLogger(args.folder) if args.folder else False,
        enable_checkpointing=bool(args.folder),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = Path(args.folder or "", "last.ckpt")
    trainer.fit(task, DataLoader(pairs, ROWS), ckpt_path=last if args.folder and last.exists() else None)
    return task.model, trainer.optimizers[0]


if __name__ == "__main__":
    model, _ = main()
    print(f"{sum(parameter.square().sum() for parameter in model.parameters()):.4f}")
