"""A call that cannot be captured runs eagerly, says which and why, and leaves everything else usable."""

from __future__ import annotations

import copy
import enum
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_cases import TwoTowers, pair_batch, tower
from fake_streams.graphs import Recording
from stage_graph_cases import Bench, bench, by_graphs, one_thread, plainly, train  # noqa: F401
from torch import nn
from torch.utils.checkpoint import checkpoint

from mosaic.engine.graphs import Eager
from mosaic.engine.graphs.branches import RefusalError
from mosaic.engine.graphs.capture import Capturing
from mosaic.engine.graphs.rehearsal import CaptureWatch

pytestmark = pytest.mark.usefixtures("one_thread")

OUTSIDE = torch.randn(8)


class Does(nn.Module):
    """Does what it is told with its input."""

    def __init__(self, what: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("steps", torch.zeros(1))
        self.what = what

    def forward(self, x: Any) -> Any:
        return self.what(self, x)


def branching(self: Does, x: torch.Tensor) -> torch.Tensor:
    return self.layer(x) if x.sum() > 0 else x


def replaces_a_buffer(self: Does, x: torch.Tensor) -> torch.Tensor:
    self.steps = self.steps + 1
    return self.layer(x)


def counts(self: Does, x: torch.Tensor) -> torch.Tensor:
    self.calls = getattr(self, "calls", 0) + 1
    return self.layer(x)


def hooked_as_long_as_its_frame(self: Does, x: torch.Tensor) -> torch.Tensor:
    def hooks() -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            yield

    generator = hooks()  # as torch.utils.checkpoint of 2.11 does
    next(generator)
    result = self.layer(x)
    next(generator, None)
    return result


class Hidden:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


CASES = {
    "branching": (branching, "needs a value back from the device in the middle (aten._local_scalar_dense"),
    "nonzero": (lambda self, x: self.layer(x)[x[:, 0] > 0], "needs a value back from the device in the middle"),
    "in place": (lambda self, x: self.layer(x.mul_(2)), "writes into one of its inputs (aten.mul_"),
    "view in place": (lambda self, x: self.layer(x.view(-1).add_(2).view(-1, 8)), "writes into one of its inputs"),
    "opaque": (lambda self, x: Hidden(self.layer(x)), "returns a Hidden, which may hide tensors"),
    "outside": (lambda self, x: self.layer(x) * OUTSIDE, "reads a 8 tensor that is neither an argument nor"),
    "checkpoint": (lambda self, x: checkpoint(self.layer, x, use_reentrant=False), "activation checkpointing"),
    "reentrant": (lambda self, x: checkpoint(self.layer, x.clone(), use_reentrant=True), "activation checkpointing"),
    "hooked": (hooked_as_long_as_its_frame, "activation checkpointing or other hooks on saved tensors"),
    "replacing": (replaces_a_buffer, "its 'steps' was replaced in the call itself"),
    "counting": (counts, "its attribute 'calls' changed in the call itself"),
    "generator": (
        lambda self, x: self.layer(x) * torch.rand(8, generator=torch.Generator()),
        "draws random numbers from a generator of its own",
    ),
    "python": (lambda self, x: self.layer(x) * random.random(), "draws from Python's or numpy's random numbers"),
    "error": (lambda self, x: self.layer(x[:, :3]), "trying it failed: RuntimeError: mat1 and mat2"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_cannot_be_captured_runs_eagerly_and_says_why(name: str):
    what, reason = CASES[name]
    model = Does(what)
    good = tower()
    x, y = pair_batch()
    with bench() as ours:
        for _ in range(4):
            x = torch.randn(6, 8, requires_grad=name == "reentrant")
            bad, fine = ours.graphs.run("s", [ours.branch("bad", model, x), ours.branch("good", good, y)])
            assert isinstance(bad, Eager)
            assert torch.equal(fine, good(y))
            fine.sum().backward()
            if name == "counting":
                model.calls = 1
        assert reason in ours.graphs.refused["bad"]
        assert list(ours.graphs.refused) == ["bad"]
        assert ours.graphs.num_replays == 4


@pytest.mark.parametrize("copy", [lambda host, there: host.to("meta"), lambda host, there: there.copy_(host)])
def test_a_copy_from_memory_that_is_not_pinned_is_refused_for_good(copy: Any):
    there = torch.ones(3, device="meta")
    with (
        pytest.raises(RefusalError, match="from memory that is not pinned") as refusal,
        CaptureWatch(there.device, [], [there]),
    ):
        copy(torch.ones(3), there)
    assert refusal.value.lasting


def test_attention_whose_seed_is_on_the_host_until_it_is_captured_is_not_taken_for_a_copy():
    with torch.library._scoped_library("mosaic_tests", "DEF") as library:
        library.define("_scaled_dot_product_efficient_attention(Tensor x) -> (Tensor, Tensor)")
        library.define("to_host(Tensor x) -> (Tensor, Tensor)")
        for name in ("_scaled_dot_product_efficient_attention", "to_host"):  # as torch's kernel for CUDA does
            library.impl(name, lambda x: (x.clone(), torch.zeros((), dtype=torch.int64)), "Meta")
        x = torch.ones(3, device="meta")
        watch = CaptureWatch(x.device, [], [x])
        with watch:
            torch.ops.mosaic_tests._scaled_dot_product_efficient_attention(x)
        assert watch.obstacle is None
        with pytest.raises(RefusalError, match="copies a tensor to cpu"), watch:
            torch.ops.mosaic_tests.to_host(x)


def test_trying_leaves_no_trace_of_what_is_refused():
    model = Does(counts)
    model.calls = 0
    state = random.getstate()
    with bench() as ours:
        ours.graphs.run("s", [ours.branch("counts", model, torch.ones(2, 8))])
        assert model.calls == 0
        steps = model.steps
        model.what = replaces_a_buffer
        ours.graphs.run("s", [ours.branch("replaces", model, torch.ones(2, 8))])
        assert model.steps is steps
        model.what = CASES["python"][0]
        ours.graphs.run("s", [ours.branch("draws", model, torch.ones(2, 8))])
    assert random.getstate() == state


def test_an_attribute_made_in_the_first_call_is_no_obstacle_for_the_next():
    def lazily(self: Does, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "table"):
            self.table = torch.arange(8.0)
        return self.layer(x) * self.table

    model = Does(lazily)
    x = torch.randn(2, 8)
    with bench() as ours:
        first = ours.graphs.run("s", [ours.branch("lazy", model, x)])[0]
        assert isinstance(first, Eager)
        assert "made its attribute 'table'" in first.reason
        assert not hasattr(model, "table")
        expected = model(x)
        assert torch.equal(ours.call("lazy", model, x), expected)
        assert ours.graphs.refused == {}
        assert ours.graphs.num_replays == 1


@pytest.mark.parametrize("hook", ["forward", "forward_pre", "full_backward"])
def test_a_module_with_hooks_runs_eagerly(hook: str):
    model = tower()
    handle = getattr(model[1], f"register_{hook}_hook")(lambda *_: None)
    with bench() as ours:
        ours.call("tower", model, pair_batch()[0]).sum().backward()
        assert "has a hook on '1'" in ours.graphs.refused["tower"]
        handle.remove()


def test_a_hook_that_is_added_later_is_called():
    model = tower()
    seen: list[int] = []
    with bench() as ours, torch.no_grad():
        ours.call("tower", model, pair_batch()[0])
        with model.register_forward_hook(lambda *_: seen.append(1)):
            ours.call("tower", model, pair_batch()[0])
        ours.call("tower", model, pair_batch()[0])
        assert seen == [1]


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        (Hidden(torch.ones(3)), "takes a Hidden"),
        (torch.ones(3, device="meta"), "takes a tensor on meta, not on cpu"),
        (torch.ones(3).to_sparse(), "takes a sparse"),
        (torch.ones(3).as_subclass(type("Strange", (torch.Tensor,), {})), "takes a Strange"),
    ],
)
def test_arguments_that_cannot_be_static_are_refused(argument: Any, reason: str):
    with bench() as ours:
        found = ours.graphs.run("s", [ours.branch("any", lambda x: None, argument)])[0]
        assert isinstance(found, Eager)
        assert reason in ours.graphs.refused["any"]


@torch.no_grad()
def test_members_of_enumerations_are_compared_by_name():
    with bench() as ours:
        for color in (Color.RED, Color.BLUE, Color.RED):
            found = ours.call("enum", lambda x, c: x * c.value, torch.ones(3), color)
            assert torch.equal(found, torch.full((3,), float(color.value)))
        assert ours.graphs.num_captures == 2


class FailsInCapture:
    """Works in trial runs, as something that CUDA alone forbids would."""

    def __init__(self, ours: Bench, model: nn.Module, *, late: bool = False) -> None:
        self.ours, self.model, self.late = ours, model, late

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.ours.runtime.is_capturing():
            if self.late:  # a library's own stream, which nobody joins
                event, stream = self.ours.runtime.new_event(), self.ours.runtime.new_stream()
                event.record(self.ours.runtime.current_stream())
                event.wait(stream)
                with self.ours.runtime.use_stream(stream):
                    return self.model(x)
            self.ours.runtime.synchronize()
        return self.model(x)


def test_a_capture_that_fails_in_python_alone_is_joined_so_that_torch_can_end_it(monkeypatch: pytest.MonkeyPatch):
    ended: list[str] = []
    end = Recording.end

    def noting(self: Recording) -> None:
        ended.append("badly")
        end(self)
        ended[-1] = "well"

    monkeypatch.setattr(Recording, "end", noting)
    with bench() as ours:

        def fails(x: torch.Tensor) -> torch.Tensor:
            if ours.runtime.is_capturing():
                x = x * 2
                raise ValueError("no")
            return x * 2

        ours.call("fails", fails, pair_batch()[0])
        assert ours.graphs.refused == {"fails": "capturing it failed: ValueError: no"}
    assert ended == ["well"]


@pytest.mark.parametrize("late", [False, True], ids=["at once", "at the end of the capture"])
def test_a_capture_that_fails_names_the_culprit_and_captures_the_others(late: bool):
    good, bad = tower(), tower()
    x, y = pair_batch()
    with bench() as ours:
        failing = FailsInCapture(ours, bad, late=late)
        for _ in range(3):
            branches = [
                ours.branch("good", good, x),
                ours.branch("bad", failing, y),
                ours.branch("fine", good, y),
            ]
            branches[1] = type(branches[1])(
                name="bad", run=failing, args=(y,), kwargs={}, lane=branches[1].lane, module=bad
            )
            one, other, third = ours.graphs.run("s", branches)
            assert isinstance(other, Eager)
            assert torch.equal(one, good(x))
            assert torch.equal(third, good(y))
            (one.sum() + third.sum()).backward()
        assert list(ours.graphs.refused) == ["bad"]
        assert "failed: RuntimeError" in ours.graphs.refused["bad"]
        assert ("not permitted" in ours.graphs.refused["bad"]) is not late
        assert ours.graphs.num_replays == 3
        assert not ours.runtime.is_capturing()
        assert ours.runtime.current_stream() == ours.runtime.main


def test_a_module_hidden_in_a_function_is_left_as_it_was_when_the_function_is_refused():
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8))
    x = torch.randn(4, 8)
    with bench() as ours:
        (result,) = ours.graphs.run("stage", [ours.branch("hidden", lambda x: model(x), x)])
        assert isinstance(result, Eager)
        assert "neither an argument nor its module's own" in result.reason
    assert model[0].num_batches_tracked.item() == 0
    assert not model[0].running_mean.any()


def test_branches_that_fail_only_together_are_all_left_alone(monkeypatch: pytest.MonkeyPatch):
    capture = Capturing.capture

    def fail(self: Capturing, branches: Any) -> Any:
        if len(branches) > 1:
            raise RuntimeError("only together")
        return capture(self, branches)

    monkeypatch.setattr(Capturing, "capture", fail)
    model = tower()
    x, y = pair_batch()
    with bench() as ours:
        found = ours.graphs.run("s", [ours.branch("a", model, x), ours.branch("b", model, y)])
        assert all(isinstance(one, Eager) and "only together" in one.reason for one in found)


@pytest.mark.parametrize("how", ["inference", "hooks", "backward"])
def test_calls_inside_of_something_else_run_eagerly(how: str):
    model = tower()
    x = pair_batch()[0]
    reasons: list[str] = []
    with bench() as ours:

        def call() -> None:
            found = ours.graphs.run("s", [ours.branch("tower", model, x)])[0]
            assert isinstance(found, Eager)
            reasons.append(found.reason)

        if how == "inference":
            with torch.inference_mode():
                call()
        elif how == "hooks":
            with torch.autograd.graph.save_on_cpu():
                call()
        else:
            y = torch.ones(2, requires_grad=True)
            z = y * 2
            z.register_hook(lambda _: call())
            z.sum().backward()
        assert ours.graphs.refused == {}
    assert {"inference": "inference mode", "hooks": "hooks on saved", "backward": "middle of a backward"}[
        how
    ] in reasons[0]


def penalized(model: nn.Module, together: Any, step: int) -> torch.Tensor:
    x, y = (tensor.requires_grad_() for tensor in pair_batch(step))
    left, right = together(left=(model.left, x), right=(model.right, y))
    gradients = torch.autograd.grad((left * right).tanh().sum(), [x, y], create_graph=True)
    return (left * right).square().mean() + sum((gradient.norm() - 1) ** 2 for gradient in gradients)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph")
def test_gradients_of_gradients_are_those_of_the_plain_loop_and_end_the_use_of_graphs():
    model = TwoTowers(left=tower(8, 16, nn.BatchNorm1d(16)))
    twin = copy.deepcopy(model)
    expected = train(model, penalized, plainly)
    with bench() as ours:
        found = train(twin, penalized, by_graphs(ours))
    for one, other in zip(expected.values, found.values, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)  # uses of a weight are summed in another order
    assert all("create_graph=True" in reason for reason in ours.graphs.refused.values())
    assert list(ours.graphs.refused) == ["left", "right"]
    assert ours.graphs.num_replays == 1


def test_dropout_inside_of_an_rnn_is_refused_before_it_is_tried():
    model = nn.LSTM(8, 8, 2, dropout=0.5)
    with bench() as ours:
        branch = ours.branch("rnn", model, torch.ones(2, 8))
        ours.runtime.launches.clear()
        ours.graphs.run("s", [branch])
        assert ours.graphs.refused == {
            "rnn": "it draws dropout from numbers that cuDNN keeps, which a try would move on"
        }
        assert ours.runtime.launches == []


def test_a_weight_that_parametrize_caches_is_refused_before_it_is_tried():
    model = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    with bench() as ours, nn.utils.parametrize.cached():
        ours.graphs.run("s", [ours.branch("cached", model, torch.ones(2, 8))])
        assert "inside parametrize.cached()" in ours.graphs.refused["cached"]
