"""Single calls on lanes: computed again in a backward, failing, writing into arguments, returning views of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from engine_cases import SIDE_BY_SIDE, Doing, Glued, TwoTowers, pair_batch
from stream_cases import FakeBackend, colocated
from torch import nn
from torch.utils.checkpoint import checkpoint

from mosaic.engine import Handle


@contextmanager
def placed(model: nn.Module) -> Iterator[tuple[Handle, FakeBackend]]:
    with colocated(model, pair_batch(), SIDE_BY_SIDE) as (handle, backend):
        yield handle, backend


# Computed again in a backward.


def recomputed(self: Glued, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Needs both towers again in the backward of an operator of the user's own stream."""
    return checkpoint(lambda x, y: self.left(x * 2) @ self.right(y * 2).T, x, y, use_reentrant=False)


def test_what_is_computed_again_runs_on_its_lane_behind_what_it_reads_and_before_what_reads_it():
    model = Glued(recomputed)
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
