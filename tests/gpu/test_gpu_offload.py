"""Activations that wait in pinned memory: equal gradients, and their memory on the GPU is free meanwhile."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from mosaic.parts.chunk_call import run_layer
from mosaic.parts.offload import Offload, copies_for

pytestmark = pytest.mark.gpu


def test_gradients_are_equal_and_activations_leave_the_gpu():
    torch.manual_seed(0)
    plain = nn.ModuleList(nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(3)).cuda()
    stored, x = copy.deepcopy(plain), torch.randn(256, 128, device="cuda")
    kept_bytes = {}
    for strategy, layers in (("keep", plain), ("offload", stored)):
        offload, result, before = Offload(copies_for(x.device)), x, torch.cuda.memory_allocated()
        for layer in layers:
            result = run_layer(strategy, layer, (result,), {}, offload=offload)
        torch.cuda.synchronize()
        kept_bytes[strategy] = torch.cuda.memory_allocated() - before
        offload.prefetch()
        result.square().sum().backward()
    torch.cuda.synchronize()
    for theirs, own in zip(plain.parameters(), stored.parameters(), strict=True):
        assert torch.equal(theirs.grad, own.grad)
    assert kept_bytes["offload"] < kept_bytes["keep"] / 2
