"""Branches of a stage are captured on their own lanes and side by side; where a wait is missing there is a race."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from engine_cases import pair_batch, tower
from fake_streams import RaceError
from stage_graph_cases import Bench, bench, one_thread  # noqa: F401
from torch import nn

from mosaic.backends.streams.lanes import StreamLane, StreamTicket
from mosaic.engine.graphs.replay import CapturedBranch

pytestmark = pytest.mark.usefixtures("one_thread")

WIDE = (0, 1)


def captured_on(ours: Bench, lane: StreamLane) -> list[Any]:
    """Launches on a lane's stream of the one capture there was, forward and backward."""
    found = [launch for launch in ours.runtime.on(lane.stream) if "addmm" in launch.name or "mm.default" in launch.name]
    assert found
    return found


def test_the_forward_is_one_graph_over_the_lanes_of_all_branches():
    left, right = tower(), tower()
    x, y = pair_batch()
    with bench() as ours, torch.no_grad():
        ours.run(ours.branch("left", left, x), ours.branch("right", right, y))
        (stage,) = ours.graphs._stages
        lanes = {ours.lane("left").stream.handle, ours.lane("right").stream.handle}
        assert lanes <= set(stage._forward.streams)
        assert len(stage._forward.streams) == 3  # and the stream on which the capture began


def test_the_backward_of_each_branch_is_a_graph_on_its_lane():
    left, right = tower(), tower()
    x, y = pair_batch()
    with bench() as ours:
        ours.run(ours.branch("left", left, x), ours.branch("right", right, y))
        (stage,) = ours.graphs._stages
        for branch in stage.branches:
            ((backward, _),) = branch.backwards.values()
            assert backward.streams == (branch.lane.stream.handle,)


def test_branches_are_captured_side_by_side():
    left, right = tower(), tower()
    x, y = pair_batch()
    with bench() as ours, torch.no_grad():
        ours.run(ours.branch("left", left, x), ours.branch("right", right, y))
        one = captured_on(ours, ours.lane("left"))
        other = captured_on(ours, ours.lane("right"))
        assert all(a.is_concurrent_with(b) for a in one for b in other)


def test_branches_whose_lanes_share_slots_are_captured_one_after_the_other():
    left, right = tower(), tower()
    x, y = pair_batch()
    with bench() as ours, torch.no_grad():
        ours.lane_of = {"left": ours.lanes.lane((0,)), "right": ours.lanes.lane(WIDE)}
        ours.run(ours.branch("left", left, x), ours.branch("right", right, y))
        one = captured_on(ours, ours.lane("left"))
        other = captured_on(ours, ours.lane("right"))
        assert all(b.is_after(a) for a in one for b in other)


def test_branches_that_share_a_buffer_are_captured_one_after_the_other():
    shared = tower(8, 16, nn.BatchNorm1d(16))
    twin = tower(8, 16, nn.BatchNorm1d(16))
    twin.load_state_dict(shared.state_dict())
    x, y = pair_batch()
    with bench() as ours, torch.no_grad():
        for _ in range(2):
            ours.run(ours.branch("left", shared, x), ours.branch("right", shared, y))
            twin(x), twin(y)
        assert ours.graphs.num_replays == 2
        assert torch.equal(shared[2].running_mean, twin[2].running_mean)


def test_two_branches_on_one_lane_run_in_one_graph():
    left, right = tower(), tower()
    x, y = pair_batch()
    with bench() as ours:
        ours.lane_of = dict.fromkeys(("left", "right"), ours.lanes.lane((1,)))
        for _ in range(3):
            one, other = ours.run(ours.branch("left", left, x), ours.branch("right", right, y))
            (one.sum() + other.square().sum()).backward()
        found = left[0].weight.grad.clone()
        left.zero_grad()
        for _ in range(3):
            left(x).sum().backward()
        assert torch.equal(found, left[0].weight.grad)


def test_one_branch_is_launched_on_its_lane_and_the_caller_s_stream_can_go_on():
    left, right = tower(), tower()
    x, y = pair_batch()
    with bench() as ours, torch.no_grad():
        for _ in range(2):
            tickets = []
            for name, module, value in (("left", left, x), ("right", right, y)):
                branch = ours.branch(name, module, value)
                tickets.append(branch.lane.launch(lambda b=branch: ours.graphs.run(b.name, [b])[0]))
        one, other = (
            next(one for one in reversed(ours.runtime.on(ours.lane(name).stream)) if one.name == "graph replay")
            for name in ("left", "right")
        )
        assert one.is_concurrent_with(other)
        assert torch.equal(tickets[0].wait() + 1, left(x) + 1)


@pytest.mark.parametrize("names", [("left",), ("left", "right")], ids=["one branch", "two branches"])
def test_all_that_a_call_launches_is_on_its_lane_but_the_graph_of_several(names: tuple[str, ...]):
    model = tower()
    x = pair_batch()[0]
    with bench() as ours:
        branches = [ours.branch(name, model, x) for name in names]
        ours.run(*branches)
        assert not any("mm" in launch.name for launch in ours.runtime.on(0))  # nor when it is tried before
        here, lanes = len(ours.runtime.on(0)), [len(ours.runtime.on(branch.lane.stream)) for branch in branches]
        ours.run(*branches)
        launched = [launch.name for launch in ours.runtime.on(0)[here:]]
        assert launched == ([] if len(names) == 1 else ["graph replay"])
        for branch, before in zip(branches, lanes, strict=True):
            launched = [launch.name for launch in ours.runtime.on(branch.lane.stream)[before:]]
            assert [name for name in launched if "copy" in name] == [
                "aten.copy_.default",
                "aten._foreach_copy_.default",
            ]


@pytest.mark.parametrize("why", ["closed", "a parameter is elsewhere"])
def test_what_is_running_is_waited_for_before_its_graph_is_let_go(why: str, monkeypatch: pytest.MonkeyPatch):
    seen: list[str] = []
    model, x = tower(), pair_batch()[0]
    with bench() as ours, torch.no_grad():
        ours.call("tower", model, x)
        with ours.runtime.use_stream(ours.lane("tower").stream):
            hold = ours.runtime.hold()
        monkeypatch.setattr(hold, "wait", lambda: (seen.append("waited"), hold.open()))
        close = CapturedBranch.close
        monkeypatch.setattr(CapturedBranch, "close", lambda self: (seen.append("closed"), close(self)))
        if why == "closed":
            ours.graphs.close()
        else:
            model[0].weight.data = model[0].weight.data.clone()
            ours.call("tower", model, x)
        assert seen[:2] == ["waited", "closed"]


def test_forward_and_backward_are_captured_under_the_settings_of_their_lane():
    now: list[int | None] = [None]
    seen: list[tuple[str, int | None, bool]] = []

    class Settings:
        @contextmanager
        def during(self, num_sms: int | None) -> Iterator[None]:
            now.append(num_sms)
            yield
            now.pop()

    class Tells(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            seen.append(("forward", now[-1], ours.runtime.is_capturing()))
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            seen.append(("backward", now[-1], ours.runtime.is_capturing()))
            return grad * 2

    with bench() as ours:
        settings: Any = Settings()
        ours.lanes.set_libraries(settings)
        ours.lane_of = {"left": ours.lanes.lane((2,)), "right": ours.lanes.lane(WIDE)}
        x = torch.ones(3, requires_grad=True)
        ours.run(*(ours.branch(name, lambda x: Tells.apply(x), x) for name in ("left", "right")))
        captured = [(phase, num_sms) for phase, num_sms, is_capturing in seen if is_capturing]
    assert captured == [("forward", 8), ("forward", 16), ("backward", 8), ("backward", 16)]


def test_a_workspace_from_before_a_capture_is_not_used_inside_of_it():
    model, x = tower(), pair_batch()[0]
    with bench() as ours, torch.no_grad():
        expected = ours.lane("tower").launch(lambda: model(x)).wait()
        assert torch.equal(ours.call("tower", model, x), expected)
        assert ours.graphs.refused == {}
        assert ours.graphs.num_replays == 1


def test_a_call_may_come_from_any_stream():
    model = tower()
    with bench() as ours:
        streams = [ours.runtime.main, ours.runtime.new_stream(), ours.runtime.new_stream()]
        for step in range(6):
            before, here = streams[step % 3], streams[(step + 1) % 3]
            event = ours.runtime.new_event()
            event.record(before)
            event.wait(here)
            with ours.runtime.use_stream(here):
                x = pair_batch(step)[0]
                one, other = ours.run(ours.branch("left", model, x), ours.branch("right", model, x * 2))
                assert torch.equal(one, model(x))
                (one.sum() + other.sum()).backward()
                model.zero_grad(set_to_none=False)
        assert ours.graphs.num_replays == 6


def train_twice(ours: Bench) -> None:
    left, right = tower(), tower()
    for step in range(3):
        x, y = (value * 1 for value in pair_batch(step))
        one, other = ours.run(ours.branch("left", left, x), ours.branch("right", right, y))
        expected = left(x) * right(y)
        assert torch.equal(one * other, expected), "other numbers"
        (one * other).sum().backward()


def without_wait(self: StreamTicket[Any]) -> Any:
    return self._result


def nothing(*_: Any, **__: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("owner", "name", "bug"),
    [
        (StreamLane, "order_after_caller", nothing),
        (StreamTicket, "wait", without_wait),
        (StreamTicket, "order", nothing),
    ],
    ids=["lanes do not wait for the caller", "nobody waits for lanes", "no events between lanes and caller"],
)
def test_a_wait_that_is_missing_is_a_race(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, bug: Callable[..., Any]
):
    with bench() as ours:
        train_twice(ours)
        monkeypatch.setattr(owner, name, bug)
        with pytest.raises(RaceError):
            train_twice(ours)
        monkeypatch.undo()


def test_inputs_that_are_not_copied_give_other_numbers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(CapturedBranch, "copy_in", nothing)
    with bench() as ours, pytest.raises(AssertionError, match="other numbers"):
        train_twice(ours)


@pytest.mark.parametrize("missing", ["fork", "join"])
def test_a_capture_without_fork_or_join_is_noticed(monkeypatch: pytest.MonkeyPatch, missing: str):
    left, right = tower(), tower()
    x, y = pair_batch()
    with bench() as ours, torch.no_grad():
        capturing = ours.graphs._capturing
        new_event = ours.runtime.new_event

        class Deaf:
            """An event for which one of the two sides does not wait."""

            def __init__(self) -> None:
                self.event = new_event()

            def record(self, stream: Any) -> None:
                self.event.record(stream)

            def wait(self, stream: Any) -> None:
                is_join = stream is capturing.origin
                if is_join is not (missing == "join"):
                    self.event.wait(stream)

        monkeypatch.setattr(
            ours.runtime, "new_event", lambda **options: Deaf() if ours.runtime.is_capturing() else new_event(**options)
        )
        found = ours.run(ours.branch("left", left, x), ours.branch("right", right, y))
        reason = {"fork": "an event from outside of the capture", "join": "was not joined"}[missing]
        assert reason in ours.graphs.refused["left"]
        assert torch.equal(found[0], left(x))


def test_gradients_that_are_handed_out_uncopied_add_up_wrongly(monkeypatch: pytest.MonkeyPatch):
    """What the copies are for: a parameter without a gradient would take the static one as its own."""
    monkeypatch.setattr(
        CapturedBranch, "_handed_back", lambda self, grads, _: [g if g is None else g.data for g in grads]
    )
    model = tower()
    x, y = pair_batch()
    with bench() as ours:
        for value in (x, y):
            ours.call("tower", model, value).sum().backward()
        found = model[0].weight.grad.clone()
        model.zero_grad()
        for value in (x, y):
            model(value).sum().backward()
        assert not torch.equal(found, model[0].weight.grad)
