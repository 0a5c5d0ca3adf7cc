"""Arguments and results of all kinds: dicts, dataclasses, lists that vary, aliases, None, keywords, generators."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from bench.sweep.nets.pieces import Two, tower, towers, train
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


@towers(before=lambda model, step: setattr(model.a, "is_on", step != 2), steps=5, net=tower, is_on=True)
def tower_switched_off_returns_its_input(self, x):
    return self.net(x) if self.is_on else x


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
