"""Operations on results that a lane is still computing give the numbers of the plain loop, on host and streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import SIDE_BY_SIDE, TwoTowers, pair_batch, same_bits
from engine_cases import colocated as on_host
from graph_cases import one_thread  # noqa: F401
from stream_cases import colocated as on_streams
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from mosaic.errors import UnforeseenError

Case = Callable[[torch.Tensor, torch.Tensor], Any]


def view_then_write_base(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    column = a[:, 0]
    a.mul_(2)
    return column[:, None] * b + a


def write_through_view(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a[:, :3].mul_(2)
    a.view(6, 4, 4)[:, 1].transpose(0, 1).add_(1)
    return a * b


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return a * b.sigmoid()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (a, b), (grad,) = ctx.saved_tensors, grads
        s = b.sigmoid()
        return grad * s, grad * a * s * (1 - s)


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
        return a

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * 3


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
        a.mul_(2)
        ctx.mark_dirty(a)
        return a

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * 2


class DoubledAtOnce(Doubled):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(a)
        return a.mul_(2)


def written_across_lanes(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    whole = a.clone()
    whole[:, :3].mul_(b[:, :3])
    whole[0] = 1.0
    whole[:, 3] = b[:, 3]
    return whole * whole[:, :3].sum()


def relu_beside_a_view(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    first = a * 2
    column = first[:, 0]
    functional.relu(first, inplace=True)
    return column[:, None] * b + first


def leaf_joined_before(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    made = a.detach()
    mixed = made * b.detach()
    made.requires_grad = True
    for _ in range(2):
        ((made * made) @ (made + b.detach()).T).sum().backward()
    assert type(made.grad) is torch.Tensor
    first = made.grad.clone()
    made.grad = None
    (made * 3).sum().backward()
    return mixed, first, made.grad


def hooked(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    made = a * 2
    made.register_hook(lambda grad: grad * 5)
    return made.sum() + b.sum()


def batch_norm(a: torch.Tensor, b: torch.Tensor) -> Any:
    norm = nn.BatchNorm1d(16)
    return norm(a) + 1, norm(b), norm.running_mean


def full_backward_hook(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    layer = nn.Linear(16, 4)
    nn.init.ones_(layer.weight)
    nn.init.zeros_(layer.bias)
    layer.register_full_backward_hook(lambda *_: None)
    return layer(a) + layer(b)


def doubled_twice(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    made = a * 1
    mixed = made + b
    one = Doubled.apply(made)
    other = Doubled.apply(one)
    return other * b + mixed + one + made.sin()


def doubled_view(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    made = a * 1
    other = Doubled.apply(made[:, :3])
    return made * 3 + b + other.sum()


def doubled_at_once(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    made = a * 1
    assert made.add_(1) is made
    return DoubledAtOnce.apply(made) * b + made


def checkpointed_twice(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    made = checkpoint(lambda x: functional.gelu(x).sin(), a * 2, use_reentrant=True)
    return checkpoint(lambda x, y: (x * y).tanh(), made, b, use_reentrant=True) + made


def on_the_host(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    assert "tensor" in repr(a)
    return (
        torch.tensor([a.sum().item(), float(a[0, 0]), len(f"{a.sum():.3f}{a.detach().mean():.3f}")]),
        torch.tensor(a.tolist()),
        torch.from_numpy(a.detach().numpy().copy()) + np.asarray(b.detach()).max(),
        a * 2 if a.sum() > -1e9 and not bool((b > 1e6).any()) else a,
    )


CASES: list[Case] = [
    view_then_write_base,
    write_through_view,
    relu_beside_a_view,
    written_across_lanes,
    leaf_joined_before,
    hooked,
    batch_norm,
    full_backward_hook,
    on_the_host,
    lambda a, b: Product.apply(a, a) * 2 + Product.apply(a, b),
    lambda a, b: Tripled.apply(a) * 2 + Tripled.apply(b),
    lambda a, b: checkpoint(lambda x, y: functional.gelu(x) * y, a, b, use_reentrant=False),
    doubled_twice,
    doubled_view,
    doubled_at_once,
    checkpointed_twice,
    lambda a, b: (sum(row * 2 for row in a), a.unbind(0)[1], a.split([2, 4])[0] + a.chunk(3)[1]),
    lambda a, b: (*a.max(dim=1), a[a > 0].sum(), a[a.argmax(1) % 6], b[:, torch.tensor([0, 3, 3])].sum()),
    lambda a, b: (a * b.detach() + (a - a.detach()), a * torch.no_grad()(lambda: b.softmax(-1).max())()),
    lambda a, b: (torch.tensor([a[2:].storage_offset(), b[:, 3:].storage_offset()]),),
    lambda a, b: (a.narrow(0, 0, torch.tensor(3)) * 2, b[:1].repeat(torch.tensor(2), 1).shape[0] * a),
    lambda a, b: (functional.embedding(a.argmax(1), torch.ones(16, 3)), torch.ones(16, 3)[a.argmax(1)], a.to(b)),
    lambda a, b: (center := torch.zeros(16).add_(1), a - center, center.mul_(2), b + center)[1::2],
    lambda a, b: torch.zeros_like(a).set_((b * 2).detach()),
]


REFUSED = (view_then_write_base, write_through_view, written_across_lanes, doubled_view, relu_beside_a_view)
"""On host lanes, where the whole model's call is made again with that module in place."""


def run(case: Case, model: TwoTowers) -> list[torch.Tensor]:
    """Returns what a case makes of the results themselves and of glue on them, and the gradients."""
    model.zero_grad()
    torch.manual_seed(5)
    x, y = pair_batch()
    made: list[Any] = []
    for after in (lambda a, b: (a, b), lambda a, b: (a @ model.weight, b * model.scale)):
        found = case(*after(model.left(x), model.right(y)))
        made += found if isinstance(found, tuple) else [found]
    total = sum(tensor.float().sum() * 1.5 for tensor in made if tensor.requires_grad)
    if isinstance(total, torch.Tensor) and total.requires_grad:
        total.backward()
    gradients = [torch.zeros(0) if p.grad is None else p.grad for p in model.parameters()]
    return [torch.as_tensor(value).detach().clone() for value in (*made, *gradients)]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("where", ["host", "streams"])
def test_what_torch_does_with_results_is_equal_to_the_plain_loop(where: str):
    torch.manual_seed(0)
    model = TwoTowers()
    cases = CASES if where == "streams" else [case for case in CASES if case not in REFUSED]
    plain = [run(case, model) for case in cases]
    with (on_streams if where == "streams" else on_host)(model, pair_batch(), SIDE_BY_SIDE) as handle:
        model(*pair_batch())  # lanes are learned
        if where == "host":
            handle._executor.begin()  # as in a call of the whole model, outside of which results are waited for
        for case, expected in zip(cases, plain, strict=True):
            ours = run(case, model)
            assert all(map(same_bits, ours, expected)), case.__code__
        if where == "host":  # none of the cases has put a tower in place for good
            handle._executor.end()
            assert all(site.obstacle is None for site in handle._attachment.placed.sites.values())


@pytest.mark.parametrize("case", REFUSED)
def test_a_write_into_memory_that_several_pending_results_have_is_refused_by_name(case: Case):
    model = TwoTowers()
    with on_host(model, pair_batch(), SIDE_BY_SIDE) as handle:
        model(*pair_batch())  # lanes are learned
        handle._executor.begin()  # as in a call of the whole model
        with pytest.raises(UnforeseenError, match=r"another tensor has the same memory; write to a copy.*'left'"):
            run(case, model)
        handle._executor.end()
