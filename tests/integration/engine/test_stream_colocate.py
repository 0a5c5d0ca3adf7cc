"""Refusals of ``mosaic.colocate`` where CUDA graphs are asked for."""

from __future__ import annotations

import pytest
import torch
from engine_cases import Trap, TwoTowers, pair_batch
from stream_cases import FakeBackend

import mosaic
from mosaic.errors import UnsupportedModelError


def towers() -> TwoTowers:
    torch.manual_seed(0)
    return TwoTowers(Trap(), Trap())


def test_graphs_on_the_host_are_refused():
    with pytest.raises(ValueError, match="cuda_graphs=True"):
        mosaic.colocate(towers(), sample=pair_batch(), options=mosaic.Options(cuda_graphs=True))


def test_a_branch_that_is_compiled_with_graphs_of_the_compiler_s_is_refused():
    model = towers()
    model.left.compile(mode="reduce-overhead")
    with pytest.raises(UnsupportedModelError, match=r"'left' is compiled with CUDA graphs .* without a mode"):
        mosaic.colocate(model, sample=pair_batch(), backend=FakeBackend())
