"""What a user writes, in small, of a model that a pipeline can cut: two towers and a backbone, all of layers."""

import copy
import json

import torch
from torch import nn


class Rows(torch.utils.data.Dataset):
    """Rows of a file; those trained on have noise."""

    def __init__(self, folder, train):
        self.rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
        self.train = train

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        left, right = torch.tensor(row["left"]), torch.tensor(row["right"])
        left = left + 0.1 * torch.randn(4) if self.train else left
        return {"inputs": {"left": left, "right": right}, "label": row["label"], "modality": "left+right"}


class Layer(nn.Module):
    """Has dropout."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        """Adds to what comes in."""
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


class Tower(nn.Module):
    """Widens its rows, and has layers."""

    def __init__(self, count):
        super().__init__()
        self.widen, self.layers = nn.Linear(4, 16), nn.ModuleList(Layer() for _ in range(count))

    def forward(self, x):
        """Returns a row's features."""
        x = self.widen(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Model(nn.Module):
    """Two towers whose sum goes through a backbone."""

    def __init__(self):
        super().__init__()
        self.left, self.right = Tower(2), Tower(2)
        self.backbone, self.head = nn.ModuleList(Layer() for _ in range(4)), nn.Linear(16, 2)

    def forward(self, left, right):
        """Returns the logits of two classes."""
        x = self.left(left) + self.right(right)
        for layer in self.backbone:
            x = layer(x)
        return self.head(x)


def make_companions(model):
    """An average of the weights."""
    return {"ema": copy.deepcopy(model)}


def update_companions(model, companions):
    """Takes a tenth of what the weights are now."""
    for kept, now in zip(companions["ema"].parameters(), model.parameters(), strict=True):
        kept.lerp_(now, 0.1)


def loss(model, batch):
    """Of two classes."""
    return nn.functional.cross_entropy(model(**batch["inputs"]), batch["label"])


def score(model, batch):
    """Whether each row is told right."""
    right = model(**batch["inputs"]).argmax(1) == batch["label"]
    return {"value": right.float(), "label": batch["label"], "modality": batch["modality"]}
