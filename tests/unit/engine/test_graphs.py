"""Modules as CUDA graphs compute what eager calls do: outputs, gradients, buffers, random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from engine_cases import TwoTowers, pair_batch, tower
from graph_cases import bench, one_thread, train_both  # noqa: F401
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

pytestmark = pytest.mark.usefixtures("one_thread")


def contrast(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    left = nn.functional.normalize(left, dim=-1)
    return (left @ nn.functional.normalize(right, dim=-1).T).square().mean()


def two_towers(model: Any, call: Any, number: int) -> torch.Tensor:
    x, y = pair_batch(number)
    return contrast(call("left", model.left, x), call("right", model.right, y))


# Equal to plain training.


@pytest.mark.parametrize("extra", [[], [nn.Dropout(0.3)], [nn.BatchNorm1d(16)]], ids=["plain", "dropout", "batchnorm"])
def test_training_by_graphs_equals_training_plainly(extra: list[nn.Module]):
    ours = train_both(lambda: TwoTowers(tower(8, 16, *extra), tower(8, 16, *extra)), two_towers)
    assert not ours.graphs.eager_calls
    assert (ours.graphs.captured.total(), ours.graphs.num_replays) == (2, 10)


class Many(nn.Module):
    """Takes and returns nested things; one part of it is used by one result only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.pooler = tower(), nn.Linear(16, 4)

    def forward(self, inputs: dict[str, torch.Tensor], *, scale: float = 0.5, flip: bool = True) -> Any:
        hidden = self.layers(inputs["x"]) * scale
        shown = {"hidden": hidden, "again": hidden, "pooled": self.pooler(hidden), "none": None}
        return shown, (inputs["y"] + 1, hidden.argmax(-1), "flipped" if flip else "plain")


@pytest.mark.parametrize("used", [("pooled",), ()])
def test_a_result_without_a_gradient_takes_no_part_in_the_backward(used: tuple[str, ...]):
    def step(model: Any, call: Any, number: int) -> torch.Tensor:
        x, y = pair_batch(number)
        shown, _ = call("many", model.many, {"x": x, "y": y})
        chosen = ("hidden", "pooled") if number == 0 else used  # an earlier backward had all of them
        return sum((shown[name].square().sum() for name in chosen), model.other(y).mean())

    ours = train_both(lambda: nn.ModuleDict({"many": Many(), "other": tower()}), lambda m, c, n: step(Named(m), c, n))
    assert ours.graphs.num_replays == 5


class Named:
    """The entries of a ModuleDict as attributes."""

    def __init__(self, modules: Any) -> None:
        self.__dict__.update(modules.items())


@pytest.mark.parametrize("exact", [False, True], ids=["cast", "left out"])
def test_under_autocast_a_replay_casts_the_weights_of_its_step(exact: bool):
    class Exact(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                return self.layer(x.float())

    def step(model: Any, call: Any, number: int) -> torch.Tensor:
        x, y = pair_batch(number)
        with torch.autocast("cpu", torch.bfloat16):
            left, right = call("left", model.left, x), call("right", model.right, y)
        return contrast(left.float(), right.float())

    ours = train_both(lambda: TwoTowers(Exact() if exact else tower(), tower()), step, steps=3)
    assert ours.graphs.num_replays == 6


# What differs is captured apart, or runs eagerly.


CHANGES: dict[str, Callable[[Any], object]] = {
    "mode": lambda model: model.eval(),
    "frozen": lambda model: model[0].weight.requires_grad_(False),
    "attribute": lambda model: setattr(model[1], "approximate", "tanh"),
    "list": lambda model: model.sizes.append(3),
    "object": lambda model: setattr(model.options, "scale", 2),
    "hook": lambda model: model[0].register_forward_hook(lambda *_: None),
    "parameter": lambda model: setattr(model[0], "weight", nn.Parameter(torch.ones(16, 8))),
    "memory": lambda model: setattr(model[0].weight, "data", torch.ones(16, 8)),
    "child": lambda model: setattr(model, "1", nn.Tanh()),
    "forward": lambda model: setattr(model[1], "forward", torch.sin),
}


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_calls_is_seen(change: str):
    class Options:
        scale = 1

    model: Any = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.5))
    model.sizes, model.options = [1, 2], Options()
    model.options.scale = 1
    x = pair_batch()[0]
    with bench() as ours:
        ours.call("model", model, x)
        CHANGES[change](model)
        for seed in range(2):
            torch.manual_seed(seed)
            result = ours.call("model", model, x)
            torch.manual_seed(seed)
            assert torch.equal(result, model(x))
        assert ours.graphs.captured.total() == (1 if change == "hook" else 2)


def test_gradients_of_gradients_are_right_and_the_module_is_left_alone_from_then_on():
    model, x = tower(), pair_batch()[0]
    penalties = []
    with bench() as ours:
        for run in (lambda x: ours.call("tower", model, x), model, lambda x: ours.call("tower", model, x)):
            given_x = x.clone().requires_grad_()
            (grad,) = torch.autograd.grad(run(given_x).sum(), given_x, create_graph=True)
            model.zero_grad()
            grad.square().sum().backward()
            penalties.append(model[0].weight.grad.clone())
        assert any("create_graph" in reason for _, reason in ours.graphs.eager_calls)
    assert torch.allclose(penalties[0], penalties[1])
    assert torch.equal(penalties[2], penalties[1])


def test_a_second_backward_through_one_forward_needs_retain_graph():
    with bench() as ours:
        loss = ours.call("tower", tower(), pair_batch()[0]).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="a second time"):
            loss.backward()


class Doing(nn.Module):
    def __init__(self, does: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 16)
        self.generator = torch.Generator()
        self.calls = 0
        self.does = does

    def forward(self, x: torch.Tensor) -> Any:
        return self.does(self, self.layer(x))


OTHER = torch.ones(16)


def counts(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    module.calls += 1
    return hidden * module.calls


REFUSED: dict[str, tuple[Callable[[Any, torch.Tensor], Any], str]] = {
    "a value": (lambda _, h: h if float(h.detach().sum()) < 1e9 else -h, "synchronizes with the device"),
    "a shape by values": (lambda _, h: h[h.detach() > 0], "synchronizes with the device"),
    "a generator": (lambda m, h: h + torch.rand(16, generator=m.generator), "a generator of its own"),
    "Python's numbers": (lambda _, h: h * random.random(), "Python's or numpy's"),
    "another tensor": (lambda _, h: h * OTHER, "neither an argument nor its module's own"),
    "another leaf": (lambda _, h: h * nn.Parameter(torch.ones(16)), "neither an argument nor"),
    "an object": (lambda _, h: (h, object()), "may hide tensors"),
    "views of each other": (lambda _, h: (h, h[:, :8]), "share memory"),
    "a view of a weight": (lambda m, h: (h, m.layer.weight.T), "returns its input or weight"),
    "a weight": (lambda m, h: (h, m.layer.weight), "returns its input or weight"),
    "a checkpoint": (lambda _, h: checkpoint(torch.sin, h, use_reentrant=False), "checkpointing"),
    "a count": (counts, "in the call itself"),
    "the seed": (lambda _, h: (torch.manual_seed(7), h + torch.rand_like(h))[1], "sets the seed"),
    "an error": (lambda _, h: h @ torch.ones(3, 3), "trying it failed: RuntimeError"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_graph_cannot_do_runs_eagerly_and_says_why(case: str):
    does, reason = REFUSED[case]
    model, twin = Doing(does), Doing(does)
    twin.load_state_dict(model.state_dict())
    with bench() as ours:
        for step in range(4):
            x = pair_batch(step)[0]
            if case == "an error":
                with pytest.raises(RuntimeError):
                    ours.call("doing", model, x)
                continue
            random.seed(step)
            result = ours.call("doing", model, x)
            random.seed(step)
            expected = twin(x)
            pairs = zip(*(r if isinstance(r, tuple) else (r,) for r in (result, expected)), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs if isinstance(a, torch.Tensor))
        assert any(reason in said for _, said in ours.graphs.eager_calls)
        assert ours.graphs.num_replays == 0
        assert torch.equal(ours.call("tower", twin.layer, x), twin.layer(x))
        assert ours.graphs.num_replays == 1


@pytest.mark.parametrize("kind", ["write", "subclass", "hook", "rnn", "mode"])
def test_modules_inputs_and_modes_of_other_kinds_run_eagerly(kind: str):
    class Other(torch.Tensor):
        pass

    model: nn.Module = nn.Sequential(nn.ReLU(inplace=kind == "write"))
    x = pair_batch()[0]
    if kind == "hook":
        model[0].register_forward_hook(lambda *_: None)
    if kind == "rnn":
        model, x = nn.GRU(8, 8), torch.randn(3, 2, 8)
    with bench() as ours, FlopCounterMode(display=False) if kind == "mode" else nullcontext():
        ours.call("model", model, x.as_subclass(Other) if kind == "subclass" else x)
        assert ours.graphs.captured.total() == 0
        assert len(ours.graphs.eager_calls) == 1


def test_random_numbers_are_refused_where_replays_would_share_their_seed(monkeypatch: pytest.MonkeyPatch):
    with bench() as ours:
        monkeypatch.setattr(type(ours.runtime), "draws_apart", False)
        ours.call("dropout", nn.Dropout(0.5), pair_batch()[0])
        assert any("draws random numbers" in reason for _, reason in ours.graphs.eager_calls)
