"""Placed calls on streams: concurrency and order, single calls, tensors of lanes, and the records of what ran."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.utils.dlpack
from engine_cases import SIDE_BY_SIDE, Doing, Glued, TwoTowers, pair_batch
from fake_streams import FakeStreams, Launch, RaceError
from stream_cases import FakeBackend, Projected, colocated, steps
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

from mosaic.engine import Handle
from mosaic.engine.streams.executor import StreamExecutor
from mosaic.engine.streams.order import LaneOrder, Orders
from mosaic.engine.streams.tensor import StreamTensor, patch_torch
from mosaic.errors import ModuleContractError

THREE = [{f"towers.{index}": 1 for index in range(3)}, {"head": 1}]


def triple(step: int = 0) -> tuple[torch.Tensor, ...]:
    return (*pair_batch(step), pair_batch(step + 50)[0])


def pairs(one: list[Launch], other: list[Launch]) -> Iterator[tuple[Launch, Launch]]:
    return ((a, b) for a in one for b in other)


def test_placed_modules_and_their_glue_are_not_ordered_among_each_other():
    model = Projected()
    with colocated(model, triple(), THREE, num_slots=3) as (handle, backend):
        for step in range(3):
            backend.api.launches.clear()
            out = model(*triple(step))
            lanes = [backend.launches_of(handle, f"towers.{index}") for index in range(3)]
            ends = [next(i for i, one in enumerate(lane) if one.name == "aten.div.Tensor") for lane in lanes]
            for index in range(3):
                names = [launch.name for launch in lanes[index][: ends[index] + 1]]
                assert names.count("aten.addmm.default") == 2
                assert "aten.mm.default" in names
                for other in range(index):
                    both = pairs(lanes[index][: ends[index] + 1], lanes[other][: ends[other] + 1])
                    assert all(a.is_concurrent_with(b) for a, b in both)
            head = [one for one in backend.launches_of(handle, "head") if one.name == "aten.addmm.default"][2]
            assert head.is_after(lanes[0][0])
            assert head.is_after(lanes[1][0])
            assert head.is_concurrent_with(lanes[2][-1])
            out.sum().backward()


def beside(work: Callable[[], Any], *, wait_s: float) -> tuple[threading.Thread, list[Any]]:
    """Begins work in a thread of its own, and waits for its end for some time."""
    ended: list[Any] = []

    def run() -> None:
        try:
            ended.append(work())
        except Exception as error:  # for the test to look at
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(wait_s)
    return thread, ended


@torch.no_grad()
def test_threads_that_call_the_model_take_turns():
    others: list[tuple[threading.Thread, list[Any]]] = []

    def glue(self: Glued, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        left = self.left(x)
        if self.training:
            self.eval()
            others.append(beside(lambda: self(y, x), wait_s=0.2))
            assert not others[0][1]
        return left @ self.right(y).T

    model = Glued(glue).eval()
    x, y = pair_batch()
    expected = [model(x, y), model(y, x)]
    with colocated(model, pair_batch(), SIDE_BY_SIDE):
        model.train()
        assert torch.equal(model(x, y), expected[0])
        others[0][0].join()
        assert torch.equal(others[0][1][0], expected[1])


def test_a_second_model_that_another_thread_trains_runs_in_place_since_both_may_have_the_same_streams():
    first, second = Projected(), Projected()
    with colocated(first, triple(), THREE, num_slots=3) as (handle, _):
        with colocated(second, triple(), THREE, num_slots=3) as (other, _):
            first(*triple()).sum().backward()
            beside(lambda: second(*triple()).sum().backward(), wait_s=60)
            assert "another thread trains another colocated model" in other.describe()
            assert "ran in place" not in handle.describe()
            second(*triple()).sum().backward()
            assert len(other.timeline().spans) == 2 * 4
        assert handle.active


def test_a_thread_that_calls_a_module_while_another_is_in_the_model_is_refused_by_name():
    others: list[tuple[threading.Thread, list[Any]]] = []

    def glue(self: Glued, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        left = self.left(x)
        if not self.training:
            others.append(beside(lambda: self.right(y), wait_s=60))
        return left @ self.right(y).T

    model = Glued(glue)
    with colocated(model, pair_batch(), SIDE_BY_SIDE):
        model.eval()
        model(*pair_batch())
        assert isinstance(others[0][1][0], ModuleContractError)
        assert "'right' is called by one thread while another is in a call of the model" in str(others[0][1][0])
        assert isinstance(model.right(pair_batch()[1]), StreamTensor)


# Every ordering is needed: without it a race is found.


def let_go_early(model: nn.Module) -> None:
    with torch.no_grad():
        x, y = pair_batch()
        _ = model.left(x * 2)
        _ = y * 2


def in_a_buffer(model: nn.Module) -> None:
    buffer, y = pair_batch()
    model.forward = lambda x, y: (model.left(x), model.right(y))[1]  # type: ignore[method-assign]
    for step in range(3):
        buffer.copy_(pair_batch(step)[0])
        model(buffer, y)


def gradients_in_the_call(model: nn.Module) -> None:
    parameters = list(model.left.parameters())

    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        left = model.left(x)
        gradients = torch.autograd.grad(left.square().sum(), parameters)
        penalty = sum(gradient.square().sum() for gradient in gradients)
        del gradients
        return model.left(x).sum() * penalty

    model.forward = forward  # type: ignore[method-assign]
    with mock.patch.object(Orders, "end_backward", nothing):  # which does not know of gradients that backward() adds
        model(*pair_batch())


class Strange(torch.Tensor):
    pass


def results_of_another_class(model: nn.Module) -> None:
    model.left.forward = lambda x: tower.forward(x).as_subclass(Strange)  # type: ignore[method-assign]
    tower = nn.Sequential(*model.left)

    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        left = model.left(x).as_subclass(torch.Tensor)
        total = left.sum()
        del left
        return model.left(x).as_subclass(torch.Tensor).sum() * total

    model.forward = forward  # type: ignore[method-assign]
    with torch.no_grad():
        model(*pair_batch())


def reaching_into_a_module(model: nn.Module) -> None:
    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        right = model.right(y).sum()
        for parameter in model.right.parameters():
            parameter.data.mul_(0.9)  # past torch's count of writes
        return model.left(x).sum() + right

    model.forward = forward  # type: ignore[method-assign]
    with torch.no_grad():
        model(*pair_batch())


def nothing(*_: Any, **__: Any) -> None:
    pass


SEEDED: dict[str, tuple[Any, str, Callable[[nn.Module], None]]] = {
    "the wait for a producer": (LaneOrder, "hold", steps),
    "telling the allocator": (FakeStreams, "record_use", let_go_early),
    "the wait for the beginning of a call": (LaneOrder, "enter", steps),
    "the wait of who reaches into a module": (StreamExecutor, "reach", reaching_into_a_module),
    "the join at the end of a call": (Orders, "join", in_a_buffer),
    "the wait for gradients' readers": (LaneOrder, "lend", gradients_in_the_call),
    "the wait for readers of strange results": (LaneOrder, "lend", results_of_another_class),
}


@pytest.mark.parametrize("what", SEEDED)
def test_without_one_ordering_there_is_a_race(what: str, monkeypatch: pytest.MonkeyPatch):
    owner, name, loop = SEEDED[what]
    torch.manual_seed(0)
    with colocated(TwoTowers(), pair_batch(), SIDE_BY_SIDE) as (handle, _):
        loop(handle._model)
    with colocated(TwoTowers(), pair_batch(), SIDE_BY_SIDE) as (handle, _):
        monkeypatch.setattr(owner, name, nothing)
        with pytest.raises((RaceError, ModuleContractError)):
            loop(handle._model)
        monkeypatch.undo()


# What modules exchange other than by arguments and results.


def by_its_argument() -> TwoTowers:
    """Writes into what the module is given before it is called, past torch's count of writes."""

    def glue(self: Glued, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y.data.mul_(2)
        return self.left(x) @ self.right(y).T

    return Glued(glue)


def by_a_buffer() -> TwoTowers:
    """Reads a module's buffer."""

    def counting(self: Doing, y: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.layers(y)
        self.total += hidden.detach().sum()
        return hidden

    def glue(self: Glued, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        left, right = self.left(x), self.right(y)
        return buffers[0] * 2 + left @ right.T

    model = Glued(glue, right=Doing(counting))
    model.right.register_buffer("total", torch.zeros(()))
    buffers = list(model.right.buffers())
    return model


@pytest.mark.parametrize("make", [by_its_argument, by_a_buffer])
def test_a_module_that_exchanges_more_than_arguments_and_results_runs_in_place(make: Callable[[], TwoTowers]):
    with colocated(make(), pair_batch(), SIDE_BY_SIDE) as (handle, _):
        steps(handle._model)
        assert "of right ran in place" in handle.describe()
        assert "of left ran in place" not in handle.describe()
        assert handle._placed is not None
        handle._placed.sites["right"].obstacle = None
        with pytest.raises((RaceError, ModuleContractError)):
            steps(handle._model)


# Single calls.


@contextmanager
def placed(model: nn.Module) -> Iterator[tuple[Handle, FakeBackend]]:
    with colocated(model, pair_batch(), SIDE_BY_SIDE) as (handle, backend):
        yield handle, backend


# Computed again in a backward.


def recomputed(self: Glued, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Needs both towers again in the backward of an operator of the user's own stream."""
    return checkpoint(lambda x, y: self.left(x * 2) @ self.right(y * 2).T, x, y, use_reentrant=False)


def test_what_is_computed_again_runs_in_the_order_of_autograd_s_stream():
    model = Glued(recomputed)
    with placed(model) as (_, backend):
        loss = model(*pair_batch()).sum()
        backend.api.launches.clear()
        loss.backward()
        again = [launch for launch in backend.api.launches if launch.name == "aten.addmm.default"]
        assert again
        assert {launch.stream for launch in again} == {0}


# Arguments written to, and views of arguments.


def test_the_user_s_stream_waits_for_what_a_module_wrote_into_a_tensor_of_its():
    def rereading(self: Glued, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = self.left(x)
        return (x * 2).sum() * (found @ self.right(y).T)

    model = Glued(rereading, Doing(lambda self, x: self.layers(x.add_(1) if self.is_on else x)))
    with placed(model), torch.no_grad():
        model.left.is_on = True
        model(*pair_batch())


def cutting(self: Doing, x: torch.Tensor) -> torch.Tensor:
    """Returns a part of its argument, after work on it."""
    made: torch.Tensor = self.layers(x)
    return x[:, :4] if self.is_on else made


def test_the_user_s_stream_waits_for_a_module_that_returns_a_view_of_a_tensor_of_its():
    def overwriting(self: Glued, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = self.left(x)
        if self.left.is_on:
            assert type(found) is torch.Tensor
            found.mul_(2)
        return self.right(y) * found.sum()

    model = Glued(overwriting, Doing(cutting))
    with placed(model), torch.no_grad():
        model.left.is_on = True
        model(*pair_batch())


def test_a_view_of_another_lane_s_tensor_stays_with_that_lane_behind_the_module_that_returned_it():
    seen: list[Any] = []

    def chained(self: Glued, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        left = self.left(x)[:, :8] * 1
        right = self.right(left)
        if self.right.is_on:
            right.mul_(2)
            seen.append((left.order, right.order))
        return (left.sum() * right).sum()

    model = Glued(chained, right=Doing(cutting))
    stages = [{"left": 1}, {"right": 2}]
    with colocated(model, pair_batch(), stages, num_slots=3) as (handle, backend), torch.no_grad():
        model.right.is_on = True
        model(*pair_batch())
        ((left, right),) = seen
        assert right is left
        (scaled,) = [one for one in backend.launches_of(handle, "left") if one.name == "aten.mul_.Tensor"]
        assert scaled.is_after([one for one in backend.launches_of(handle, "right") if "addmm" in one.name][-1])


def test_a_copy_to_another_device_is_made_on_the_user_s_stream():
    model = TwoTowers()
    with placed(model) as (handle, backend):
        left = model.left(pair_batch()[0])
        assert left.to("meta").device.type == "meta"
        copied = backend.api.launches[-1]
        assert copied.stream == 0
        assert copied.is_after(backend.launches_of(handle, "left")[-1])


# Tensors of lanes.


def results(model: TwoTowers) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = pair_batch()
    return model.left(x), model.right(y)


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


def test_foreach_writes_that_torch_does_not_count_are_counted(monkeypatch: pytest.MonkeyPatch):
    def uncounted(tensors: list[torch.Tensor], *_: Any) -> None:
        for tensor in tensors:
            tensor.data.zero_()

    weight = torch.ones(3)
    for name in ("_foreach_lerp_", "_foreach_zero_"):
        monkeypatch.setattr(torch, name, uncounted)
    for home in (torch, torch.utils.dlpack):
        monkeypatch.setattr(home, "to_dlpack", home.to_dlpack)
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", torch.autograd._engine_run_backward)
    patch_torch.__wrapped__()
    torch._foreach_lerp_([weight], [weight], 0.5)
    torch._foreach_zero_([weight])
    assert weight._version == 2
    assert not weight.any()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_the_allocator_is_told_of_gradients_that_a_later_backward_may_let_go(monkeypatch: pytest.MonkeyPatch):
    """Such a gradient lies in a lane's memory, the user's stream reads it, and the node that saved it may free it."""
    told: list[torch.Tensor] = []
    monkeypatch.setattr(FakeStreams, "record_use", lambda _, tensor, stream: told.append(tensor))
    model, (x, y) = TwoTowers(), pair_batch()
    x.requires_grad_()
    with colocated(model, (x, y), SIDE_BY_SIDE):
        loss = model(x, y).square().sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        assert any(tensor is gradient for tensor in told)
        (loss + gradient.pow(2).sum()).backward(create_graph=True)
        assert {id(parameter.grad) for parameter in model.left.parameters()} <= set(map(id, told))


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError


def test_after_a_backward_that_raised_the_user_s_stream_waits_for_the_gradients_that_lanes_made():
    def glue(self: Glued, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return FailsBackward.apply(self.left(x)) * self.right(y)

    model = Glued(glue)
    with colocated(model, pair_batch(), SIDE_BY_SIDE):
        with pytest.raises(ArithmeticError):
            model(*pair_batch()).sum().backward()
        for parameter in model.right.parameters():
            assert parameter.grad is not None
            parameter.grad.zero_()


def test_a_capsule_of_a_lane_s_tensor_joins_the_lane():
    model = TwoTowers()
    with colocated(model, pair_batch(), SIDE_BY_SIDE) as (handle, backend), torch.no_grad():
        left, _ = results(model)
        torch.from_dlpack(torch.utils.dlpack.to_dlpack(left)) + 1
        assert backend.api.launches[-1].stream == 0
        assert backend.api.launches[-1].is_after(backend.launches_of(handle, "left")[-1])


def test_a_module_that_needs_what_the_model_sets_around_its_call_is_not_called_alone():
    def scaled(self: Doing, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layers(x)
        return made * self.scale

    def glue(self: Glued, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.right.scale = x.mean()
        right = self.right(y)
        del self.right.scale
        return self.left(x) @ right.T

    model = Glued(glue, right=Doing(scaled))
    with colocated(model, pair_batch(), SIDE_BY_SIDE):
        steps(model)


def test_a_slice_that_ends_at_a_tensor_reads_it_in_the_order_of_the_user_s_stream():
    def glue(self: Glued, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        count = (y.square().sum() > 0).long() + 2
        return self.left(x)[:count, :4] @ self.right(y)[:count, :4].T

    model = Glued(glue)
    with colocated(model, pair_batch(), SIDE_BY_SIDE):
        steps(model)


# Records, and what is left behind.


@pytest.mark.parametrize("stages", [SIDE_BY_SIDE, [{"left": 2}, {"right": 1}]], ids=["side by side", "sharing slots"])
def test_a_graph_that_the_user_captures_leaves_the_handle_and_the_model_as_they_were(stages: Any):
    model = TwoTowers()
    x, y = pair_batch()
    with colocated(model, (x, y), stages, num_slots=3) as (handle, backend):
        steps(model)
        handle.clear_timeline()
        model.forward = lambda x, y: forward(x * next(model.left.parameters())[0, 0], y)  # type: ignore[method-assign]
        forward = type(model).forward.__get__(model)
        expected = torch.autograd.grad(model(x, y).sum(), list(model.parameters()))
        graph, stream = backend.api.new_graph(), backend.api.new_stream()
        backend.api.release_workspaces()
        with backend.api.capture(graph, stream=stream, pool=backend.api.new_graph_pool()):
            found = torch.autograd.grad(model(x, y).sum(), list(model.parameters()))
        backend.api.release_workspaces()
        next(model.left.parameters()).sum().backward()  # where a backward of the module would end
        assert handle.timeline().spans
        assert handle.metrics()
        model.state_dict()
        backend.api.synchronize()
        graph.replay()
        assert all(map(torch.equal, found, expected))
        steps(model)


def test_an_interrupt_leaves_the_loop_its_stream_and_a_model_that_can_be_saved(monkeypatch: pytest.MonkeyPatch):
    model = TwoTowers()
    with colocated(model, pair_batch(), SIDE_BY_SIDE) as (handle, backend):
        steps(model)

        def interrupt(*_: object) -> None:
            monkeypatch.undo()
            backend.api.use_stream(handle._executor.lanes.lane((0,)).stream).__enter__()
            raise KeyboardInterrupt

        for target in ("versions_of", "tagged"):
            monkeypatch.setattr(f"mosaic.engine.streams.executor.{target}", interrupt)
            with pytest.raises(KeyboardInterrupt):
                model(*pair_batch())
            assert backend.api.current_stream() == backend.api.main
            assert len(model.state_dict()) == 10
            steps(model)


def test_the_timeline_has_a_forward_and_a_backward_of_every_module_and_step():
    model = Projected(2)
    with colocated(model, pair_batch(), [{"towers.0": 1, "towers.1": 1}, {"head": 2}]) as (handle, _):
        handle.clear_timeline()
        steps(model, num_steps=4)
        spans = handle.timeline().spans
        names = ("towers.0", "towers.1", "head")
        assert sorted((s.module, s.phase, s.step) for s in spans) == sorted(
            (name, phase, step) for name in names for phase in ("forward", "backward") for step in range(4)
        )
        assert all(span.end_ms >= span.start_ms >= 0 for span in spans)
        assert [span.start_ms for span in spans] == sorted(span.start_ms for span in spans)
        by_key = {(s.module, s.phase, s.step): s for s in spans}
        assert all(by_key[n, "backward", s].start_ms >= by_key[n, "forward", s].end_ms for n in names for s in range(4))
        assert handle.metrics()["steps"] == 4
        handle.clear_timeline()
        assert handle.timeline().spans == ()


@torch.no_grad()
def test_a_compiled_function_between_modules_gets_none_of_the_lanes_bookkeeping_into_its_graph():
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend)
    def fuse(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(left * right) + left.tanh()

    model = TwoTowers()
    x, y = pair_batch()
    expected = fuse(model.left(x), model.right(y))
    assert len(graphs) == 1
    with colocated(model, (x, y), SIDE_BY_SIDE):
        left, right = model.left(x), model.right(y)
        with _disable_current_modes():  # under one Dynamo would not compile
            assert torch.equal(fuse(left, right), expected)
    assert len(graphs) == 1


def add_to(table: dict[str, Any]) -> None:
    with torch.no_grad():
        table["weight"].add_(0.1)


def exchange_data(table: dict[str, Any]) -> None:
    table["weight"].data = table["weight"].data * 1.1


def replace(table: dict[str, Any]) -> None:
    table["weight"] = nn.Parameter(table["weight"].detach() * 1.1)


@pytest.mark.parametrize("write", [add_to, exchange_data, replace])
def test_a_weight_that_the_model_changes_past_its_module_is_ordered_before_a_call_and_refused_beside_one(write: Any):
    moment = [""]

    def glue(model: Glued, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if moment == ["before"]:
            write(table)
        left = model.left(x)
        if moment == ["beside"]:
            write(table)
        return left * model.right(y)

    model = Glued(glue)
    table: dict[str, Any] = vars(model.left[0])["_parameters"]
    with colocated(model, pair_batch(), SIDE_BY_SIDE):
        for moment[0] in ("", "before", "before", ""):
            model(*pair_batch())  # the fake streams raise where the lane would not wait for the write
        moment[0] = "beside"
        if write is replace:  # what the lane reads lives until the module's next call
            model(*pair_batch())
        else:
            with pytest.raises((ModuleContractError, RaceError)):
                model(*pair_batch())
