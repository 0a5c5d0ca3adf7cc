"""Models with lists of layers that are written by hand, in torch's and timm's ways."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from bench.sweep.inputs import IMAGES, Draw, batch, words

Made = tuple[nn.Module, Draw]


class _Classifier(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(99, 32), layers, nn.Linear(32, 3)

    def forward(self, ids):
        return self.head(self.layers(self.embed(ids)).mean(1))


def encoder_of_torch() -> Made:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    layers = nn.TransformerEncoder(layer, 4, norm=nn.LayerNorm(32))
    return _Classifier(layers), batch(ids=words)


def transformer_of_torch() -> Made:
    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(99, 32)
            self.inner = nn.Transformer(32, 4, 3, 3, 64, dropout=0.1, batch_first=True)
            self.head = nn.Linear(32, 99)

        def forward(self, source, target):
            mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
            return self.head(self.inner(self.embed(source), self.embed(target), tgt_mask=mask, tgt_is_causal=True))

    return Translator(), batch(source=words, target=partial(words, length=8))


def sequential() -> Made:
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]
    return nn.Sequential(nn.Linear(16, 32), *blocks, nn.Linear(32, 2)), batch(input=(8, 16))


def sequential_that_writes_in_place() -> Made:
    layers = [layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Dropout(0.0))]
    return nn.Sequential(*layers), batch(input=(8, 16))


class _Block(nn.Module):
    """A block of a vision transformer, with scaled residuals that are dropped by rows."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.norm, self.attend = nn.LayerNorm(32), nn.MultiheadAttention(32, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.scale, self.rate = nn.Parameter(torch.full((32,), 0.1)), rate

    def forward(self, x):
        normed = self.norm(x)
        x = x + self._dropped(self.attend(normed, normed, normed, need_weights=False)[0] * self.scale)
        return x + self._dropped(self.mlp(x))

    def _dropped(self, x):
        return x * torch.bernoulli(torch.full((len(x), 1, 1), 1 - self.rate, dtype=x.dtype))


class _Patches(nn.Module):
    """A vision transformer as timm writes it: blocks in a Sequential, a class token, positions."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 32, 8, 8)
        self.cls_token, self.pos_embed = nn.Parameter(torch.zeros(1, 1, 32)), nn.Parameter(torch.zeros(1, 17, 32))
        self.pos_drop, self.norm = nn.Dropout(0.0), nn.LayerNorm(32)
        self.blocks = nn.Sequential(*(_Block(0.1 * index) for index in range(depth)))

    def forward(self, image):
        x = self.patch_embed(image).flatten(2).transpose(1, 2)
        x = self.pos_drop(torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed)
        return self.norm(self.blocks(x))[:, 0]


def blocks_of_timm() -> Made:
    return nn.Sequential(_Patches(), nn.Linear(32, 3)), batch(input=IMAGES)


def image_bind() -> Made:
    """Makes towers of three kinds whose results are pulled together, two and two."""

    class Bound(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
            self.image, self.text = _Patches(3), _Classifier(nn.TransformerEncoder(layer, 3))
            self.sound = nn.ModuleDict(
                {"stem": nn.Linear(16, 32), "trunk": nn.ModuleList(_Block(0.1) for _ in range(3))}
            )
            self.text.head = nn.Linear(32, 32)
            self.heat = nn.Parameter(torch.tensor(1.0))

        def forward(self, image, ids, sound):
            heard = self.sound["stem"](sound)
            for block in self.sound["trunk"]:
                heard = block(heard)
            made = [nn.functional.normalize(one, dim=-1) for one in (self.image(image), self.text(ids), heard.mean(1))]
            same = torch.arange(len(ids))
            pairs = ((made[0], made[1]), (made[0], made[2]))
            return sum(nn.functional.cross_entropy(self.heat.exp() * one @ other.T, same) for one, other in pairs)

    return Bound(), batch(image=IMAGES, ids=words, sound=(4, 6, 16))
