"""Modules as CUDA graphs on a real GPU: random numbers, refusals, and kernels that stay in their partitions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import nn

from bench.gpu.ladder.streams import SmProbe, sm_ids
from mosaic.backends.cuda.backend import CudaBackend
from mosaic.backends.cuda.pool import CDP_SMS
from mosaic.backends.streams.lanes import StreamLanes
from mosaic.engine.calls.placed_module import PlacedModule
from mosaic.engine.graphs import ModuleGraphs

pytestmark = pytest.mark.gpu

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
"""Of float32 results: a graph sums a parameter's uses apart, and libraries may choose other kernels by stream."""


@pytest.fixture(scope="module")
def lanes(cuda_backend: CudaBackend) -> Iterator[StreamLanes]:
    half = cuda_backend.device.num_slots // 2
    opened = cuda_backend.open_lanes([tuple(range(half)), tuple(range(half, 2 * half))])
    assert isinstance(opened, StreamLanes)
    with opened:
        yield opened


@pytest.fixture
def graphs(lanes: StreamLanes) -> Iterator[ModuleGraphs]:
    made = ModuleGraphs(lanes.api)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


Call = Callable[[str, nn.Module, torch.Tensor], Any]


def by_graphs(graphs: ModuleGraphs, lanes: StreamLanes) -> Call:
    one, other = lanes_of(lanes)

    def made(name: str, module: nn.Module, x: torch.Tensor) -> Any:
        lane = other if name == "right" else one
        site = PlacedModule(name, module, lane)
        return lane.launch(lambda: graphs.call(site, module, x)).wait()

    return made


def lanes_of(lanes: StreamLanes) -> list[Any]:
    slots = sorted(lanes._lanes)
    return [lanes.lane(slots[0]), lanes.lane(slots[1])]


def test_capturing_leaves_the_random_numbers_where_they_were(graphs: ModuleGraphs, lanes: StreamLanes):
    model, call = nn.Dropout(0.5).cuda(), by_graphs(graphs, lanes)
    x = torch.ones(4096, device="cuda")
    torch.manual_seed(3)
    expected = [model(x) for _ in range(3)]
    torch.manual_seed(3)
    for one in expected:
        assert torch.equal(call("drop", model, x), one)
    assert (graphs.num_replays == 3) is lanes.api.draws_apart


class Doing(nn.Module):
    """Runs a function, and a layer."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(64, 64).cuda(), function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.layer(x))


def test_what_waits_for_the_device_is_refused_and_everything_else_goes_on(graphs: ModuleGraphs, lanes: StreamLanes):
    call, model, x = by_graphs(graphs, lanes), nn.Linear(64, 64).cuda(), torch.randn(8, 64, device="cuda")

    def waits(value: torch.Tensor) -> torch.Tensor:
        return value * value.sum().item()

    def copies(value: torch.Tensor) -> torch.Tensor:
        return value * torch.ones(64).to(value.device)

    def synchronizes(value: torch.Tensor) -> torch.Tensor:
        torch.cuda.current_stream().synchronize()
        return value * 2

    with torch.no_grad():
        for number, function in enumerate((waits, copies, synchronizes)):
            doing, name = Doing(function), function.__name__
            torch.testing.assert_close(call(name, doing, x), doing(x), **TOLERANCE)
            assert name in {module for module, _ in graphs.eager_calls}
            torch.testing.assert_close(call("right", model, x), model(x), **TOLERANCE)
            assert graphs.num_replays == number + 1
            assert torch.dropout(x, 0.5, train=True).shape == x.shape
            assert _bytes_kept_after_use_on(lanes.api.new_stream()) == 0


@torch.no_grad()
def test_other_threads_may_wait_for_the_device_while_a_call_is_tried(graphs: ModuleGraphs, lanes: StreamLanes):
    x = torch.randn(8, 64, device="cuda")
    asked: SimpleQueue[float] = SimpleQueue()

    def beside(value: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=lambda: asked.put(torch.ones(4, device="cuda").sum().item()))
        thread.start()
        thread.join()
        return value

    doing = Doing(beside)
    result = by_graphs(graphs, lanes)("beside", doing, x)
    assert not graphs.eager_calls
    assert asked.get_nowait() == 4.0
    torch.testing.assert_close(result, doing.layer(x), **TOLERANCE)


def _bytes_kept_after_use_on(stream: torch.cuda.Stream) -> int:
    before = _active_bytes()
    torch.empty(1 << 20, device="cuda").record_stream(stream)
    return _active_bytes() - before


def _active_bytes() -> int:
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")  # the allocator looks for what has ended
    active: int = torch.cuda.memory_stats()["active_bytes.all.current"]
    return active


@torch.no_grad()
def test_captured_kernels_stay_in_the_partitions_of_their_lanes(graphs: ModuleGraphs, lanes: StreamLanes):
    probe = SmProbe.of(lanes.api.device)  # torch's own kernels are loaded into the primary context
    call, x = by_graphs(graphs, lanes), torch.zeros(8, 64, device="cuda")

    def note(value: torch.Tensor) -> torch.Tensor:
        seen = torch.zeros(32, dtype=torch.int32, device="cuda")
        probe.launch(seen.data_ptr(), seen.numel(), torch.cuda.current_stream().cuda_stream)
        return seen

    modules = {name: Doing(note) for name in ("left", "right")}
    for number in range(1, 3):
        seen = [set(sm_ids(call(name, module, x).tolist())) for name, module in modules.items()]
        assert not graphs.eager_calls
        assert graphs.num_replays == 2 * number
        for lane, sms in zip(lanes_of(lanes), seen, strict=True):
            assert 0 < len(sms) <= lane.num_sms + CDP_SMS
        assert len(seen[0] & seen[1]) <= CDP_SMS


def test_a_module_s_memory_is_given_back_when_graphs_close(lanes: StreamLanes):
    model, x = Doing(nn.functional.gelu), torch.randn(512, 64, device="cuda")
    used = []
    for _ in range(3):
        graphs = ModuleGraphs(lanes.api)
        by_graphs(graphs, lanes)("left", model, x).sum().backward()
        model.zero_grad()
        graphs.close()
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated())
    assert used[2] <= used[0] * 1.1
