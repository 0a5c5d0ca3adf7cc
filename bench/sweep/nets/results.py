"""Arguments and results of all kinds: dicts, dataclasses, lists that vary, aliases, None, keywords, generators."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from bench.sweep.nets.pieces import Two, batch, tower, train
from bench.sweep.session import Session


def _net(result, glue, a=None):
    """Returns two towers, each of which makes ``result`` of itself, its input and its net's result."""

    class Made(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = tower()

        def forward(self, x):
            return result(self, x, self.net(x))

    class Net(Two):
        def forward(self, x, y):
            return glue(self.a(x), self.b(y))

    return Net(a or Made(), Made())


def dict_results(session: Session):
    model = _net(
        lambda self, x, made: {"made": made, "norm": made.norm(dim=1)}, lambda a, b: a["made"] * b["norm"][:, None]
    )
    train(session, model)


def named_tuple_results(session: Session):
    made_of = namedtuple("made_of", "made extra")
    train(session, _net(lambda self, x, made: made_of(made, made.mean(1)), lambda a, b: a.made * b.extra[:, None]))


def dataclass_results(session: Session):
    @dataclass
    class Made:
        made: torch.Tensor
        extra: torch.Tensor | None = None

    train(session, _net(lambda self, x, made: Made(made, made.tanh()), lambda a, b: a.made * b.extra))


def model_output_results(session: Session):
    def result(self, x, made):
        return BaseModelOutput(last_hidden_state=made, hidden_states=(x, made), attentions=None)

    train(session, _net(result, lambda a, b: a.last_hidden_state * b.hidden_states[1] + b[0] + a.to_tuple()[1][0]))


def model_output_of_its_own(session: Session):
    @dataclass
    class Made(ModelOutput):
        made: torch.FloatTensor | None = None
        loss: torch.FloatTensor | None = None

    def loss(model, inputs):
        made = model(*inputs)
        return made.loss + made["made"].square().mean()

    model = _net(
        lambda self, x, made: Made(made=made, loss=made.abs().mean()),
        lambda a, b: Made(made=a.made * b.made, loss=a.loss + b.loss),
    )
    train(session, model, loss=loss)


def results_of_a_class_of_its_own(session: Session):
    class Made:
        def __init__(self, made):
            self.made = made

    train(session, _net(lambda self, x, made: Made(made), lambda a, b: a.made * b.made))


def list_results_that_vary_in_length(session: Session):
    def result(self, x, made):
        return [made * (index + 1) for index in range(1 + int(x[0, 0] > 0))]

    train(session, _net(result, lambda a, b: sum(a) * sum(b)), steps=6)


def results_with_none_and_numbers(session: Session):
    train(session, _net(lambda self, x, made: (made, None, 3, "text", made.shape), lambda a, b: a[0] * b[0] * a[2]))


def result_is_none_on_some_steps(session: Session):
    def glue(a, b):
        return a[0] * b[0] if b[1] is None else a[0] * b[1]

    train(session, _net(lambda self, x, made: (made, made.tanh() if x[0, 0] > 0 else None), glue), steps=6)


def tower_that_only_keeps_its_result(session: Session):
    class Keeping(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = tower()

        def forward(self, x):
            self.made = self.net(x)

    class Net(Two):
        def forward(self, x, y):
            self.a(x)
            self.b(y)
            return self.a.made * self.b.made

    train(session, Net(Keeping(), Keeping()))


def generator_as_a_result(session: Session):
    class Yielding(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x).tanh()
                yield x

    class Net(Two):
        def forward(self, x, y):
            return sum(a * b for a, b in zip(self.a(x), self.b(y), strict=True))

    train(session, Net(Yielding(), Yielding()))


def input_passed_through(session: Session):
    train(session, _net(lambda self, x, made: (made, x), lambda a, b: a[0] * b[1] + b[0] * a[1]))


def input_returned_as_a_view(session: Session):
    train(
        session,
        _net(lambda self, x, made: (made, x[:, ::2], x.T), lambda a, b: a[0][:, ::2] * b[1] + (b[0] @ a[2]).sum()),
    )


def tower_switched_off_returns_its_input(session: Session):
    class Switched(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.is_on = tower(), True

        def forward(self, x):
            return self.net(x) if self.is_on else x

    model = Two(Switched(), Switched())
    train(session, model, before=lambda step: setattr(model.a, "is_on", step != 2), steps=5)


def results_that_are_views_of_each_other(session: Session):
    def glue(a, b):
        a[0].mul_(2)
        return a[1] * b[1] + b[0].sum()

    train(session, _net(lambda self, x, made: (made, made[:, :8], made.view(-1, 4, 8)), glue))


def the_same_tensor_twice(session: Session):
    train(session, _net(lambda self, x, made: (made, made), lambda a, b: a[0] * b[1] + a[1] * b[0]))


def parameter_as_a_result(session: Session):
    model = _net(
        lambda self, x, made: (made, self.net[0].weight), lambda a, b: a[0] * b[0] + (a[1] - b[1]).square().mean()
    )
    train(session, model)


def buffer_as_a_result(session: Session):
    class Offset(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = tower()
            self.register_buffer("offset", torch.ones(32))

        def forward(self, x):
            self.offset += 1
            return self.net(x), self.offset

    class Net(Two):
        def forward(self, x, y):
            (a, more), (b, less) = self.a(x), self.b(y)
            return a * b + more - less * 2

    train(session, Net(Offset(), Offset()))


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


def chain_of_towers(session: Session):
    class Net(Two):
        def forward(self, x, y):
            return self.b(self.a(x)) * y

    train(session, Net())


def three_towers_and_a_fusion(session: Session):
    class Net(Two):
        def __init__(self):
            super().__init__()
            self.c, self.fusion = tower(), nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)

        def forward(self, x, y):
            return self.fusion(torch.stack([self.a(x), self.b(y), self.c(x - y)], 1))

    train(session, Net())


def methods_other_than_forward(session: Session):
    class Net(Two):
        def encode(self, x):
            return self.a(x)

        def forward(self, x, y):
            return self.encode(x) * self.b.forward(y)

    def loss(model, inputs):
        return model(*inputs).square().mean() + model.encode(inputs[1]).mean()

    train(session, Net(), loss=loss)
