"""Control flow and shapes: branches on values, results of other shapes, experts, sequences, batches that change."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from bench.sweep.nets.pieces import Two, alike, batch, between, losses, tower, towers, train
from bench.sweep.session import Session


@towers(steps=8, first=lambda: nn.Linear(32, 32), drop=lambda: nn.Dropout(0.5), last=lambda: nn.Linear(32, 32))
def layer_skipped_by_value(self, x):
    hidden = self.first(x)
    if x[0, 0] > 0:
        hidden = self.drop(hidden)
    return self.last(hidden)


@towers(cell=lambda: nn.GRUCell(32, 32), halt=lambda: nn.Linear(32, 1))
def halting_by_value(self, x):
    hidden, budget = torch.zeros_like(x), 0.0
    while budget < 2:
        hidden = self.cell(x, hidden)
        budget += self.halt(hidden).sigmoid().mean().item()
    return hidden


@between(towers=lambda: alike(lambda self, x: self.net(x[x[:, 0] > 0])), steps=6)
def result_of_another_length_for_the_same_shapes(self, x, y):
    a, b = self.a(x), self.b(y)
    return a.mean(0) * b.sum(0)


@between(steps=6)
def number_of_rows_depends_on_a_result(self, x, y):
    a = self.a(x)
    kept = (a[:, 0] > 0).nonzero()[:, 0]
    return self.b(y[kept]).sum(0) + a.mean(0)


def _routed(**settings):
    """Makes a case of a function that routes rows to four experts by the weights of a gate."""

    def case(route):
        def forward(self, x):
            return route(self, x, self.gate(x).softmax(-1))

        def run(session: Session) -> None:
            expert = lambda: nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))  # noqa: E731
            experts = lambda: nn.ModuleList(expert() for _ in range(4))  # noqa: E731
            train(session, Two(*alike(forward, gate=lambda: nn.Linear(32, 4), experts=experts)), **settings)

        run.__module__ = route.__module__
        return run

    return case


@_routed()
def experts_by_topk_and_nonzero(self, x, weights):
    top, chosen = weights.topk(2)
    made = torch.zeros_like(x)
    for index, expert in enumerate(self.experts):
        rows, places = (chosen == index).nonzero(as_tuple=True)
        made.index_add_(0, rows, expert(x[rows]) * top[rows, places, None])
    return made


@_routed(batch=lambda step: batch(step, 4), steps=6)
def experts_skipped_where_nobody_comes(self, x, weights):
    chosen = weights.argmax(-1)
    made = x.clone()
    for index in chosen.unique().tolist():
        made[chosen == index] = self.experts[index](x[chosen == index]) * weights[chosen == index, index, None]
    return made


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


def batches_of_other_sizes(session: Session):
    train(session, Two(), batch=lambda step: batch(step, 64 - 8 * (step % 3)), steps=6)


@losses(batch=lambda step: batch(step, 0 if step == 2 else 64), steps=5)
def empty_batch(session, model, inputs):
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


def recursion(session: Session):
    class Tree(nn.Module):
        def __init__(self, depth):
            super().__init__()
            self.node = nn.Linear(32, 32)
            self.left, self.right = (Tree(depth - 1), Tree(depth - 1)) if depth else (None, None)

        def forward(self, x):
            x = self.node(x).tanh()
            return x if self.left is None else self.left(x) + self.right(x)

    train(session, Tree(3), batch=lambda step: batch(step)[:1])


def module_that_calls_its_parent(session: Session):
    class Child(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = tower()

        def forward(self, x):
            return self.net(x) + self.parent[0].project(x)

    class Net(Two):
        def __init__(self):
            super().__init__(Child(), Child())
            self.shared = nn.Linear(32, 32)
            self.a.parent = self.b.parent = [self]

        def project(self, x):
            return self.shared(x)

    train(session, Net())


def _decode(self, state):
    token, logits = torch.zeros(len(state), dtype=torch.long, device=state.device), []
    for _ in range(6):
        state = self.cell(self.table(token), state)
        logits.append(self.out(state))
        token = logits[-1].argmax(1)
        if (token == 3).all():
            break
    return torch.stack(logits, 1)


@between(
    towers=lambda: alike(
        _decode,
        cell=lambda: nn.GRUCell(32, 32),
        table=lambda: nn.Embedding(16, 32),
        out=lambda: nn.Linear(32, 16),
    )
)
def greedy_decoding(self, x, y):
    return self.a(x).sum(1) * self.b(y).sum(1)


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


@towers()
def numpy_within_a_tower(self, x):
    made = self.net(x)
    order = made.detach().cpu().numpy()[:, 0].argsort().copy()
    return made[torch.as_tensor(order, device=x.device)]
