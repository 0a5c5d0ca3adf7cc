"""Arguments of all kinds: keywords, numbers, dicts, generators, objects, odd tensors; and how towers are wired."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from bench.sweep.nets.pieces import Two, alike, batch, between, losses, sgd, stepping, tower, train
from bench.sweep.session import Session


def _keyed(self, *, x, scale=1.0, mask=None, flags=()):
    made = self.net(x) * scale
    return made if mask is None else made.masked_fill(mask, 0.0)


@between(towers=lambda: alike(_keyed))
def keywords_only(self, x, y):
    a = self.a(x=x, scale=2.0, mask=y > 0)
    return a * self.b(x=y, flags=("one", "two"))


@between(
    towers=lambda: alike(lambda self, x, temperature: self.net(x) / temperature),
    before=lambda model, step: setattr(model, "temperature", 1.0 + step),
    steps=6,
    temperature=1.0,
)
def numbers_that_change_as_arguments(self, x, y):
    return self.a(x, self.temperature) * self.b(y, 2)


@between(
    towers=lambda: alike(lambda self, parts, options: self.net(sum(parts["tensors"])) * options.get("scale", 1)),
)
def dicts_and_lists_as_arguments(self, x, y):
    a = self.a({"tensors": [x, y]}, {"scale": 2})
    return a * self.b({"tensors": [y, a]}, {})


@between(towers=lambda: alike(lambda self, x, options: self.net(x) * options["scale"]))
def argument_changed_after_the_call(self, x, y):
    options = {"scale": 2.0}
    a = self.a(x, options)
    options["scale"] = 0.5
    return a * self.b(y, options)


def _fill(self, x, features, name):
    features[name] = self.net(x)


@between(towers=lambda: alike(_fill))
def dict_filled_by_a_tower(self, x, y):
    features = {}
    self.a(x, features, "a")
    self.b(y, features, "b")
    return features["a"] * features["b"]


@between(towers=lambda: alike(lambda self, parts: sum(self.net(part) for part in parts)))
def generator_as_an_input(self, x, y):
    return self.a(part for part in x.split(16)) * self.b(part for part in y.split(16))


class _Pair:
    def __init__(self, x, y):
        self.x, self.y = x, y


@between(towers=lambda: alike(lambda self, pair: self.net(pair.x + pair.y)))
def inputs_of_a_class_of_its_own(self, x, y):
    a = self.a(_Pair(x, y))
    return self.b(_Pair(y, a))


def mapping_as_a_batch(session: Session):
    class Batch(Mapping):
        def __init__(self, parts):
            self.parts = parts

        def __getitem__(self, name):
            return self.parts[name]

        def __iter__(self):
            return iter(self.parts)

        def __len__(self):
            return len(self.parts)

    model = Two()
    session.colocate(model, Batch(dict(zip("xy", batch(0), strict=True))))
    for step in range(4):
        loss = model(**Batch(dict(zip("xy", batch(step), strict=True)))).square().mean()
        loss.backward()
        session.note(loss.item())


@stepping(sample=lambda model: lambda: model(*batch(0)).square().mean(), optimizer=sgd)
def callable_as_a_sample(session, model, optimizer, step):
    optimizer.zero_grad()
    loss = model(*batch(step)).square().mean()
    loss.backward()
    optimizer.step()
    session.note(loss.item())


def expanded_and_strided_inputs(session: Session):
    def odd(step):
        x, y = batch(step)
        return x[:1].expand(64, 32), y.T.contiguous().T

    train(session, Two(), batch=odd)


def subclass_of_tensor_as_input(session: Session):
    class Image(torch.Tensor):
        pass

    train(session, Two(), batch=lambda step: tuple(part.as_subclass(Image) for part in batch(step)))
    session.note(0)


@between(
    towers=lambda: alike(lambda self, x, prompt: self.net(x + prompt)), prompt=lambda: nn.Parameter(torch.zeros(32))
)
def parameter_as_an_argument(self, x, y):
    return self.a(x, self.prompt) * self.b(y, self.prompt)


@between()
def chain_of_towers(self, x, y):
    return self.b(self.a(x)) * y


@between(c=tower, fusion=lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True))
def three_towers_and_a_fusion(self, x, y):
    return self.fusion(torch.stack([self.a(x), self.b(y), self.c(x - y)], 1))


class _Encoding(Two):
    def encode(self, x):
        return self.a(x)

    def forward(self, x, y):
        return self.encode(x) * self.b.forward(y)


@losses(model=_Encoding)
def methods_other_than_forward(session, model, inputs):
    return model(*inputs).square().mean() + model.encode(inputs[1]).mean()
