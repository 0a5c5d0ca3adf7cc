"""What glue may do with results that a lane is still computing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import SIDE_BY_SIDE, TwoTowers, colocate, pair_batch, run_both, tower, train
from torch import nn
from torch.nn import functional

from mosaic.engine.host.lane_tensor import LaneTensor
from mosaic.errors import ModuleContractError, UnsupportedModelError

Glue = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 3 * grad * x**2


def add_in_place(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a += 1
    a[:, 0] = 0
    a[:, :3] += 2
    return a * functional.relu(b, inplace=True)


def view_then_write_base(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    column = a[:, 0]
    a.mul_(2)
    return column[:, None] * b + a


def write_through_view(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a[:, :3].mul_(2)
    a.view(6, 4, 4)[:, 1].transpose(0, 1).add_(1)
    return a * b


def write_after_glue(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    c = a + 1
    c.mul_(3).clamp_(min=-1)
    a.zero_()
    return c * b + a


def put_by_mask(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    merged = torch.zeros(12, 16)
    mask = torch.arange(12) % 2 == 0
    merged[mask] = a
    merged[~mask] = b
    return merged.masked_scatter(mask[:, None].expand(12, 16), b * 2)


def values(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    number = a.detach().sum().item() + float(b.detach().mean()) + np.asarray(a.detach()).max()
    assert len(b.tolist()) == 6
    assert "tensor" in repr(a)
    assert f"{a.detach().mean():.3f}"
    if a.detach().mean() > 100 or bool((b > 1e6).any()):
        return a
    return a * float(number) + b


GLUE: dict[str, Glue] = {
    "matmul": lambda a, b: a @ b.T,
    "normalise": lambda a, b: functional.normalize(a, dim=-1) @ functional.normalize(b, dim=-1).T,
    "where": lambda a, b: torch.where(a > 0, a, b),
    "stack": lambda a, b: torch.stack([a, b, a]).mean(0),
    "cat and chunk": lambda a, b: torch.prod(torch.stack(torch.cat([a, b], 1).chunk(4, 1)), 0),
    "mask": lambda a, b: a[a.detach() > 0].sum() + b[:, torch.tensor([0, 3, 3])].sum(),
    "einsum": lambda a, b: torch.einsum("ij,kj->ik", a, b),
    "rearranged": lambda a, b: a.view(6, 4, 4).permute(2, 0, 1).reshape(4, -1).T @ b.unflatten(1, (4, 4))[:, 0].T,
    "split": lambda a, b: a.split([4, 12], 1)[1] * b.unbind(1)[3][:, None],
    "expand": lambda a, b: (a.unsqueeze(1) * b[None].expand(6, 6, 16)).sum((0, 1)),
    "scalar": lambda a, b: a.mean() * b.std(),
    "several uses": lambda a, b: a * a.sin() + a.exp() * b - a / (1 + b.abs()),
    "embedding": lambda a, b: functional.embedding((a.detach().abs() * 3).long().clamp(max=5), b).sum(1),
    "function": lambda a, b: Cubed.apply(a) + Cubed.apply(a * b),
    "complex": lambda a, b: torch.fft.rfft(a).abs() + torch.view_as_complex(b.reshape(6, 8, 2)).abs().mean(),
    "sorted": lambda a, b: a.sort(dim=1).values + b.topk(16, dim=1).values,
    "empty": lambda a, b: torch.cat([a[:0], b]) + a.new_zeros(16),
    "double": lambda a, b: a.double() @ b.double().T,
    "detached": lambda a, b: a * b.detach() + (a - a.detach()),
    "dropout": lambda a, b: functional.dropout(a, 0.5) + b,
    "layer norm": lambda a, b: functional.layer_norm(a, (16,)) * functional.softmax(b, -1),
    "cross entropy": lambda a, b: functional.cross_entropy(a, b.detach().argmax(-1)) + b.mean(),
    "attention": lambda a, b: functional.scaled_dot_product_attention(a[None], b[None], a[None]),
    "in place": add_in_place,
    "view and write": view_then_write_base,
    "write through view": write_through_view,
    "write after glue": write_after_glue,
    "mask write": put_by_mask,
    "values": values,
    "out": lambda a, b: torch.add(a.detach(), b.detach(), out=torch.empty(6, 16)) * a,
    "no grad": lambda a, b: a * torch.no_grad()(lambda: b.softmax(-1).max())(),
    "length": lambda a, b: a * len(b) * a.shape[0] * b.dim() * a.numel() + sum(row.sum() for row in b),
}


@pytest.mark.parametrize("name", list(GLUE))
def test_glue_computes_what_it_does_in_the_plain_loop(name: str):
    glue = GLUE[name]

    class Glued(TwoTowers):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return glue(self.left(x) @ self.weight, self.right(y) * self.scale)

    class Direct(TwoTowers):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return glue(self.left(x), self.right(y)) * self.scale

    for kind in (Glued, Direct):
        described = run_both(kind, pair_batch(), SIDE_BY_SIDE, train(3))
        assert "in place" not in described


@pytest.fixture
def pending() -> Any:
    """A model and its two results, still on their lanes."""
    torch.manual_seed(0)
    model = TwoTowers()
    handle = colocate(model, pair_batch(), SIDE_BY_SIDE)
    for step in range(2):
        model(*pair_batch(step))
    x, y = pair_batch()
    yield model, model.left(x), model.right(y)
    handle.remove()


def test_a_result_shows_its_metadata_without_waiting():
    opened = threading.Event()

    class Waits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.wait = tower(), False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert not self.wait or opened.wait(60)
            return self.layers(x)

    model = TwoTowers(Waits())
    handle = colocate(model, pair_batch(), SIDE_BY_SIDE)
    try:
        model(*pair_batch())
        model.left.wait = True
        result = model.left(pair_batch()[0])
        assert isinstance(result, LaneTensor)
        assert (result.shape, result.dtype, result.requires_grad, len(result)) == ((6, 16), torch.float32, True, 6)
        glued = functional.normalize(result @ model.weight, dim=-1).mean(0)
        assert isinstance(glued, LaneTensor)
        assert glued.shape == (16,)
        opened.set()
        assert type(glued.join()) is torch.Tensor
    finally:
        opened.set()
        handle.remove()


def test_a_result_joins_to_one_plain_tensor(pending: Any):
    _, left, _ = pending
    assert left.join() is left.join()
    assert type(left.join()) is torch.Tensor


def test_lanes_that_mix_are_joined(pending: Any):
    _, left, right = pending
    assert type(left + 1) is LaneTensor
    assert type(left + right) is torch.Tensor


def test_writing_after_a_view_was_used_elsewhere_is_refused(pending: Any):
    _, left, right = pending
    view = left[:, 0]
    assert type(view + right[:, 0]) is torch.Tensor
    with pytest.raises(UnsupportedModelError, match="written to in place after a view of it was used elsewhere"):
        left.mul_(2)


def test_writing_to_an_input_before_the_lane_has_read_it_is_an_error():
    opened = threading.Event()
    model = TwoTowers()
    handle = colocate(model, pair_batch(), SIDE_BY_SIDE)
    try:
        model(*pair_batch())
        lane = handle._executor.lanes.lane((0,))
        lane.submit(lambda: opened.wait(60))
        x = pair_batch()[0]
        result = model.left(x)
        mask = torch.ones(6, 16)
        glued = model.left(pair_batch()[0]) * mask
        x.zero_()
        mask.zero_()
        opened.set()
        with pytest.raises(ModuleContractError, match="an input of 'left' was written to"):
            result.join()
        with pytest.raises(ModuleContractError, match="written to before the lane had read it"):
            glued.join()
    finally:
        opened.set()
        handle.remove()


def test_a_module_that_reads_a_lane_s_result_behind_its_arguments_is_an_error():
    class Behind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = tower()
            self.__dict__["store"] = {}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = self.__dict__["store"].get("left")
            return self.layers(x) if found is None else self.layers(x) + found.detach()

    model = TwoTowers(right=Behind())
    handle = colocate(model, pair_batch(), SIDE_BY_SIDE)
    try:
        model(*pair_batch())
        x, y = pair_batch()
        model.right.__dict__["store"]["left"] = model.left(x)
        with pytest.raises(ModuleContractError, match="reads a result of 'left' that is not among its arguments"):
            model.right(y).join()
    finally:
        handle.remove()
