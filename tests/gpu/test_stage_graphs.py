"""Stage graphs on a real GPU: the same numbers as eager calls, and kernels that stay in their partitions."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from bench.gpu.ladder.streams import SmProbe, sm_ids
from mosaic.backends.cuda.backend import CudaBackend
from mosaic.backends.cuda.overlap import CDP_SMS
from mosaic.backends.streams.lanes import StreamLanes
from mosaic.engine.graphs import Eager, StageBranch, StageGraphs
from mosaic.engine.graphs.rehearsal import NUM_TRIALS

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
def graphs(lanes: StreamLanes) -> Iterator[StageGraphs]:
    made = StageGraphs(lanes.api)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


class Block(nn.Module):
    """Attention, a wide layer, dropout and batch statistics."""

    def __init__(self, width: int = 64, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True, dropout=dropout)
        self.wide = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * width, width)
        )
        self.norm, self.batch = nn.LayerNorm(width), nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = x + self.attention(x, x, x, need_weights=False)[0]
        hidden = self.norm(hidden + self.wide(hidden))
        return {"hidden": hidden, "pooled": self.batch(hidden.mean(1))}


class Pair(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.left, self.right, self.head = Block(dropout=dropout), Block(dropout=dropout), nn.Linear(64, 8)


Together = Callable[[Pair, torch.Tensor, torch.Tensor], list[Any]]


def plainly(model: Pair, x: torch.Tensor, y: torch.Tensor) -> list[Any]:
    return [model.left(x), model.right(y)]


def by_graphs(graphs: StageGraphs, lanes: StreamLanes, *, apart: bool = False) -> Together:
    one, other = lanes_of(lanes)

    def together(model: Pair, x: torch.Tensor, y: torch.Tensor) -> list[Any]:
        branches = [
            StageBranch(name="left", run=model.left, args=(x,), kwargs={}, lane=one, module=model.left),
            StageBranch(name="right", run=model.right, args=(y,), kwargs={}, lane=other, module=model.right),
        ]
        results = (
            [graphs.run(branch.name, [branch])[0] for branch in branches] if apart else graphs.run("pair", branches)
        )
        return [finish(branch, result) for branch, result in zip(branches, results, strict=True)]

    return together


def finish(branch: StageBranch, result: Any) -> Any:
    """What graphs leave to their caller runs on its lane."""
    if not isinstance(result, Eager):
        return result
    return branch.lane.launch(lambda: branch.run(*branch.args, **branch.kwargs), timed=False).wait()


def lanes_of(lanes: StreamLanes) -> list[Any]:
    slots = sorted(lanes._lanes)
    return [lanes.lane(slots[0]), lanes.lane(slots[1])]


def train(model: Pair, together: Together, steps: int = 5) -> list[torch.Tensor]:
    torch.manual_seed(11)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    noted = []
    for _ in range(steps):
        x, y = (torch.randn(16, 12, 64, generator=generator).cuda() for _ in range(2))
        left, right = together(model, x, y)
        loss = (model.head(left["pooled"] * right["pooled"]) * left["hidden"].mean()).square().mean()
        loss.backward()
        noted += [loss.detach().clone(), torch.rand(4, device="cuda")]
        noted += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return [value.cpu() for value in (*noted, *model.state_dict().values())]


@pytest.mark.parametrize("apart", [False, True], ids=["one graph", "one graph each"])
@pytest.mark.parametrize("dropout", [0.0, 0.3], ids=["plain", "dropout"])
def test_five_steps_by_graphs_equal_five_plain_ones(
    graphs: StageGraphs, lanes: StreamLanes, dropout: float, apart: bool
):
    torch.manual_seed(0)
    model = Pair(dropout).cuda()
    twin = copy.deepcopy(model)
    expected = train(model, plainly)
    found = train(twin, by_graphs(graphs, lanes, apart=apart))
    captured = not dropout or lanes.api.draws_apart
    assert list(graphs.refused) == ([] if captured else ["left", "right"])
    assert all("it draws random numbers" in reason for reason in graphs.refused.values())
    assert graphs.num_replays == (10 if apart else 5) * captured
    assert len(expected) == len(found)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, **TOLERANCE)


def test_capturing_leaves_the_random_numbers_where_they_were(graphs: StageGraphs, lanes: StreamLanes):
    model, lane = nn.Dropout(0.5).cuda(), lanes_of(lanes)[0]
    x = torch.ones(4096, device="cuda")
    torch.manual_seed(3)
    expected = [model(x) for _ in range(3)]
    torch.manual_seed(3)
    for one in expected:
        branch = StageBranch(name="drop", run=model, args=(x,), kwargs={}, lane=lane, module=model)
        (found,) = graphs.run("drop", [branch])
        assert isinstance(found, Eager) is not lanes.api.draws_apart
        assert torch.equal(model(x) if isinstance(found, Eager) else found, one)


def test_what_waits_for_the_device_is_refused_and_everything_else_goes_on(graphs: StageGraphs, lanes: StreamLanes):
    one, other = lanes_of(lanes)
    model = nn.Linear(64, 64).cuda()
    x = torch.randn(8, 64, device="cuda")

    def waits(value: torch.Tensor) -> torch.Tensor:
        return value * value.sum().item()

    def copies(value: torch.Tensor) -> torch.Tensor:
        return value * torch.ones(64).to(value.device)

    def synchronizes(value: torch.Tensor) -> torch.Tensor:
        torch.cuda.current_stream().synchronize()
        return value * 2

    for function in (waits, copies, synchronizes):
        name = function.__name__
        branches = [
            StageBranch(name=name, run=function, args=(x,), kwargs={}, lane=one, module=None),
            StageBranch(name="good", run=model, args=(x,), kwargs={}, lane=other, module=model),
        ]
        bad, good = graphs.run(name, branches)
        assert isinstance(bad, Eager)
        torch.testing.assert_close(good, model(x), **TOLERANCE)
        assert name in graphs.refused
        assert torch.dropout(x, 0.5, train=True).shape == x.shape
        assert _bytes_kept_after_use_on(lanes.api.new_stream()) == 0


@torch.no_grad()
def test_other_threads_may_wait_for_the_device_while_a_call_is_tried(graphs: StageGraphs, lanes: StreamLanes):
    lane, model, x = lanes_of(lanes)[0], nn.Linear(64, 64).cuda(), torch.randn(8, 64, device="cuda")
    asked: list[float] = []

    def beside(value: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=lambda: asked.append(torch.ones(4, device="cuda").sum().item()))
        thread.start()
        thread.join()
        return model(value)

    (result,) = graphs.run(
        "beside", [StageBranch(name="beside", run=beside, args=(x,), kwargs={}, lane=lane, module=model)]
    )
    assert graphs.refused == {}
    assert asked == [4.0] * (NUM_TRIALS + 1)
    torch.testing.assert_close(result, model(x), **TOLERANCE)


def _bytes_kept_after_use_on(stream: torch.cuda.Stream) -> int:
    before = torch.cuda.memory_stats()["active_bytes.all.current"]
    torch.empty(1 << 20, device="cuda").record_stream(stream)
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")  # the allocator looks for what has ended
    return torch.cuda.memory_stats()["active_bytes.all.current"] - before


def test_captured_kernels_stay_in_the_partitions_of_their_lanes(graphs: StageGraphs, lanes: StreamLanes):
    probe = SmProbe.of(lanes.api.device)  # torch's own kernels are loaded into the primary context
    one, other = lanes_of(lanes)

    def note(blank: torch.Tensor) -> torch.Tensor:
        found = torch.zeros_like(blank)
        probe.launch(found.data_ptr(), found.numel(), torch.cuda.current_stream().cuda_stream)
        return found

    blank = torch.zeros(32, dtype=torch.int32, device="cuda")
    branches = [
        StageBranch(name=name, run=note, args=(blank,), kwargs={}, lane=lane, module=None)
        for name, lane in (("one", one), ("other", other))
    ]
    for number in range(1, 3):
        seen = [set(sm_ids(found.tolist())) for found in graphs.run("probe", branches)]
        assert graphs.refused == {}
        assert graphs.num_replays == number
        for lane, found in zip((one, other), seen, strict=True):
            assert 0 < len(found) <= lane.num_sms + CDP_SMS
        assert len(seen[0] & seen[1]) <= CDP_SMS


def test_dropped_graphs_give_their_memory_back(lanes: StreamLanes):
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda()
    lane = lanes_of(lanes)[0]
    graphs = StageGraphs(lanes.api, max_graphs=1)
    used = []
    for rows in (512, 256, 512, 256):
        x = torch.randn(rows, 1024, device="cuda")
        branch = StageBranch(name="mlp", run=model, args=(x,), kwargs={}, lane=lane, module=model)
        graphs.run("mlp", [branch])[0].sum().backward()
        model.zero_grad()
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated())
    graphs.close()
    assert used[2] <= used[0] * 1.1
    assert used[3] <= used[1] * 1.1
