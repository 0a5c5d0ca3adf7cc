"""Model and data of this folder: `mosaic retrain` reads this file each day. It is yours; change what you like.

The example reads digits that were written by hand, spoken, or (from the day on which you add "imu" to MODALITIES)
drawn in the air with a sensor on the wrist. A row may lack any of them. Nothing in here knows of Mosaic.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Dataset

MODALITIES = ("image", "audio")
SHAPES = {"image": (1, 8, 8), "audio": (40, 32), "imu": (6, 48)}
WIDTH = 64


class Tower(nn.Sequential):
    """Two convolutions over a modality of some shape (channels, sides), and its features: (batch, WIDTH)."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        convolution = nn.Conv2d if len(shape) == 3 else nn.Conv1d
        super().__init__(
            convolution(shape[0], 32, 3, padding=1),
            nn.GELU(),
            convolution(32, 64, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Dropout(0.1),
            nn.Flatten(),
            nn.Linear(64 * math.prod(side // 2 for side in shape[1:]), WIDTH),
        )


class DigitReader(nn.Module):
    """One tower a modality; a row's features are averaged over the modalities that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleDict({name: Tower(SHAPES[name]) for name in MODALITIES})
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10))

    def forward(self, inputs: dict[str, Tensor], has: dict[str, Tensor]) -> Tensor:
        """Returns (batch, 10) logits; ``has`` is 1 or 0 for each row and modality."""
        features = [tower(inputs[name]) * has[name].unsqueeze(1) for name, tower in self.towers.items()]
        num_present = torch.stack(list(has.values())).sum(0).unsqueeze(1)
        return self.head(torch.stack(features).sum(0) / num_present)


class Rows(Dataset[dict[str, Any]]):
    """A folder's rows: ``index.jsonl`` lists them, ``rows.safetensors`` holds their data."""

    def __init__(self, folder: Path, train: bool) -> None:
        rows = [json.loads(line) for line in (folder / "index.jsonl").read_text(encoding="utf-8").splitlines()]
        self.rows = [row for row in rows if any(name in row for name in MODALITIES)]
        self.stored = load_file(folder / "rows.safetensors")
        self.train = train

    def __len__(self) -> int:
        return len(self.rows)

    def cluster(self, place: int) -> str:
        """Returns a row's cluster: rows of one writer or speaker are trained on, or held out, together."""
        return self.rows[place]["cluster"]

    def __getitem__(self, place: int) -> dict[str, Any]:
        row = self.rows[place]
        present = [name for name in MODALITIES if name in row]
        inputs = {name: torch.zeros(SHAPES[name]) for name in MODALITIES}
        for name in present:
            inputs[name] = self.stored[name][row[name]].float() / 64 - 2
            if self.train:  # mosaic retrain seeds torch, numpy and random for each sample
                inputs[name] = inputs[name].roll(int(torch.randint(-1, 2, ())), dims=-1)
        has = {name: torch.tensor(float(name in row)) for name in MODALITIES}
        facts = {name: row[name] for name in ("label", "site", "cluster")}
        return {"inputs": inputs, "has": has, "modality": "+".join(present), **facts}


def make_model() -> nn.Module:
    """Builds the model; `mosaic retrain` loads the champion's weights into it, by name."""
    return DigitReader()


def make_dataset(folder: Path, train: bool) -> Rows:
    """Opens a day's folder; with ``train`` its samples are augmented."""
    return Rows(folder, train)


def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Returns the loss to minimize."""
    return F.cross_entropy(model(batch["inputs"], batch["has"]), batch["label"], label_smoothing=0.05)


def score(model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    """Returns columns with an entry for each row: ``value`` decides, and rows of one ``cluster`` belong together."""
    right = model(batch["inputs"], batch["has"]).argmax(1) == batch["label"]
    return {"value": right.float(), **{name: batch[name] for name in ("label", "modality", "site", "cluster")}}


def make_optimizer(model: nn.Module, num_steps: int) -> tuple[list[Any], list[Any]]:
    """Returns optimizers and schedulers: each day the rate rises and falls again."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=max(num_steps, 2), pct_start=0.2)
    return [optimizer], [schedule]
