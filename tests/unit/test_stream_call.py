"""Single calls on lanes: computed again in a backward, failing, writing into arguments, returning views of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from engine_cases import SIDE_BY_SIDE, TwoTowers, pair_batch, tower
from fake_streams import FakeStreams
from stream_cases import FakeBackend, colocated
from torch import nn
from torch.utils.checkpoint import checkpoint

from mosaic.backends.streams.lanes import StreamLanes
from mosaic.engine import Handle
from mosaic.engine.streams.order import Orders
from mosaic.engine.streams.tensor import StreamTensor
from mosaic.errors import ModuleContractError


@contextmanager
def placed(model: nn.Module) -> Iterator[tuple[Handle, FakeBackend]]:
    with colocated(model, pair_batch(), SIDE_BY_SIDE) as (handle, backend):
        yield handle, backend


# Computed again in a backward.


class Recomputed(TwoTowers):
    """Needs both towers again in the backward of an operator of the user's own stream."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.both, x, y, use_reentrant=False)

    def both(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.left(x * 2) @ self.right(y * 2).T


def test_what_is_computed_again_runs_on_its_lane_behind_what_it_reads_and_before_what_reads_it():
    model = Recomputed()
    with placed(model) as (handle, backend):
        loss = model(*pair_batch()).sum()
        backend.api.launches.clear()
        loss.backward()
        stem = next(launch for launch in backend.api.launches if launch.name == "aten.mul.Tensor")
        assert stem.stream == 0
        for name in ("left", "right"):
            again = [launch for launch in backend.launches_of(handle, name) if launch.name == "aten.addmm.default"]
            assert len(again) == 2
            assert all(launch.is_after(stem) for launch in again)


def test_the_result_of_a_call_in_a_backward_may_be_let_go_while_the_backward_uses_it():
    model = TwoTowers()
    with placed(model) as (handle, backend):
        x, y = pair_batch()
        loss = model(x, y).sum()

        def hook(_: torch.Tensor) -> None:
            model.left(x) * 2
            with backend.api.use_stream(lane_of(handle, "left").stream):
                torch.ones(2)  # may be given the result's memory

        loss.register_hook(hook)
        loss.backward()


# Failing.


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = tower()
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layers(x)
        if self.fails:
            raise ValueError("told to fail")
        return made


@pytest.mark.parametrize("caught", [True, False], ids=["and the model goes on", "and the model with it"])
def test_parameters_may_be_written_to_after_a_module_failed(caught: bool):
    class Catching(TwoTowers):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            try:
                return self.left(x) @ self.right(y).T
            except ValueError:
                if not caught:
                    raise
            return y * 2

    model = Catching(Fragile())
    with placed(model):
        model.left.fails = True
        try:
            model(*pair_batch())
        except ValueError:
            assert not caught
        with torch.no_grad():
            for parameter in model.left.parameters():
                parameter.mul_(2)


def test_parameters_may_be_written_to_after_the_model_failed_between_modules():
    class Failing(TwoTowers):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            mixed = self.left(x) @ self.right(y).T
            if not self.training:
                self.left(x)
                raise ValueError("told to fail")
            return mixed

    model = Failing()
    with placed(model):
        with pytest.raises(ValueError, match="told to fail"):
            model.eval()(*pair_batch())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)


def test_a_step_after_a_backward_that_failed_waits_for_what_lanes_were_given():
    model = TwoTowers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with placed(model):
        ended: list[torch.Tensor] = []

        def fail_last(parameter: torch.Tensor) -> None:
            ended.append(parameter)
            if len(ended) == len(list(model.left.parameters())):
                raise ValueError("told to fail")

        hooks = [one.register_post_accumulate_grad_hook(fail_last) for one in model.left.parameters()]
        with pytest.raises(ValueError, match="told to fail"):
            model(*pair_batch()).sum().backward()
        for hook in hooks:
            hook.remove()
        optimizer.step()


# Arguments written to, and views of arguments.


class Writing(nn.Module):
    """Writes into its argument from some time on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = tower()
        self.writes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.add_(1) if self.writes else x)


def test_the_user_s_stream_waits_for_what_a_module_wrote_into_a_tensor_of_its():
    class Rereading(TwoTowers):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            found = self.left(x)
            return (x * 2).sum() * (found @ self.right(y).T)

    model = Rereading(Writing())
    with placed(model), torch.no_grad():
        model.left.writes = True
        model(*pair_batch())


class Cut(nn.Module):
    """Returns a part of its argument, after work on it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = tower()
        self.cuts = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layers(x)
        return x[:, :4] if self.cuts else made


def test_the_user_s_stream_waits_for_a_module_that_returns_a_view_of_a_tensor_of_its():
    class Overwriting(TwoTowers):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            found = self.left(x)
            if self.left.cuts:
                assert type(found) is torch.Tensor
                found.mul_(2)
            return self.right(y) * found.sum()

    model = Overwriting(Cut())
    with placed(model), torch.no_grad():
        model.left.cuts = True
        model(*pair_batch())


def test_a_view_of_another_lane_s_tensor_stays_with_that_lane_behind_the_module_that_returned_it():
    seen: list[Any] = []

    class Chained(TwoTowers):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            left = self.left(x)[:, :8] * 1
            right = self.right(left)
            if self.right.cuts:
                right.mul_(2)
                seen.append((left.order, right.order))
            return (left.sum() * right).sum()

    model = Chained(right=Cut())
    stages = [{"left": 1}, {"right": 2}]
    with colocated(model, pair_batch(), stages, num_slots=3) as (handle, backend), torch.no_grad():
        model.right.cuts = True
        model(*pair_batch())
        ((left, right),) = seen
        assert right is left
        (scaled,) = [one for one in backend.launches_of(handle, "left") if one.name == "aten.mul_.Tensor"]
        assert scaled.is_after([one for one in backend.launches_of(handle, "right") if "addmm" in one.name][-1])


def test_glue_that_fails_on_a_lane_leaves_the_user_s_stream_current():
    model = TwoTowers()
    with placed(model) as (_, backend):
        left = model.left(pair_batch()[0])
        assert isinstance(left, StreamTensor)
        with pytest.raises(RuntimeError):
            left @ left
        assert backend.api.current_stream() == backend.api.main


def test_a_copy_to_another_device_is_made_on_the_user_s_stream():
    model = TwoTowers()
    with placed(model) as (handle, backend):
        left = model.left(pair_batch()[0])
        assert left.to("meta").device.type == "meta"
        copied = backend.api.launches[-1]
        assert copied.stream == 0
        assert copied.is_after(backend.launches_of(handle, "left")[-1])


def test_the_user_s_stream_is_told_of_a_changed_input_when_it_is_made_to_wait_for_its_reader():
    runtime = FakeStreams()
    streams = {(0,): (runtime.new_stream(), 8)}
    with runtime.watching(), StreamLanes(runtime, streams, lambda: None) as lanes:
        order = Orders(lanes).of(lanes.lane((0,)))
        read = torch.ones(2)
        point = order.point()
        order.note_read(read, point, "'left'")
        read.add_(1)
        with pytest.raises(ModuleContractError, match="an input of 'left' was written to"):
            order.hold_user(runtime.main, point)


def lane_of(handle: Handle, module: str) -> Any:
    assert handle._executor is not None
    return handle._executor.lanes.lane(handle.plan.placement(module).slots)
