"""``mosaic.stage`` on streams: with and without CUDA graphs, on the fake runtime."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from engine_cases import Record, assert_same, pair_batch, tower
from fake_streams import FakeStreams
from stage_graph_cases import one_thread  # noqa: F401
from torch import nn

import mosaic
from mosaic.backends.streams.lanes import StreamLanes
from mosaic.device import Device
from mosaic.engine.stage import _pool
from mosaic.errors import BackendUnavailableError, InvalidPlanError

pytestmark = pytest.mark.usefixtures("one_thread")

QUOTAS = {"left": 2, "right": 1}


@dataclass(eq=False)
class StreamBackend:
    """Lanes on the fake runtime, four slots of 8 SMs."""

    runtime: FakeStreams
    name: str = "cuda"
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.device = Device(name="fake", kind="cuda", num_slots=4, memory_bytes=1 << 30, sms_per_slot=8)
        self.torch_device = self.runtime.device

    def open_lanes(self, partitions: Any) -> StreamLanes:
        wanted = {tuple(sorted(slots)) for slots in partitions}
        if any(slot >= 4 for slots in wanted for slot in slots):
            raise InvalidPlanError("no such slot")
        streams = {slots: (self.runtime.new_stream(), 8 * len(slots)) for slots in wanted}
        return StreamLanes(self.runtime, streams, lambda: None)


@pytest.fixture
def backend() -> Iterator[StreamBackend]:
    runtime = FakeStreams()
    with runtime.watching():
        yield StreamBackend(runtime)
    _pool.cache_clear()


def pool_of(backend: Any, graphs: bool) -> Any:
    return mosaic.stage(QUOTAS, backend=backend, graphs=graphs)._pool


class Explicit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = tower(), tower(8, 16, nn.Dropout(0.2)), nn.Linear(16, 4)

    def encode(self, x: torch.Tensor, *, scale: float) -> dict[str, torch.Tensor]:
        return {"hidden": self.right(x) * scale}

    def forward(self, x: torch.Tensor, y: torch.Tensor, how: str, options: dict[str, Any]) -> torch.Tensor:
        if how == "plain":
            left, right = self.left(x).relu(), self.encode(y, scale=0.5)
        elif how == "run":
            with mosaic.stage(QUOTAS, **options) as s:
                left = s.run("left", self.left, x).relu()
                right = s.run("right", self.encode, y, scale=0.5)
        else:
            with mosaic.stage(QUOTAS, **options) as s:
                found = s.run_all({"left": (self.left, (x,)), "right": (self.encode, (y,), {"scale": 0.5})})
                left, right = found["left"].relu(), found["right"]
        return self.head(left * right["hidden"])


def steps(model: Explicit, how: str, options: dict[str, Any]) -> Record:
    record = Record()
    torch.manual_seed(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(5):
        loss = model(*pair_batch(step), how, options).square().mean()
        loss.backward()
        record.note(loss)
        record.note_model(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return record


@pytest.mark.parametrize("how", ["run", "run_all"])
@pytest.mark.parametrize("graphs", [False, True], ids=["launched", "graphs"])
def test_a_stage_on_streams_computes_what_the_plain_code_does(backend: StreamBackend, how: str, graphs: bool):
    model = Explicit()
    twin = copy.deepcopy(model)
    expected = steps(twin, "plain", {})
    assert_same(expected, steps(model, how, {"backend": backend, "graphs": graphs}))
    pool = pool_of(backend, graphs)
    if graphs:
        assert pool.graphs.refused == {}
        assert pool.graphs.num_replays == (5 if how == "run_all" else 10)
        assert pool.graphs.num_captures == (1 if how == "run_all" else 2)


@pytest.mark.parametrize("graphs", [False, True], ids=["launched", "graphs"])
def test_pieces_run_side_by_side(backend: StreamBackend, graphs: bool):
    model = Explicit()
    x, y = pair_batch()
    with torch.no_grad():
        for _ in range(2):
            with mosaic.stage(QUOTAS, backend=backend, graphs=graphs) as s:
                s.run("left", model.left, x)
                s.run("right", model.encode, y, scale=0.5)
    lanes = pool_of(backend, graphs).executor.lanes
    name = "graph replay" if graphs else "aten.addmm.default"
    one, other = (
        next(launch for launch in reversed(backend.runtime.on(lanes.lane(slots).stream)) if launch.name == name)
        for slots in ((0, 1), (2,))
    )
    assert one.is_concurrent_with(other)


def test_a_stage_by_graph_is_one_graph_over_its_partitions(backend: StreamBackend):
    model = Explicit()
    x, y = pair_batch()
    with torch.no_grad(), mosaic.stage(QUOTAS, backend=backend, graphs=True) as s:
        s.run_all({"left": (model.left, (x,)), "right": (model.encode, (y,), {"scale": 0.5})})
    pool = pool_of(backend, graphs=True)
    (stage,) = pool.graphs._stages
    assert {branch.lane.slots for branch in stage.branches} == {(0, 1), (2,)}
    assert {branch.lane.stream.handle for branch in stage.branches} <= set(stage._forward.streams)


def test_what_cannot_be_captured_is_launched_on_its_lane(backend: StreamBackend):
    x, y = pair_batch()
    model = tower()
    with torch.no_grad(), mosaic.stage(QUOTAS, backend=backend, graphs=True) as s:
        found = s.run_all({"left": (lambda x: x[x > 0].sum(), (x,)), "right": (model, (y,))})
        alone = s.run("left", lambda x: x[x > 0].sum(), x)
    assert torch.equal(found["left"] + 0, x[x > 0].sum())
    assert torch.equal(alone + 0, x[x > 0].sum())
    assert torch.equal(found["right"], model(y))
    assert "needs a value back" in pool_of(backend, graphs=True).graphs.refused["left"]


def test_results_of_lanes_can_go_into_the_next_stage(backend: StreamBackend):
    first, second, third = tower(8, 8), tower(8, 8), tower(16, 8)
    x, y = pair_batch()
    options = {"backend": backend, "graphs": True}
    for _ in range(3):
        with mosaic.stage({"left": 2, "right": 1}, **options) as s:
            left, right = s.run("left", first, x), s.run("right", second, y)
            both = s.run_all({"left": (second, (left[:, :8],)), "right": (third, (torch.cat([left, right], 1),))})
        assert torch.equal(both["left"], second(first(x)[:, :8]))
        assert torch.equal(both["right"], third(torch.cat([first(x), second(y)], 1)))
        (both["left"].sum() + both["right"].sum()).backward()


def test_an_error_of_a_piece_comes_through(backend: StreamBackend):
    def fail(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")

    for graphs in (False, True):
        with pytest.raises(ValueError, match="no"), mosaic.stage(QUOTAS, backend=backend, graphs=graphs) as s:
            s.run_all({"left": (fail, (torch.ones(3),))})


def test_a_stage_on_streams_needs_quotas(backend: StreamBackend):
    with pytest.raises(InvalidPlanError, match="a stage on fake needs a plan or quotas"):
        mosaic.stage(backend=backend)
    with pytest.raises(InvalidPlanError, match="no such slot"):
        mosaic.stage({"left": 3, "right": 2}, backend=backend)
    with (
        mosaic.stage(QUOTAS, backend=backend) as s,
        pytest.raises(InvalidPlanError, match="'other' is not in the plan"),
    ):
        s.run("other", torch.sin, torch.ones(3))


def test_graphs_on_the_host_are_refused():
    with pytest.raises(BackendUnavailableError, match="cannot be captured"):
        mosaic.stage(graphs=True)


def test_all_pieces_run_on_the_host_too():
    model = Explicit()
    x, y = pair_batch()
    for _ in range(2):
        with mosaic.stage() as s:
            found = s.run_all({"all left": (model.left, (x,)), "all right": (model.right[0], [y])})
    assert torch.equal(found["all left"] + 0, model.left(x))
    assert torch.equal(found["all right"] + 0, model.right[0](y))
    with mosaic.stage() as s, pytest.raises(TypeError, match="'odd' is not"):
        s.run_all({"odd": (model.left,)})


# Pieces that share a module.


class Normed(nn.Module):
    """One encoder with running statistics for both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = tower(8, 16, nn.BatchNorm1d(16))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)  # type: ignore[no-any-return]


def stages_with(backend: StreamBackend, how: str, pieces: Any, *, casts: bool, graphs: bool) -> list[torch.Tensor]:
    """Trains two steps with the pieces ``left`` and ``right``; returns their results."""
    found: list[torch.Tensor] = []
    for step in range(2):
        x, y = pair_batch(step)
        with torch.autocast("cpu", torch.bfloat16, enabled=casts):
            with mosaic.stage(QUOTAS, backend=backend, graphs=graphs) as s:
                if how == "run":
                    left, right = s.run("left", pieces[0], x), s.run("right", pieces[1], y)
                else:
                    both = s.run_all({"left": (pieces[0], (x,)), "right": (pieces[1], (y,))})
                    left, right = both["left"], both["right"]
            found += [left.detach() + 0, right.detach() + 0]
            (left + right).float().sum().backward()
    return found


@pytest.mark.parametrize("casts", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize(
    ("kind", "graphs"),
    [("module", False), ("module", True), ("method", False), ("method", True), ("function", False)],
)
@pytest.mark.parametrize("how", ["run", "run_all"])
def test_pieces_that_share_a_module_take_turns(backend: StreamBackend, how: str, graphs: bool, casts: bool, kind: str):
    model = Normed()
    twin = copy.deepcopy(model)
    pieces = {
        "module": (model.encoder, model.encoder),
        "method": (model.encoder, model.encode),
        "function": (lambda x: model.encoder(x), model.encode),
    }
    found = stages_with(backend, how, pieces[kind], casts=casts, graphs=graphs)
    for step in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=casts):
            for index, given in enumerate(pair_batch(step)):
                assert torch.equal(twin.encode(given).detach(), found[2 * step + index])
    for ours, plain in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(ours, plain)


@pytest.mark.parametrize("casts", [False, True], ids=["plain", "autocast"])
def test_a_module_of_a_piece_may_be_called_between_pieces(backend: StreamBackend, casts: bool):
    encoder = Normed().encoder
    for step in range(2):
        x, y = pair_batch(step)
        with torch.autocast("cpu", torch.bfloat16, enabled=casts):
            with mosaic.stage(QUOTAS, backend=backend) as s:
                left = s.run("left", encoder, x)
                right = encoder(y)
            (left + right).float().sum().backward()
    assert not encoder._forward_pre_hooks, "nothing is left on the module"


def test_a_piece_that_depends_on_another_shares_nothing_with_it(backend: StreamBackend):
    first, second = tower(), tower(16, 16)
    for step in range(2):
        with mosaic.stage(QUOTAS, backend=backend) as s:
            left = s.run("left", first, pair_batch(step)[0])
            right = s.run("right", lambda given: second(given), left)
        right.sum().backward()
    assert pool_of(backend, graphs=False).executor.in_order == {}


def test_what_a_function_shares_is_told_by_its_first_call_with_gradients(backend: StreamBackend):
    encoder = tower()
    x, y = pair_batch()
    for trains in (False, True):
        casts = torch.autocast("cpu", torch.bfloat16, enabled=trains)
        with torch.set_grad_enabled(trains), casts, mosaic.stage(QUOTAS, backend=backend) as s:
            s.run("left", lambda given: encoder(given), x)
            s.run("right", lambda given: encoder(given), y)
    assert set(pool_of(backend, graphs=False).executor.in_order) == {"left", "right"}
