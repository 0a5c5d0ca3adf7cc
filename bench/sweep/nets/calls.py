"""Kinds of arguments and results, wiring of towers, branches on values, and changing shapes."""

from __future__ import annotations

from collections import namedtuple

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from bench.sweep.nets.pieces import Two, alike, batch, between, losses, models, net, squared, tower, towers
from bench.sweep.session import Session


def _keyed(self, *, x, scale=1.0, mask=None, flags=()):
    result = self.net(x) * scale
    return result if mask is None else result.masked_fill(mask, 0.0)


@between(towers=lambda: alike(_keyed))
def keywords_only(self, x, y):
    a = self.a(x=x, scale=2.0, mask=y > 0)
    return a * self.b(x=y, flags=("one", "two"))


@between(
    towers=lambda: alike(lambda self, x, temperature: self.net(x) / temperature),
    before=lambda session, model, step: setattr(model, "temperature", 1.0 + step),
    steps=6,
    temperature=1.0,
)
def numbers_that_change_as_arguments(self, x, y):
    return self.a(x, self.temperature) * self.b(y, 2)


@between(towers=lambda: alike(lambda self, parts, options: self.net(sum(parts["tensors"])) * options.get("scale", 1)))
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


class _Pair:
    def __init__(self, x, y):
        self.x, self.y = x, y


@between(towers=lambda: alike(lambda self, pair: self.net(pair.x + pair.y)))
def inputs_of_a_class_of_its_own(self, x, y):
    a = self.a(_Pair(x, y))
    return self.b(_Pair(y, a))


def _strided(step):
    x, y = batch(step)
    return x[:1].expand(64, 32), y.T.contiguous().T


class _Image(torch.Tensor):
    pass


class _Encoding(Two):
    def encode(self, x):
        return self.a(x)

    def forward(self, x, y):
        return self.encode(x) * self.b.forward(y)


@losses(_Encoding)
def methods_other_than_forward(session, model, inputs):
    return squared(model, inputs) + model.encode(inputs[1]).mean()


def _results(result, glue, steps: int = 4):
    """Returns a case of towers that make ``result`` of their input and their net's; ``glue`` joins both."""
    make = lambda: alike(lambda self, x: result(x, self.net(x)))  # noqa: E731
    return models(lambda: net(lambda self, x, y: glue(self.a(x), self.b(y)), *make()), steps=steps)


_Named = namedtuple("_Named", "tensor norm rest")


def _write_a_view(a, b):
    a[0].mul_(2)
    return a[1] * b[1] + b[0].sum()


def _yield(self, x):
    for layer in self.layers:
        x = layer(x).tanh()
        yield x


@between(towers=lambda: alike(_yield, layers=lambda: nn.ModuleList(nn.Linear(32, 32) for _ in range(3))))
def generator_as_a_result(self, x, y):
    return sum(a * b for a, b in zip(self.a(x), self.b(y), strict=True))


@between(
    towers=lambda: alike(lambda self, x: self.net(x) if self.is_on else x, net=tower, is_on=True),
    before=lambda session, model, step: setattr(model.a, "is_on", step != 2),
    steps=5,
)
def tower_switched_off_returns_its_input(self, x, y):
    return self.a(x) * self.b(y)


def _count(self, x):
    self.offset += 1
    return self.net(x), self.offset


@between(towers=lambda: alike(_count, net=tower, offset=lambda: torch.ones(32)))
def buffer_as_a_result(self, x, y):
    (a, more), (b, less) = self.a(x), self.b(y)
    return a * b + more - less * 2


@between(steps=6)
def number_of_rows_depends_on_a_result(self, x, y):
    a = self.a(x)
    rows = (a[:, 0] > 0).nonzero()[:, 0]
    return self.b(y[rows]).sum(0) + a.mean(0)


@between(towers=lambda: tuple(nn.GRU(8, 16, batch_first=True) for _ in range(2)))
def packed_sequence_between_modules(self, x, y):
    packed = pack_padded_sequence(x.view(-1, 4, 8), torch.full((len(x),), 3), batch_first=True)
    a, _ = self.a(packed)
    b, _ = self.b(y.view(-1, 4, 8))
    return pad_packed_sequence(a, batch_first=True)[0] * b[:, :3]


@towers(net=lambda: nn.Linear(32, 32))
def nested_tensors(self, x):
    parts = torch.nested.nested_tensor([x[:20], x[20:]], layout=torch.jagged, requires_grad=False)
    return torch.cat(self.net(parts).unbind())


@losses(batch=lambda step: batch(step, (64, 0, 48)[step % 3]), steps=6)
def batches_of_other_sizes_and_empty_ones(session, model, inputs):
    return model(*inputs).square().sum()


@between(batch=lambda step: batch(step)[: 1 + (step != 2)], steps=5)
def missing_modality(self, x, y=None):
    a = self.a(x)
    return a if y is None else a + self.b(y)


@between(steps=6)
def towers_called_in_another_order(self, x, y):
    if x.sum() > 0:
        return self.a(x) - self.b(y)
    b = self.b(y)
    return b * self.a(x)


@between()
def tower_called_in_a_loop(self, x, y):
    for _ in range(3):
        x = self.a(x) + x
    return x * self.b(y)


def _calling_its_parent():
    model = Two(*alike(lambda self, x: self.net(x) + self.parent[0].shared(x)))
    model.shared = nn.Linear(32, 32)
    model.a.parent = model.b.parent = [model]
    return model


def _decode(self, state):
    token, logits = torch.zeros(len(state), dtype=torch.long, device=state.device), []
    for _ in range(6):
        state = self.cell(self.table(token), state)
        logits.append(self.out(state))
        token = logits[-1].argmax(1)
        if (token == 3).all():
            break
    return torch.stack(logits, 1).sum(1)


@between()
def numbers_taken_between_modules(self, x, y):
    a = self.a(x)
    scale = 1.0 + abs(a.mean().item()) + sum(a[0].tolist()[:3])
    text = f"{a.std():.3f} {a.detach()[0, :2]}"  # with its grad_fn, whose name differs, docs/limits.md
    return self.b(y * scale) * a * len(text)


@between()
def numpy_between_modules(self, x, y):
    a = self.a(x)
    order = a.detach().cpu().numpy().sum(1).argsort()
    return a[torch.from_numpy(order).to(x.device)] * self.b(y)


def subclass_of_tensor_as_input(session: Session):
    models(batch=lambda step: tuple(part.as_subclass(_Image) for part in batch(step)))(session)
    session.note(0)


CASES = {
    "expanded_and_strided_inputs": models(batch=_strided),
    "parameter_as_an_argument": between(
        towers=lambda: alike(lambda self, x, prompt: self.net(x + prompt)), prompt=lambda: nn.Parameter(torch.zeros(32))
    )(lambda self, x, y: self.a(x, self.prompt) * self.b(y, self.prompt)),
    "module_that_calls_its_parent": models(_calling_its_parent),
    "greedy_decoding": towers(
        cell=lambda: nn.GRUCell(32, 32), table=lambda: nn.Embedding(16, 32), out=lambda: nn.Linear(32, 16)
    )(_decode),
    "nested_results_with_none_and_numbers": _results(
        lambda x, tensor: {"parts": _Named(tensor, tensor.norm(dim=1), [None, 3, "text", tensor.shape])},
        lambda a, b: a["parts"].tensor * b["parts"].norm[:, None] * a["parts"].rest[1],
    ),
    "list_results_that_vary_in_length": _results(
        lambda x, tensor: [tensor * (index + 1) for index in range(1 + int(x[0, 0] > 0))],
        lambda a, b: sum(a) * sum(b),
        steps=6,
    ),
    "input_returned_as_a_view": _results(
        lambda x, tensor: (tensor, x[:, ::2], x.T), lambda a, b: a[0][:, ::2] * b[1] + (b[0] @ a[2]).sum()
    ),
    "results_that_are_views_of_each_other": _results(
        lambda x, tensor: (tensor, tensor[:, :8], tensor.view(-1, 4, 8)), _write_a_view
    ),
}
