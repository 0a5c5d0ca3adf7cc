"""Stage graphs compute what eager calls do: outputs, gradients, buffers, random numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_cases import TwoTowers, pair_batch, tower
from stage_graph_cases import bench, one_thread, train_both  # noqa: F401
from torch import nn

from mosaic.engine.graphs.rehearsal import NUM_TRIALS

pytestmark = pytest.mark.usefixtures("one_thread")


def contrast(model: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    left = nn.functional.normalize(left @ model.weight, dim=-1)
    return (left @ nn.functional.normalize(right, dim=-1).T).square().mean()


def two_towers(model: Any, together: Any, number: int) -> torch.Tensor:
    x, y = pair_batch(number)
    return contrast(model, *together(left=(model.left, x), right=(model.right, y)))


def one_by_one(model: Any, together: Any, number: int) -> torch.Tensor:
    x, y = pair_batch(number)
    return contrast(model, *together(left=(model.left, x)), *together(right=(model.right, y)))


@pytest.mark.parametrize("step", [two_towers, one_by_one], ids=["together", "one by one"])
@pytest.mark.parametrize("extra", [[], [nn.Dropout(0.3)], [nn.BatchNorm1d(16)]], ids=["plain", "dropout", "batchnorm"])
def test_training_by_graphs_equals_training_plainly(extra: list[nn.Module], step: Any):
    ours, _ = train_both(lambda: TwoTowers(tower(8, 16, *extra), tower(8, 16, *extra)), step)
    assert ours.graphs.refused == {}
    assert ours.graphs.num_captures == (1 if step is two_towers else 2)
    assert ours.graphs.num_replays == 5 * ours.graphs.num_captures


@pytest.mark.parametrize("none", [False, True], ids=["zeros", "none"])
@pytest.mark.parametrize("every", [2, 5])
def test_gradients_accumulate_as_they_do_plainly(every: int, none: bool):
    ours, _ = train_both(TwoTowers, two_towers, every=every, none=none)
    assert ours.graphs.num_replays == 5


class Fan(nn.Module):
    """Two branches read one differentiable tensor, which a stem makes; one of them is partly frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = nn.Linear(8, 8), tower(), tower()
        self.right[0].requires_grad_(False)


def test_branches_that_share_an_input_pass_their_gradients_back():
    def step(model: Any, together: Any, number: int) -> torch.Tensor:
        shared = model.stem(pair_batch(number)[0])
        left, right = together(left=(model.left, shared), right=(model.right, shared))
        return (left * right).mean()

    ours, _ = train_both(Fan, step)
    assert ours.graphs.refused == {}


class Many(nn.Module):
    """Takes and returns nested things; one part of it is used by one result only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.pooler = tower(), nn.Linear(16, 4)

    def forward(self, inputs: dict[str, torch.Tensor], *, scale: float, flip: bool) -> Any:
        hidden = self.layers(inputs["x"]) * scale
        shown = {"hidden": hidden, "again": hidden, "pooled": self.pooler(hidden), "none": None}
        return shown, (inputs["y"], hidden.argmax(-1), "flipped" if flip else "plain")


class UsesMany(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.many, self.other = Many(), tower()

    def call(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.many({"x": x, "y": y}, scale=0.5, flip=True)


def test_nested_results_and_keywords_come_through():
    with bench() as ours:
        model = Many()
        x, y = pair_batch()
        for _ in range(3):
            shown = None  # or it would still be waiting for its backward
            shown, (same, best, word) = ours.call("many", model, {"x": x, "y": y}, scale=0.5, flip=True)
            plain, (_, plain_best, plain_word) = model({"x": x, "y": y}, scale=0.5, flip=True)
            assert same is y
            assert shown["again"] is shown["hidden"]
            assert torch.equal(shown["pooled"], plain["pooled"])
            assert torch.equal(best, plain_best)
            assert not best.requires_grad
            assert word == plain_word
        assert ours.graphs.num_replays == 3


@pytest.mark.parametrize("used", ["hidden", "pooled", "both"])
def test_a_result_that_nobody_uses_has_no_gradient(used: str):
    def step(model: Any, together: Any, number: int) -> torch.Tensor:
        x, y = pair_batch(number)
        (shown, _), other = together(many=(model.call, x, y), other=(model.other, y))
        chosen = {"hidden": shown["hidden"].sum(), "pooled": shown["pooled"].sum(), "both": 0}[used]
        if used == "both":
            chosen = shown["hidden"].sum() + shown["pooled"].square().sum()
        return chosen * other.mean()

    ours, _ = train_both(UsesMany, step)
    assert ours.graphs.refused == {}
    assert ours.graphs.num_replays == 5


def test_a_backward_from_some_results_leaves_out_what_an_earlier_one_had_from_the_others():
    def step(model: Any, together: Any, number: int) -> torch.Tensor:
        x, y = pair_batch(number)
        (shown, _), _ = together(many=(model.call, x, y), other=(model.other, y))
        return shown["hidden"].sum() + (shown["pooled"].square().sum() if number == 0 else 0)

    ours, _ = train_both(UsesMany, step)
    assert ours.graphs.num_replays == 5


def test_a_backward_from_some_results_is_captured_once_it_came_up():
    model, x = Many(), pair_batch()[0]
    with bench() as ours:
        for _ in range(3):
            (shown, _) = ours.call("many", model, {"x": x, "y": x}, scale=0.5, flip=True)
            shown["hidden"].sum().backward()
        ((branch,),) = [stage.branches for stage in ours.graphs._stages]
        whole, part = branch.backwards.values()
        assert [graph.num_replays for graph, _ in (whole, part)] == [1, 2]


def test_a_branch_without_any_gradient_does_not_go_backward():
    def step(model: Any, together: Any, number: int) -> torch.Tensor:
        x, y = pair_batch(number)
        left, _ = together(left=(model.left, x), right=(model.right, y))
        return left.mean()

    ours, _ = train_both(TwoTowers, step)
    assert ours.graphs.num_replays == 5  # what was dropped is not in flight


def test_evaluation_equals_plain_evaluation():
    model = tower(8, 16, nn.BatchNorm1d(16), nn.Dropout(0.5)).eval()
    with bench() as ours, torch.no_grad():
        found = [ours.call("tower", model, pair_batch(step)[0]) for step in range(3)]
        assert all(torch.equal(one, model(pair_batch(step)[0])) for step, one in enumerate(found))
        assert not any(one.requires_grad for one in found)
        assert ours.graphs.num_replays == 3


def test_capturing_leaves_no_trace():
    model = tower(8, 16, nn.BatchNorm1d(16), nn.Dropout(0.5))
    twin = tower(8, 16, nn.BatchNorm1d(16), nn.Dropout(0.5))
    twin.load_state_dict(model.state_dict())
    x = pair_batch()[0]
    with bench() as ours:
        torch.manual_seed(7)
        found = ours.call("tower", model, x)
        drawn = torch.rand(3)
        assert all(parameter.grad is None for parameter in model.parameters())
    torch.manual_seed(7)
    assert torch.equal(found, twin(x))
    assert torch.equal(drawn, torch.rand(3))
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), twin.buffers(), strict=True))


def test_hooks_on_parameters_run_once_in_each_backward():
    model = tower()
    seen: list[str] = []
    model[0].weight.register_hook(lambda grad: seen.append("grad") or grad * 2)
    model[0].weight.register_post_accumulate_grad_hook(lambda _: seen.append("accumulated"))
    accumulator = model[0].weight.view_as(model[0].weight).grad_fn.next_functions[0][0]  # kept, as DDP does
    accumulator.register_hook(lambda *_: seen.append("node"))
    x = pair_batch()[0]
    with bench() as ours:
        for step in range(3):
            model.zero_grad()
            seen.clear()
            ours.call("tower", model, x).sum().backward()
            by_graph = model[0].weight.grad.clone()
            assert sorted(seen) == ["accumulated", "grad", "node"], step
        model.zero_grad()
        model(x).sum().backward()
        assert torch.equal(by_graph, model[0].weight.grad)


def test_gradients_of_inputs_are_returned_by_autograd_grad():
    model = tower()
    with bench() as ours:
        kept = []
        for step in range(3):
            x = pair_batch(step)[0].requires_grad_()
            loss = ours.call("tower", model, x).square().sum()
            kept.append((x, torch.autograd.grad(loss, [x, *model.parameters()])))
        for x, found in kept:
            expected = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_results_that_are_not_contiguous_are_copied_too():
    with bench() as ours, torch.no_grad():
        kept = [ours.call("flip", lambda x: (x * 2).T, pair_batch(step)[0]) for step in range(3)]
        assert not kept[0].is_contiguous()
        assert all(torch.equal(one, (pair_batch(step)[0] * 2).T) for step, one in enumerate(kept))


def test_results_may_be_written_to():
    model = nn.Sequential(nn.Linear(8, 16), nn.Sigmoid())
    x = pair_batch()[0]
    with bench() as ours:
        for _ in range(2):
            model.zero_grad()
            ours.call("tower", model, x).mul_(2).sum().backward()
        found = model[0].weight.grad.clone()
    model.zero_grad()
    model(x).mul(2).sum().backward()
    assert torch.equal(found, model[0].weight.grad)


def test_a_parameter_or_buffer_that_is_returned_is_the_module_s_own():
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))
            self.register_buffer("steps", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> Any:
            return self.weight, self.steps, x * self.weight

    table = Table()
    with bench() as ours:
        for _ in range(2):
            weight, steps, product = ours.call("table", table, torch.ones(4))
            assert weight is table.weight
            assert steps is table.steps
            (product * weight).sum().backward()
        assert ours.graphs.num_replays == 2
    assert torch.allclose(table.weight.grad, 4 * table.weight)


def test_a_recurrent_module_is_captured_with_its_own_list_of_weights():
    model = nn.GRU(8, 16, batch_first=True)
    x = torch.randn(2, 5, 8)
    with bench() as ours:
        for _ in range(2):
            model.zero_grad()
            found, last = ours.call("gru", model, x)
            (found.sum() + last.sum()).backward()
        by_graph = [parameter.grad.clone() for parameter in model.parameters()]
        assert ours.graphs.refused == {}
    model.zero_grad()
    found, last = model(x)
    (found.sum() + last.sum()).backward()
    assert all(torch.equal(a, b.grad) for a, b in zip(by_graph, model.parameters(), strict=True))
    assert all(any(w is p for p in model.parameters()) for w in model._flat_weights)


def test_under_autocast_a_replay_casts_the_weights_of_its_step():
    def step(model: Any, together: Any, number: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return two_towers(model, together, number).float()

    ours, _ = train_both(TwoTowers, step, steps=3)
    assert ours.graphs.num_replays == 3


def test_a_backward_is_tried_and_captured_without_the_autocast_of_its_forward():
    seen: list[tuple[str, bool]] = []

    class Tells(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            seen.append(("forward", torch.is_autocast_enabled("cpu")))
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            seen.append(("backward", torch.is_autocast_enabled("cpu")))
            return grad * 2

    with bench() as ours, torch.autocast("cpu", torch.bfloat16):
        ours.call("tells", lambda x: Tells.apply(x), torch.ones(3, requires_grad=True))
    assert seen == [("forward", True), ("backward", False)] * (NUM_TRIALS + 1)


class Exact(nn.Module):
    """A part of it computes in single precision, whatever is asked for around it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.layer(x.float())


def test_a_part_that_autocast_leaves_out_goes_backward_in_its_own_precision():
    def step(model: Any, together: Any, number: int) -> torch.Tensor:
        x, y = pair_batch(number)
        with torch.autocast("cpu", torch.bfloat16):
            left, right = together(left=(model.left, x), right=(model.right, y))
        return contrast(model, left, right.float())

    ours, _ = train_both(lambda: TwoTowers(Exact(), tower()), step, steps=3)
    assert ours.graphs.num_replays == 3


def test_autocast_is_part_of_what_was_captured():
    model = tower()
    x = pair_batch()[0]
    with bench() as ours, torch.no_grad():
        for _ in range(2):
            assert ours.call("tower", model, x).dtype == torch.float32
            with torch.autocast("cpu", torch.bfloat16):
                found = ours.call("tower", model, x)
                assert found.dtype == torch.bfloat16
                assert torch.equal(found, model(x))
        assert ours.graphs.num_captures == 2
