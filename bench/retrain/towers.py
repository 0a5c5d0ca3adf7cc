"""A user's program, in small: two towers, with all that is random or has state in a loop. Copied into a folder."""

import copy
import json
import random
import time

import numpy as np
import torch
from torch import nn


class Rows(torch.utils.data.Dataset):
    """Rows of a file; those trained on are changed by three kinds of random numbers."""

    def __init__(self, folder, train):
        self.rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
        self.train = train

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        if "broken" in row:
            raise ValueError("this row is torn")
        left, right = torch.tensor(row["left"]), torch.tensor(row["right"])
        if self.train:
            left = left + 0.1 * torch.randn(4)
            right = right * float(np.random.uniform(0.9, 1.1))
            right = right.flip(0) if random.random() < 0.1 else right
        more = {"pause_s": row.get("pause_s", 0.0), "modality": row.get("modality", "left+right")}
        return {"left": left, "right": right, "label": row["label"], **more}


def tower():
    """Has dropout, and statistics that are no parameters."""
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2))


class Towers(nn.Module):
    """Two towers and a head."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.head = tower(), tower(), nn.Linear(32, 2)

    def forward(self, left, right):
        """Returns the logits of two classes."""
        return self.head(torch.cat((self.left(left), self.right(right)), dim=1))


def make_optimizer(model, num_steps):
    """Two optimizers, and a rate that falls."""
    towers = torch.optim.AdamW([*model.left.parameters(), *model.right.parameters()], lr=0.01)
    head = torch.optim.SGD(model.head.parameters(), lr=0.05, momentum=0.9)
    return [towers, head], [torch.optim.lr_scheduler.CosineAnnealingLR(towers, num_steps)]


def make_companions(model):
    """An average of the weights."""
    return {"ema": copy.deepcopy(model)}


def update_companions(model, companions):
    """Takes a tenth of what the weights are now."""
    for average, current in zip(companions["ema"].parameters(), model.parameters(), strict=True):
        average.lerp_(current, 0.1)
    for average, current in zip(companions["ema"].buffers(), model.buffers(), strict=True):
        average.copy_(current)


def make_scaler():
    """Grows every three steps."""
    return torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)


def loss(model, batch):
    """A row may ask for time, so that a kill can meet a step."""
    time.sleep(float(batch["pause_s"].max()))
    return nn.functional.cross_entropy(model(batch["left"], batch["right"]), batch["label"])


def score(model, batch):
    """Returns for each row 1 if its class is right."""
    right = model(batch["left"], batch["right"]).argmax(1) == batch["label"]
    return {"value": right.float(), "label": batch["label"], "modality": batch["modality"]}
