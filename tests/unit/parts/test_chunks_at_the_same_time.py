"""Two threads that call chunks of one model at the same time."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from chained_chunks import chunks_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from mosaic.parts.finding.find import find_split
from mosaic.parts.parted_model import PartedModel


class Watched(nn.Module):
    """Looks at its own weight for a while, as soon as another thread has asked for a chunk behind it."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.linear = nn.Linear(columns, 6)
        self.entered, self.asked = threading.Event(), threading.Event()
        self.is_watching = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_watching and not isinstance(x, FakeTensor):
            self.entered.set()
            assert self.asked.wait(60)
            for _ in range(2_000):
                assert not isinstance(self.linear.weight, FakeTensor)
                self.linear(x)
        return self.linear(x)


class Widening(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Watched(4), Watched(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_what_a_layer_returns_is_not_worked_out_while_another_thread_computes_with_its_weights():
    model = Widening()
    watched = model.layers[0]
    chunks = chunks_of("model[0:1/2]", "model[1:2/2]")
    parted = PartedModel(model, find_split(model, {"x": torch.randn(2, 4)}), chunks)
    watched.is_watching = True
    kwargs = {"x": torch.randn(7, 4)}  # rows that nobody has seen

    def second() -> torch.Tensor:
        assert watched.entered.wait(60)
        watched.asked.set()
        return parted.forward(1, kwargs, {"model": (torch.ones(7, 6),)})

    with ThreadPoolExecutor(2) as threads:
        first, other = threads.submit(parted.forward, 0, kwargs), threads.submit(second)
    assert torch.equal(first.result()["model"][0], watched.linear(kwargs["x"]))
    assert torch.equal(other.result(), model.layers[1](torch.ones(7, 6)))
    assert not [name for name, module in model.named_modules() if "forward" in module.__dict__]
