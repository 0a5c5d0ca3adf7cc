"""Tensors of lanes: what follows, what joins, and that what torch does with them comes out as in the plain loop."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_cases import SIDE_BY_SIDE, TwoTowers, pair_batch
from stream_cases import colocated
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from mosaic.engine.streams.tensor import StreamTensor

Case = Callable[[torch.Tensor, torch.Tensor], Any]


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


def written_through_a_view(a: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    whole = a.clone()
    part = whole[:, :3]
    part.mul_(2)
    part += 1
    return whole * part.sum()


def written_across_lanes(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    whole = a.clone()
    whole[:, :3].mul_(b[:, :3])
    whole[0] = 1.0
    whole[:, 3] = b[:, 3]
    return whole * whole[:, :3].sum()


def set_item(a: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    whole = a.clone()
    whole[:, 0] = a[:, 1]
    whole[0] = 1.0
    return whole


def set_in_plain(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    buffer = torch.zeros(6, 16)
    buffer[:3] = a[:3]
    buffer[3:] = b[3:]
    return buffer


def given_out(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        mixed, one = torch.empty(6, 16), a.clone()
        torch.add(a, b, out=mixed)
        torch.mul(a, 2, out=one)
    return mixed, one


def clamped_data(a: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    whole = a.clone()
    whole.data.clamp_(-0.1, 0.1)
    return whole * 2


def in_place_functions(a: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    first, second = a * 2, a * 3
    functional.relu(first, inplace=True)
    nn.ReLU(True)(second)
    return first + functional.dropout(second + 1, 0.5, True, True)


def added_in_place(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    total = a * 1
    total += b
    total *= 2
    return total + a


def foreach(a: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        both = [a.clone(), a.clone()]
        torch._foreach_mul_(both, 2.0)
        return (*both, *torch._foreach_add(both, 1.0))


def leaf(a: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    made = a.detach().requires_grad_()
    return torch.autograd.grad((made * made).sum(), made)[0]


def other_leaf(a: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    made = a.detach()
    made.requires_grad = True
    (made * made).sum().backward()
    assert made.grad is not None
    return made.grad


def retained(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    made = a * 2
    made.retain_grad()
    (made * b).sum().backward(retain_graph=True)
    assert made.grad is not None
    return made.grad.clone()


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


def without_gradients(a: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        half = a * 2
    return half + a


def on_the_host(a: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
    text = f"{a.sum():.3f}{a}{a!r}"
    return (
        torch.tensor([a.sum().item(), float(a[0, 0]), len(text), a.data_ptr() != 0]),
        torch.tensor(a.tolist()),
        torch.from_numpy(a.detach().numpy().copy()),
        a * 2 if a.sum() > -1e9 else a,
    )


def copied(a: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return pickle.loads(pickle.dumps(a.detach())), copy.deepcopy(a.detach()), torch.as_tensor(a) * 2


def as_a_key(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    known = {a: 1, b: 2}
    return torch.tensor([known[a], known[b], len({a, b, a})])


CASES: list[Case] = [
    written_through_a_view,
    written_across_lanes,
    set_item,
    set_in_plain,
    given_out,
    clamped_data,
    in_place_functions,
    added_in_place,
    foreach,
    leaf,
    other_leaf,
    retained,
    hooked,
    batch_norm,
    full_backward_hook,
    without_gradients,
    on_the_host,
    copied,
    as_a_key,
    lambda a, b: Product.apply(a, a) * 2 + Product.apply(a, b),
    lambda a, b: Tripled.apply(a) * 2 + Tripled.apply(b),
    lambda a, b: Doubled.apply(a * 1) * 2 + b,
    lambda a, b: checkpoint(lambda x, y: functional.gelu(x) * y, a, b, use_reentrant=False),
    lambda a, b: checkpoint(lambda x: functional.gelu(x).sin(), a, use_reentrant=True) * b,
    lambda a, b: torch.vmap(lambda x, y: (x * y).sum())(a, b),
    lambda a, b: torch.func.grad(lambda x: (x * x).sum())(a.detach()),
    lambda a, b: (a[:1].expand_as(b) + b, torch.broadcast_tensors(a[:1], b)[0] * 1),
    lambda a, b: (sum(row * 2 for row in a), a.unbind(0)[1], a.split(2)[0] + a.chunk(3)[1]),
    lambda a, b: (*a.max(dim=1), a[a > 0].sum(), a[a.argmax(1) % 6]),
    lambda a, b: (torch.cat([a, b]), torch.cat([a, a], dim=1), torch.stack([a, b])),
    lambda a, b: (torch.einsum("ij,kj->ik", a, b), functional.linear(a, torch.ones(4, 16))),
    lambda a, b: functional.scaled_dot_product_attention(a[None, None], b[None, None], b[None, None]),
    lambda a, b: (functional.cross_entropy(a, b.argmax(1)), functional.mse_loss(a, b)),
    lambda a, b: (a.double().to(torch.float32).to("cpu"), a.to(b), a.T @ b, a.shape[0] * b, len(a) * a),
    lambda a, b: (1 - a, 2 / (a.abs() + 1), -a, a**2, a @ a.T, (a > 0) & (a < 1), ~(a > 0), torch.where(a > 0, a, 0.0)),
    lambda a, b: (functional.embedding(a.argmax(1), torch.ones(16, 3)), torch.ones(16, 3)[a.argmax(1)]),
]


def run(case: Case, model: TwoTowers) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(5)
    x, y = pair_batch()
    found = case(model.left(x), model.right(y))
    made = list(found) if isinstance(found, tuple) else [found]
    total = sum(tensor.float().sum() * 1.5 for tensor in made if tensor.requires_grad)
    if isinstance(total, torch.Tensor) and total.requires_grad:
        total.backward()
    gradients = [torch.zeros(0) if p.grad is None else p.grad for p in model.parameters()]
    return [torch.as_tensor(value).detach().clone() for value in (*made, *gradients)]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_what_torch_does_with_a_result_is_equal_and_free_of_races(case: Case):
    torch.manual_seed(0)
    model = TwoTowers()
    plain = run(case, model)
    with colocated(model, pair_batch(), SIDE_BY_SIDE):
        ours = run(case, model)
    assert len(plain) == len(ours)
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


def results(model: TwoTowers) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = pair_batch()
    return model.left(x), model.right(y)


def test_an_operation_on_one_lane_follows_it_and_one_on_two_joins():
    model = TwoTowers()
    with colocated(model, pair_batch(), SIDE_BY_SIDE) as (handle, backend):
        left, right = results(model)
        glue = functional.normalize(left @ model.weight, dim=-1)
        assert isinstance(glue, StreamTensor)
        assert backend.launches_of(handle, "left")[-1].name == "aten.div.Tensor"
        mixed = glue @ right.T
        assert type(mixed) is torch.Tensor
        assert backend.api.launches[-1].stream == 0
        last = backend.api.launches[-1]
        assert last.is_after(backend.launches_of(handle, "left")[-1])
        assert last.is_after(backend.launches_of(handle, "right")[-1])


def test_running_statistics_are_ordered_though_torch_counts_no_write():
    model, norm = TwoTowers(), nn.BatchNorm1d(16, affine=False)
    with colocated(model, pair_batch(), SIDE_BY_SIDE) as (handle, backend):
        left, right = results(model)
        assert isinstance(norm(left), StreamTensor)
        written = backend.launches_of(handle, "left")[-1]
        norm(right)
        assert backend.launches_of(handle, "right")[-1].is_after(written)
        assert norm.running_mean is not None
        norm.running_mean.sum()
        assert backend.api.launches[-1].is_after(backend.launches_of(handle, "right")[-1])


def test_metadata_costs_no_wait_and_no_launch():
    model = TwoTowers()
    with colocated(model, pair_batch(), SIDE_BY_SIDE) as (_, backend):
        left, _ = results(model)
        before = dict(backend.api.main.clock), len(backend.api.launches)
        assert left.shape == (6, 16)
        assert (left.dtype, left.requires_grad, left.is_leaf, left.dim()) == (torch.float32, True, False, 2)
        assert left.grad_fn is not None
        assert (dict(backend.api.main.clock), len(backend.api.launches)) == before


def test_a_result_is_joined_once_for_a_stream():
    model = TwoTowers()
    with colocated(model, pair_batch(), SIDE_BY_SIDE):
        left, right = results(model)
        left + right
        order = left._point.order
        known = dict(order._known_to)
        left * right
        assert order._known_to == known


def test_a_reader_waits_for_its_producer_only_and_not_for_what_its_lane_does_later():
    model = TwoTowers()
    with colocated(model, pair_batch(), SIDE_BY_SIDE) as (handle, backend):
        left, right = results(model)
        model.left(pair_batch(1)[0])
        later = backend.launches_of(handle, "left")[-1]
        left + right
        assert not backend.api.launches[-1].is_after(later)


def test_gradients_of_glue_are_not_lost_to_the_lane():
    model = TwoTowers()
    with colocated(model, pair_batch(), SIDE_BY_SIDE):
        left, _ = results(model)
        (left @ model.weight).sum().backward()
    assert type(model.weight.grad) is torch.Tensor
    assert type(model.left[0].weight.grad) is torch.Tensor


def test_tensors_of_closed_lanes_can_still_be_used():
    model = TwoTowers()
    with colocated(model, pair_batch(), SIDE_BY_SIDE) as (handle, _):
        left, right = results(model)
        handle.remove()
        total = (left * 2).sum() + (left + right).sum()
        assert type(total) is torch.Tensor
        total.backward()
    assert model.left[0].weight.grad is not None
