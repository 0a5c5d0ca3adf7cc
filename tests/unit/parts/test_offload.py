"""Activations in the host's memory: equal gradients, fetched a layer ahead, and no layer that writes into them."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from mosaic.errors import ModuleContractError
from mosaic.parts.chunk_call import run_layer
from mosaic.parts.offload import Offload, ThreadCopies


class Noted(ThreadCopies):
    """Copies that say which layer they are of, by the width of the tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[tuple[str, int]] = []

    def store(self, tensor: torch.Tensor) -> Any:
        self.notes.append(("store", tensor.shape[-1]))
        return super().store(tensor)

    def fetch(self, stored: Any) -> Any:
        self.notes.append(("fetch", stored.result().shape[-1]))
        return super().fetch(stored)

    def drain(self) -> None:
        self._thread.submit(int).result()

    def wait(self, fetched: Any) -> torch.Tensor:
        result = super().wait(fetched)
        self.notes.append(("wait", result.shape[-1]))
        return result


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.LayerNorm(width), nn.Dropout(0.3), nn.Linear(width, 8))
        for width in (32, 48, 64)
    ]


def test_gradients_are_equal_and_each_layer_is_fetched_while_the_one_behind_it_runs():
    plain, stored = layers(), layers()
    copies = Noted()
    offload = Offload(copies)
    for own in (plain, stored):
        torch.manual_seed(1)
        x = torch.randn(64, 8)
        for layer in own:
            x = run_layer("offload" if own is stored else "keep", layer, (x,), {}, offload=offload)
        if own is stored:
            assert not any(what == "fetch" for what, _ in copies.notes)
            offload.prefetch()
            assert copies.notes[-1] == ("fetch", 64)
        x.square().sum().backward()
    for one, other in zip(plain, stored, strict=True):
        for theirs, own in zip(one.parameters(), other.parameters(), strict=True):
            assert torch.equal(theirs.grad, own.grad)
    notes = [note for note in copies.notes if note[1] > 8]
    for before, behind in ((48, 64), (32, 48)):
        assert notes.index(("fetch", before)) < notes.index(("wait", behind)) < notes.index(("wait", before))


def test_saved_tensors_are_free_once_the_layer_has_ended_and_weights_stay_where_they_are():
    alive: dict[str, bool] = {}
    for strategy in ("keep", "offload"):
        copies, layer, x = Noted(), layers()[0], torch.randn(64, 8)
        activations: list[weakref.ref[torch.Tensor]] = []
        layer[1].register_forward_hook(lambda *call, seen=activations: seen.append(weakref.ref(call[-1])))
        result = run_layer(strategy, layer, (x,), {}, offload=Offload(copies))
        copies.drain()
        alive[strategy] = activations[0]() is not None
        assert ("store", 64) not in copies.notes  # the weights are (32, 8) and (8, 32), the batch is 64
        result.sum().backward()
    assert alive == {"keep": True, "offload": False}


def test_a_layer_that_writes_into_what_its_backward_needs_is_refused():
    def layer(x: torch.Tensor) -> torch.Tensor:
        result = x.exp()
        return result.mul_(2)

    with pytest.raises(ModuleContractError, match="writes into a tensor that its backward needs"):
        Offload(ThreadCopies()).run(layer, (torch.randn(64, 8, requires_grad=True),), {})
