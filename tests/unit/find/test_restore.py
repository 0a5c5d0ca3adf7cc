"""A block leaves a model, its containers and the process's generators as they were."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from mosaic.errors import UnsupportedModelError
from mosaic.find import restore
from mosaic.find.restore import preserved


@torch.library.custom_op("mosaic_tests::bump", mutates_args=("x",))
def bump(x: torch.Tensor) -> None:
    x.add_(1)


class Flat(nn.Module):
    """Parameters that are views of one plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = torch.zeros(20)
        self.a, self.b = nn.Parameter(self.flat[:8].view(2, 4)), nn.Parameter(self.flat[8:].view(3, 4))


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pairs", torch.eye(4).to_sparse())
        self.register_buffer("rows", torch.eye(4).to_sparse_csr())


def half(model: nn.Linear) -> None:
    model.weight.data = model.weight.data.half()[:2]
    model.weight.grad = torch.randn(2, 8).half()


def in_inference(model: nn.Linear) -> None:
    with torch.inference_mode():
        model.weight.mul_(2)


def with_gradient(model: nn.BatchNorm1d) -> None:
    with torch.enable_grad():
        model.running_mean.mul_(nn.Parameter(torch.ones(4)))


def attending(model: nn.Linear) -> None:
    query = torch.randn(1, 2, 16, 8)
    flex_attention(model(query), query, query)


CHANGES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any]]] = {
    "an operator of one's own": (lambda: nn.Linear(8, 8), lambda model: bump(model.weight.data)),
    "another shape and dtype": (lambda: nn.Linear(8, 8), half),
    "inference": (lambda: nn.Linear(8, 8), in_inference),
    "views of one tensor": (
        Flat,
        lambda model: (model.a.add_(1), model.flat.mul_(2), torch._foreach_add_([model.b], 1)),
    ),
    "sparse buffers": (Sparse, lambda model: (model.pairs.mul_(2), model.rows.values().mul_(2))),
    "a buffer that gets a gradient": (lambda: nn.BatchNorm1d(4), with_gradient),
    "a scripted module": (lambda: torch.jit.script(nn.BatchNorm1d(4)), lambda model: model(torch.randn(5, 4))),
    "an operator of operators": (lambda: nn.Linear(8, 8), attending),
    "a lost tensor": (lambda: nn.Linear(8, 8), lambda model: model._parameters.clear()),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # sparse tensors and scripts are beta
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_another_kind_is_undone(name: str):
    make, change = CHANGES[name]
    model = make()
    before = {key: value.clone() for key, value in model.state_dict(keep_vars=True).items()}
    with torch.no_grad(), preserved(model):
        change(model)
    after = model.state_dict(keep_vars=True)
    assert after.keys() == before.keys()
    for key, value in after.items():
        assert value.dtype == before[key].dtype
        assert torch.equal(value.to_dense(), before[key].to_dense())
        assert value.is_leaf
        assert value.grad is None


def test_a_write_into_a_parameter_that_is_too_large_to_be_copied_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(restore, "MAX_COPIED_BYTES", 0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    with preserved(model):
        model(torch.randn(3, 2))
    message = r"1\.bias was written to, and is too large to be copied before; load the weights again"
    for write in (
        lambda bias: bias.mul_(2),
        lambda bias: bias.data.mul_(2),
        lambda bias: bias.detach().numpy().fill(2),
    ):
        with pytest.raises(UnsupportedModelError, match=message), torch.no_grad(), preserved(model):
            write(model[1].bias)


class Features:
    """Collects results by a hook."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def hook(self, number: int, module: nn.Module, given: Any, result: torch.Tensor) -> None:
        self.found.append(result)


def test_what_hooks_and_optimizers_of_a_module_keep_is_as_it_was():
    model, features, enclosed = nn.Linear(2, 2), Features(), {}

    def hook(module: nn.Module, given: Any, result: torch.Tensor) -> None:
        enclosed["last"] = result

    model.register_forward_hook(partial(features.hook, 3))
    model.register_forward_hook(hook)
    model.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with preserved(model):
        model(torch.randn(3, 2)).sum().backward()
        model.optimizer.step()
        assert features.found
    assert features.found == []
    assert not model.optimizer.state
    assert enclosed == {}
