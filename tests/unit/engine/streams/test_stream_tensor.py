"""Tensors of lanes: what follows, what joins, and which waits there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.dlpack
from engine_cases import SIDE_BY_SIDE, TwoTowers, pair_batch
from stream_cases import colocated
from torch import nn

from mosaic.engine.streams.tensor import StreamTensor, count_foreach_writes


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
    count_foreach_writes.__wrapped__()
    torch._foreach_lerp_([weight], [weight], 0.5)
    torch._foreach_zero_([weight])
    assert weight._version == 2
    assert not weight.any()


def test_a_capsule_of_a_lane_s_tensor_joins_the_lane():
    model = TwoTowers()
    with colocated(model, pair_batch(), SIDE_BY_SIDE) as (handle, backend), torch.no_grad():
        left, _ = results(model)
        torch.from_dlpack(torch.utils.dlpack.to_dlpack(left)) + 1
        assert backend.api.launches[-1].stream == 0
        assert backend.api.launches[-1].is_after(backend.launches_of(handle, "left")[-1])
