"""Two lanes of the fake runtime, and loops that run branches on them by graphs or plainly."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from engine_cases import Record, assert_same
from fake_streams import FakeStreams
from torch import nn

from mosaic.backends.streams.lanes import StreamLane, StreamLanes
from mosaic.engine.graphs import Eager, StageBranch, StageGraphs


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums in one order, so that results can be compared bit for bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass
class Bench:
    """A fake device with lanes, and the stage graphs on it."""

    runtime: FakeStreams
    lanes: StreamLanes
    graphs: StageGraphs
    lane_of: dict[str, StreamLane] = field(default_factory=dict)

    def lane(self, name: str) -> StreamLane:
        if name not in self.lane_of:
            self.lane_of[name] = self.lanes.lane((len(self.lane_of) % 3,))
        return self.lane_of[name]

    def branch(self, name: str, module: Any, *args: Any, **kwargs: Any) -> StageBranch:
        owner = module if isinstance(module, nn.Module) else getattr(module, "__self__", None)
        return StageBranch(name=name, run=module, args=args, kwargs=kwargs, lane=self.lane(name), module=owner)

    def run(self, *branches: StageBranch, stage: str = "stage") -> list[Any]:
        """Results of a stage; what graphs leave to their caller runs on its lane."""
        results = self.graphs.run(stage, branches)
        return [self.finish(branch, result) for branch, result in zip(branches, results, strict=True)]

    def call(self, name: str, module: Any, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.branch(name, module, *args, **kwargs), stage=name)[0]

    @staticmethod
    def finish(branch: StageBranch, result: Any) -> Any:
        if not isinstance(result, Eager):
            return result
        return branch.lane.launch(lambda: branch.run(*branch.args, **branch.kwargs), timed=False).wait()


@contextmanager
def bench(**options: Any) -> Iterator[Bench]:
    """Opens a fake device under its watch: launches in a wrong order raise."""
    runtime = FakeStreams()
    streams = {(slot,): (runtime.external_stream(10 + slot), 8) for slot in range(3)}
    streams[0, 1] = (runtime.external_stream(20), 16)
    with runtime.watching(), StreamLanes(runtime, streams, lambda: None) as lanes:
        graphs = StageGraphs(runtime, **options)
        try:
            yield Bench(runtime, lanes, graphs)
        finally:
            graphs.close()


Step = Callable[[nn.Module, Callable[..., list[Any]], int], torch.Tensor]
"""Computes a loss; gets the model, a function that runs named calls together, and the number of the step."""


def train(
    model: nn.Module,
    step: Step,
    together: Callable[..., list[Any]],
    *,
    steps: int = 5,
    every: int = 1,
    none: bool = True,
) -> Record:
    """Trains, stepping the optimizer ``every`` so many losses; notes losses, gradients, parameters and buffers."""
    record = Record()
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for number in range(steps):
        loss = step(model, together, number)
        loss.backward()
        record.note(loss, torch.rand(1))
        record.note_model(model, optimizer)
        if (number + 1) % every == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=none)
    record.note_model(model, optimizer)
    return record


def train_both(
    make: Callable[[], nn.Module], step: Step, *, options: Any = None, **loop: Any
) -> tuple[Bench, nn.Module]:
    """Trains plainly and by graphs, holds them equal bit for bit; returns the bench, closed, and the model."""
    torch.manual_seed(0)
    plain = make()
    twin = copy.deepcopy(plain)
    expected = train(plain, step, plainly, **loop)
    with bench(**(options or {})) as ours:
        found = train(twin, step, by_graphs(ours), **loop)
    assert_same(expected, found)
    return ours, twin


def plainly(**calls: Sequence[Any]) -> list[Any]:
    return [function(*args) for function, *args in calls.values()]


def by_graphs(ours: Bench) -> Callable[..., list[Any]]:
    def together(**calls: Sequence[Any]) -> list[Any]:
        return ours.run(*(ours.branch(name, function, *args) for name, (function, *args) in calls.items()))

    return together
