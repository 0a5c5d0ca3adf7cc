"""Models that Mosaic cannot see through in one place each; the place is marked by ``# here`` and the model's name."""

from __future__ import annotations

import torch
from engine_cases import TwoTowers, pair_batch, tower
from torch import nn


class Twice(TwoTowers):
    def forward(self, x, y):
        left = self.left(x) + self.left(y)  # here: Twice
        return left @ self.right(y).T


class Reading(TwoTowers):
    def forward(self, x, y):
        left = self.left(x)
        if left.sum() > 0:  # here: Reading
            left = left * 2
        return left @ self.right(y).T


class Choosing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = tower()

    def forward(self, x):
        hidden = self.layers(x)
        return hidden if hidden.mean() > 0 else -hidden  # here: Inside


class Inside(TwoTowers):
    def __init__(self):
        super().__init__(Choosing())


class Shift(nn.Module):
    """Keeps nothing of its input for backward, so that the input may be written to."""

    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x + self.by


class Writing(TwoTowers):
    def __init__(self):
        super().__init__(nn.Sequential(Shift(), *tower()))

    def forward(self, x, y):
        x = x.clone()
        left, right = self.left(x), self.right(y)
        x.add_(1)  # here: Writing
        return left @ right.T + x.mean()


def count(module, args, result):  # here: Hooked
    module.seen = getattr(module, "seen", 0) + 1


class Hooked(TwoTowers):
    def __init__(self):
        super().__init__()
        self.left.register_forward_hook(count)


class Tied(TwoTowers):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.left[0].weight

    def forward(self, x, y):
        return self.left(x) @ self.right(y).T + self.head(x).mean()  # here: Tied


class Compiled(TwoTowers):
    def __init__(self):
        super().__init__()
        self.left.compile(backend="eager")
        self.right = torch.compile(self.right, backend="eager")

    def forward(self, x, y):
        left = self.left(x)  # here: Compiled
        return left @ self.right(y).T

    def __deepcopy__(self, memo):
        twin = type(self)()
        twin.load_state_dict(self.state_dict())
        return twin


class Elsewhere(TwoTowers):
    def __init__(self):
        super().__init__()
        self.right = Choosing().to("meta")


class Refusing(TwoTowers):
    def forward(self, x, y):
        raise ValueError("no such modality")  # here: Refusing


def _maker(kind):
    def make():
        torch.manual_seed(0)
        return kind(), pair_batch(1)

    return make


KINDS = (Twice, Reading, Inside, Writing, Hooked, Tied, Compiled, Elsewhere, Refusing)
globals().update({f"make_{kind.__name__}": _maker(kind) for kind in KINDS})
