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
from mosaic.parts.weights_in_use import WeightsInUse


class Watched(nn.Module):
    """Looks at its own weight for a while, as soon as another thread has asked for a chunk behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.entered, self.asked = threading.Event(), threading.Event()
        self.asked.set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, FakeTensor):
            return self.linear(x)
        self.entered.set()
        assert self.asked.wait(60)
        for _ in range(2_000):
            assert not isinstance(self.linear.weight, FakeTensor)
            made = self.linear(x)
        return made


class TwoLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([Watched()])
        self.decoder = nn.ModuleList([nn.Linear(6, 6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.encoder, *self.decoder):
            x = layer(x)
        return x


def test_what_a_layer_returns_is_not_worked_out_while_another_thread_computes_with_its_weights():
    model = TwoLists()
    watched = model.encoder[0]
    parted = PartedModel(
        model, find_split(model, {"x": torch.randn(2, 4)}), chunks_of("encoder[0:1/1]", "decoder[0:1/1]")
    )
    watched.entered.clear()
    watched.asked.clear()
    kwargs = {"x": torch.randn(7, 4)}  # rows that nobody has seen

    def second() -> torch.Tensor:
        assert watched.entered.wait(60)
        watched.asked.set()
        return parted.forward(1, kwargs, {"encoder": (torch.ones(7, 6),)})

    with ThreadPoolExecutor(2) as threads:
        first, other = threads.submit(parted.forward, 0, kwargs), threads.submit(second)
        assert torch.equal(first.result()["encoder"][0], watched.linear(kwargs["x"]))
        assert torch.equal(other.result(), model.decoder[0](torch.ones(7, 6)))
    assert not [name for name, module in model.named_modules() if "forward" in module.__dict__]


def test_a_thread_that_uses_weights_may_begin_to_again_while_another_waits_to_replace_them():
    in_use, asked = WeightsInUse(), threading.Event()
    done: list[str] = []

    def replace() -> None:
        asked.set()
        with in_use.alone():
            done.append("replaced")

    with ThreadPoolExecutor(1) as threads:
        with in_use.shared():
            waiting = threads.submit(replace)
            assert asked.wait(60)
            with in_use.shared():
                done.append("used")
        waiting.result()
    assert done == ["used", "replaced"]
