"""Results of all kinds: dicts, dataclasses, lists that vary, aliases, None, generators."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.utils import ModelOutput

from bench.sweep.nets.pieces import alike, between, losses, tower, train
from bench.sweep.session import Session


def _net(result: Callable[..., Any], glue: Callable[..., Any]) -> nn.Module:
    """Returns two towers, each of which makes ``result`` of itself, its input and its net's result."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = alike(lambda self, x: result(self, x, self.net(x)))

        def forward(self, x, y):
            return glue(self.a(x), self.b(y))

    return Net()


def _glued(glue: Callable[..., Any], steps: int = 4) -> Callable[..., Callable[[Session], None]]:
    """Makes a case of a function that makes the towers' results; ``glue`` joins those of both."""

    def case(result):
        def run(session: Session) -> None:
            train(session, _net(result, glue), steps=steps)

        run.__module__ = result.__module__
        return run

    return case


@_glued(lambda a, b: a["made"] * b["norm"][:, None])
def dict_results(self, x, made):
    return {"made": made, "norm": made.norm(dim=1)}


_Named = namedtuple("_Named", "made extra")


@_glued(lambda a, b: a.made * b.extra[:, None])
def named_tuple_results(self, x, made):
    return _Named(made, made.mean(1))


@dataclass
class _Output(ModelOutput):
    made: torch.FloatTensor | None = None
    loss: torch.FloatTensor | None = None


def _output_net() -> nn.Module:
    return _net(
        lambda self, x, made: _Output(made=made, loss=made.abs().mean()),
        lambda a, b: _Output(made=a.made * b.made, loss=a.loss + b.loss),
    )


@losses(model=_output_net)
def model_output_of_its_own(session, model, inputs):
    made = model(*inputs)
    return made.loss + made["made"].square().mean()


class _Own:
    def __init__(self, made):
        self.made = made


@_glued(lambda a, b: a.made * b.made)
def results_of_a_class_of_its_own(self, x, made):
    return _Own(made)


@_glued(lambda a, b: sum(a) * sum(b), steps=6)
def list_results_that_vary_in_length(self, x, made):
    return [made * (index + 1) for index in range(1 + int(x[0, 0] > 0))]


@_glued(lambda a, b: a[0] * b[0] * a[2])
def results_with_none_and_numbers(self, x, made):
    return made, None, 3, "text", made.shape


@_glued(lambda a, b: a[0] * b[0] if b[1] is None else a[0] * b[1], steps=6)
def result_is_none_on_some_steps(self, x, made):
    return made, made.tanh() if x[0, 0] > 0 else None


def _keep(self, x):
    self.made = self.net(x)


@between(towers=lambda: alike(_keep))
def tower_that_only_keeps_its_result(self, x, y):
    self.a(x)
    self.b(y)
    return self.a.made * self.b.made


def _yield(self, x):
    for layer in self.layers:
        x = layer(x).tanh()
        yield x


@between(towers=lambda: alike(_yield, layers=lambda: nn.ModuleList(nn.Linear(32, 32) for _ in range(3))))
def generator_as_a_result(self, x, y):
    return sum(a * b for a, b in zip(self.a(x), self.b(y), strict=True))


@_glued(lambda a, b: a[0][:, ::2] * b[1] + (b[0] @ a[2]).sum())
def input_returned_as_a_view(self, x, made):
    return made, x[:, ::2], x.T


def _switch(self, x):
    return self.net(x) if self.is_on else x


@between(
    towers=lambda: alike(_switch, net=tower, is_on=True),
    before=lambda model, step: setattr(model.a, "is_on", step != 2),
    steps=5,
)
def tower_switched_off_returns_its_input(self, x, y):
    return self.a(x) * self.b(y)


def _views_joined(a, b):
    a[0].mul_(2)
    return a[1] * b[1] + b[0].sum()


@_glued(_views_joined)
def results_that_are_views_of_each_other(self, x, made):
    return made, made[:, :8], made.view(-1, 4, 8)


@_glued(lambda a, b: a[0] * b[1] + a[1] * b[0])
def the_same_tensor_twice(self, x, made):
    return made, made


@_glued(lambda a, b: a[0] * b[0] + (a[1] - b[1]).square().mean())
def parameter_as_a_result(self, x, made):
    return made, self.net[0].weight


def _offset(self, x):
    self.offset += 1
    return self.net(x), self.offset


@between(towers=lambda: alike(_offset, net=tower, offset=lambda: torch.ones(32)))
def buffer_as_a_result(self, x, y):
    (a, more), (b, less) = self.a(x), self.b(y)
    return a * b + more - less * 2
