"""Two lanes of the fake runtime, and loops that run modules on them as CUDA graphs or plainly."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from engine_cases import Record, assert_same
from fake_streams import FakeStreams
from torch import nn

from mosaic.backends.streams.lanes import StreamLane, StreamLanes
from mosaic.engine.calls.placed_module import PlacedModule
from mosaic.engine.graphs import ModuleGraphs


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums in one order, so that results can be compared bit for bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass
class Bench:
    """A fake device with lanes, and the graphs on it."""

    runtime: FakeStreams
    lanes: StreamLanes
    graphs: ModuleGraphs
    lane_of: dict[str, StreamLane] = field(default_factory=dict)

    def lane(self, name: str) -> StreamLane:
        if name not in self.lane_of:
            self.lane_of[name] = self.lanes.lane((len(self.lane_of) % 3,))
        return self.lane_of[name]

    def call(self, name: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        lane = self.lane(name)
        site = PlacedModule(name, module, lane)
        try:
            return lane.launch(lambda: self.graphs.call(site, module, *args, **kwargs)).wait()
        except BaseException:
            self.lanes.join()  # before its inputs are let go, which it may still read
            raise


@contextmanager
def bench() -> Iterator[Bench]:
    """Opens a fake device under its watch: launches in a wrong order raise."""
    runtime = FakeStreams()
    streams = {(slot,): (runtime.external_stream(10 + slot), 8) for slot in range(3)}
    with runtime.watching(), StreamLanes(runtime, streams, lambda: None) as lanes:
        graphs = ModuleGraphs(runtime)
        try:
            yield Bench(runtime, lanes, graphs)
        finally:
            graphs.close()


Call = Callable[..., Any]
"""Makes a named call of a module."""

Step = Callable[[Any, Call, int], torch.Tensor]
"""Computes a loss from the model, ``Call`` and the number of the step."""


def train(model: nn.Module, step: Step, call: Call, *, steps: int = 5) -> Record:
    """Trains; notes losses, gradients, parameters and buffers."""
    record = Record()
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for number in range(steps):
        loss = step(model, call, number)
        loss.backward()
        record.note(loss, torch.rand(1))
        record.note_model(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    record.note_model(model, optimizer)
    return record


def train_both(make: Callable[[], nn.Module], step: Step, **loop: Any) -> Bench:
    """Trains plainly and by graphs and holds them equal bit for bit; returns the bench, closed."""
    torch.manual_seed(0)
    plain = make()
    twin = copy.deepcopy(plain)
    expected = train(plain, step, lambda _, module, *args, **kwargs: module(*args, **kwargs), **loop)
    with bench() as ours:
        trained = train(twin, step, ours.call, **loop)
    assert_same(expected, trained)
    return ours
