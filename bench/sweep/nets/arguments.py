"""Arguments of all kinds: keywords, numbers, dicts, generators, objects, odd tensors; and how towers are wired."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from bench.sweep.nets.pieces import Two, batch, between, tower, train
from bench.sweep.session import Session


def keywords_only(session: Session):
    class Keyed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = tower()

        def forward(self, *, x, scale=1.0, mask=None, flags=()):
            made = self.net(x) * scale
            return made if mask is None else made.masked_fill(mask, 0.0)

    class Net(Two):
        def forward(self, x, y):
            a = self.a(x=x, scale=2.0, mask=y > 0)
            return a * self.b(x=y, flags=("one", "two"))

    train(session, Net(Keyed(), Keyed()))


def numbers_that_change_as_arguments(session: Session):
    class Tempered(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = tower()

        def forward(self, x, temperature):
            return self.net(x) / temperature

    class Net(Two):
        temperature = 1.0

        def forward(self, x, y):
            return self.a(x, self.temperature) * self.b(y, 2)

    model = Net(Tempered(), Tempered())
    train(session, model, before=lambda step: setattr(model, "temperature", 1.0 + step), steps=6)


def dicts_and_lists_as_arguments(session: Session):
    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = tower()

        def forward(self, parts, options):
            return self.net(sum(parts["tensors"])) * options.get("scale", 1)

    class Net(Two):
        def forward(self, x, y):
            a = self.a({"tensors": [x, y]}, {"scale": 2})
            return a * self.b({"tensors": [y, a]}, {})

    train(session, Net(Fused(), Fused()))


def argument_changed_after_the_call(session: Session):
    class Scaling(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = tower()

        def forward(self, x, options):
            return self.net(x) * options["scale"]

    class Net(Two):
        def forward(self, x, y):
            options = {"scale": 2.0}
            a = self.a(x, options)
            options["scale"] = 0.5
            return a * self.b(y, options)

    train(session, Net(Scaling(), Scaling()))


def dict_filled_by_a_tower(session: Session):
    class Filling(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.net, self.name = tower(), name

        def forward(self, x, features):
            features[self.name] = self.net(x)

    class Net(Two):
        def forward(self, x, y):
            features = {}
            self.a(x, features)
            self.b(y, features)
            return features["a"] * features["b"]

    train(session, Net(Filling("a"), Filling("b")))


def generator_as_an_input(session: Session):
    class Summed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = tower()

        def forward(self, parts):
            return sum(self.net(part) for part in parts)

    class Net(Two):
        def forward(self, x, y):
            return self.a(part for part in x.split(16)) * self.b(part for part in y.split(16))

    train(session, Net(Summed(), Summed()))


def inputs_of_a_class_of_its_own(session: Session):
    class Pair:
        def __init__(self, x, y):
            self.x, self.y = x, y

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = tower()

        def forward(self, pair):
            return self.net(pair.x + pair.y)

    class Net(Two):
        def forward(self, x, y):
            a = self.a(Pair(x, y))
            return self.b(Pair(y, a))

    train(session, Net(Mixed(), Mixed()))


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


def callable_as_a_sample(session: Session):
    model = Two()
    session.colocate(model, lambda: model(*batch(0)).square().mean())
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for step in range(4):
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


def parameter_as_an_argument(session: Session):
    class Prompted(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = tower()

        def forward(self, x, prompt):
            return self.net(x + prompt)

    class Net(Two):
        def __init__(self):
            super().__init__(Prompted(), Prompted())
            self.prompt = nn.Parameter(torch.zeros(32))

        def forward(self, x, y):
            return self.a(x, self.prompt) * self.b(y, self.prompt)

    train(session, Net())


@between()
def chain_of_towers(self, x, y):
    return self.b(self.a(x)) * y


@between(c=tower, fusion=lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True))
def three_towers_and_a_fusion(self, x, y):
    return self.fusion(torch.stack([self.a(x), self.b(y), self.c(x - y)], 1))


def methods_other_than_forward(session: Session):
    class Net(Two):
        def encode(self, x):
            return self.a(x)

        def forward(self, x, y):
            return self.encode(x) * self.b.forward(y)

    def loss(model, inputs):
        return model(*inputs).square().mean() + model.encode(inputs[1]).mean()

    train(session, Net(), loss=loss)
