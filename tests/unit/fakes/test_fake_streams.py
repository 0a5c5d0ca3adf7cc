"""The fake runtime: whose stream each node of a backward runs on and what it waits for; memory, streams and events."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_streams import FakeStreams, Launch, RaceError
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint


@pytest.fixture
def runtime() -> Iterator[FakeStreams]:
    made = FakeStreams()
    with made.watching():
        yield made


def on(runtime: FakeStreams, stream: Any, work: Callable[..., torch.Tensor], *given: torch.Tensor) -> torch.Tensor:
    """Runs work on a stream, behind the current one, and the current one behind it."""
    runtime.recorded(runtime.current_stream()).wait(stream)
    with runtime.use_stream(stream):
        made = work(*given)
    runtime.recorded(stream).wait(runtime.current_stream())
    for tensor in given:
        runtime.record_use(tensor, stream)
    runtime.record_use(made, runtime.current_stream())
    return made


def leaf() -> torch.Tensor:
    return torch.ones(3, requires_grad=True)


def after(runtime: FakeStreams, work: Callable[[], Any]) -> list[Launch]:
    before = len(runtime.launches)
    work()
    return runtime.launches[before:]


def test_nodes_run_on_their_forward_s_streams_and_wait_along_gradients_only(runtime: FakeStreams):
    one, other = runtime.new_stream(), runtime.new_stream()
    x, y = leaf(), leaf()
    total = (on(runtime, one, torch.exp, x) + on(runtime, other, torch.exp, y)).sum()
    made = after(runtime, total.backward)
    (left,) = [launch for launch in made if launch.stream == one.handle]
    (right,) = [launch for launch in made if launch.stream == other.handle]
    assert left.is_concurrent_with(right)
    assert all(launch.is_after(made[0]) for launch in (left, right)), "the first gradient is the caller's"


def test_the_caller_waits_for_the_streams_of_leaves_at_the_end(runtime: FakeStreams):
    side, x = runtime.new_stream(), leaf()
    on(runtime, side, torch.exp, x).sum().backward()
    assert x.grad is not None
    x.grad.mul_(2)
    assert runtime.launches[-1].is_after(runtime.on(side)[-1])


def test_a_hook_that_reads_what_another_branch_s_backward_makes_is_a_race(runtime: FakeStreams):
    one, other = runtime.new_stream(), runtime.new_stream()
    x, y = leaf(), leaf()
    left, right = on(runtime, one, torch.exp, x), on(runtime, other, torch.exp, y)
    seen: list[torch.Tensor] = []

    def hook(gradient: torch.Tensor) -> None:
        for earlier in seen:
            earlier * 2
        seen.append(gradient)

    x.register_hook(hook)
    y.register_hook(hook)
    with pytest.raises(RaceError):
        (left + right).sum().backward()


def test_gradients_are_summed_up_on_the_stream_of_the_node_that_takes_them(runtime: FakeStreams):
    one, other, x = runtime.new_stream(), runtime.new_stream(), leaf()
    middle = x * 2
    total = on(runtime, one, torch.exp, middle) + on(runtime, other, torch.exp, middle)
    made = after(runtime, total.sum().backward)
    (added,) = [launch for launch in made if launch.name.startswith("aten.add")]
    assert added.stream == 0
    assert all(added.is_after(runtime.on(side)[-1]) for side in (one, other))


def test_the_gradient_of_a_leaf_is_added_up_where_the_living_graph_first_used_it(runtime: FakeStreams):
    one, other, x = runtime.new_stream(), runtime.new_stream(), leaf()
    x.grad = torch.zeros(3)
    kept = on(runtime, one, torch.exp, x)
    (added,) = [a for a in after(runtime, on(runtime, other, torch.exp, x).sum().backward) if "add" in a.name]
    assert added.stream == one.handle
    del kept
    (added,) = [a for a in after(runtime, on(runtime, other, torch.exp, x).sum().backward) if "add" in a.name]
    assert added.stream == other.handle


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_computed_again_in_a_backward_runs_on_the_stream_of_its_node(runtime: FakeStreams, reentrant: bool):
    side, x = runtime.new_stream(), leaf()
    found = on(runtime, side, lambda given: checkpoint(torch.sin, given, use_reentrant=reentrant), x)
    made = after(runtime, found.sum().backward)
    assert {launch.stream for launch in made if "sin" in launch.name or "cos" in launch.name} == {side.handle}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        return given * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 2


def test_a_function_of_the_user_s_runs_on_its_forward_s_stream_and_a_hook_on_its_tensor_s(runtime: FakeStreams):
    side, x = runtime.new_stream(), leaf()
    found = on(runtime, side, Doubled.apply, x)
    streams: list[Any] = []
    found.register_hook(lambda _: streams.append(runtime.current_stream()))
    made = after(runtime, found.sum().backward)
    assert streams == [side]
    assert [launch.stream for launch in made if launch.name == "aten.mul.Tensor"] == [side.handle]
    made = after(runtime, on(runtime, side, Doubled.apply, x).sum().backward)
    assert [launch.stream for launch in made if "add" in launch.name] == [side.handle], "its leaf's, too"


def test_gradients_that_are_asked_for_are_there_for_the_caller_and_nothing_else_is_run(runtime: FakeStreams):
    one, other = runtime.new_stream(), runtime.new_stream()
    x, y = leaf(), leaf()
    middle = on(runtime, one, torch.exp, x)
    total = (on(runtime, one, torch.sin, middle) + on(runtime, other, torch.exp, y) + middle).sum()
    before = len(runtime.on(other))
    (gradient,) = torch.autograd.grad(total, [middle])
    assert len(runtime.on(other)) == before
    gradient * 2
    assert runtime.launches[-1].is_after(runtime.on(one)[-1])


def test_a_backward_of_gradients_runs_on_the_streams_of_the_backward_that_made_them(runtime: FakeStreams):
    side, x = runtime.new_stream(), leaf()
    total = on(runtime, side, torch.sin, x).sum()
    (gradient,) = torch.autograd.grad(total, [get_gradient_edge(x)], create_graph=True)
    made = after(runtime, gradient.sum().backward)
    assert [launch.stream for launch in made if "sin" in launch.name] == [side.handle]


def test_memory_that_a_stream_let_go_is_not_given_out_while_others_use_it(runtime: FakeStreams):
    side = runtime.new_stream()
    with runtime.use_stream(side):
        made = torch.ones(3)
    runtime.recorded(side).wait(runtime.main)
    made * 2
    del made
    with runtime.use_stream(side), pytest.raises(RaceError):
        torch.ones(3)


def test_memory_that_no_operator_made_is_the_user_s_stream_s(runtime: FakeStreams):
    side, batch = runtime.new_stream(), torch.from_numpy(torch.ones(3).numpy())
    with runtime.use_stream(side):
        batch * 2
    del batch
    with pytest.raises(RaceError):
        torch.ones(3)


def test_streams_are_handed_out_in_turn_and_are_equal_not_identical(runtime: FakeStreams):
    made = [runtime.new_stream() for _ in range(33)]
    assert made[32] == made[0]
    assert made[32] is not made[0]
    assert len(set(made)) == 32
    with runtime.use_stream(made[0]):
        assert runtime.current_stream() == made[32]


def test_the_time_between_events_is_refused_until_the_host_has_waited_for_both(runtime: FakeStreams):
    start, end = (runtime.new_event(timing=True) for _ in range(2))
    start.record(runtime.main)
    torch.ones(3)
    end.record(runtime.main)
    with pytest.raises(RuntimeError, match="not ready"):
        start.elapsed_time(end)
    end.synchronize()
    assert start.elapsed_time(end) >= 0


@pytest.mark.parametrize("wait", [None, "event", "block"])
def test_what_is_copied_without_blocking_must_stay_until_the_host_has_waited(runtime: FakeStreams, wait: str | None):
    batch, given = runtime.pin(torch.zeros(3)), torch.zeros(3)
    given.copy_(batch, non_blocking=wait != "block")
    if wait == "event":
        runtime.recorded(runtime.main).synchronize()
    if wait is not None:
        batch.add_(1)
        return
    with pytest.raises(RaceError, match="the host touches memory"):
        batch.add_(1)


def test_the_host_reads_a_copy_once_it_has_waited_for_it(runtime: FakeStreams):
    told, made = runtime.pin(torch.zeros(3)), torch.ones(3) * 2
    told.copy_(made, non_blocking=True)
    with pytest.raises(RaceError, match="the host touches memory"):
        told.sum()
    runtime.synchronize()
    told.sum()


def test_a_backward_that_is_captured_may_not_reach_a_leaf_of_the_default_stream(runtime: FakeStreams):
    side, x = runtime.new_stream(), leaf()
    kept = torch.exp(x)
    runtime.recorded(runtime.main).wait(side)
    captured = runtime.capture(runtime.new_graph(), stream=side, pool=runtime.new_graph_pool())
    with pytest.raises(RuntimeError, match="default stream cannot wait"), captured:
        torch.exp(x).sum().backward()
    del kept
    with runtime.capture(runtime.new_graph(), stream=side, pool=runtime.new_graph_pool()):
        torch.exp(x).sum().backward()


def test_a_leaf_s_own_backward_runs_on_the_caller_s_stream(runtime: FakeStreams):
    x = leaf()
    x.grad = torch.ones(3)
    (added,) = [one for one in after(runtime, lambda: x.backward(torch.ones(3))) if "add" in one.name]
    assert added.stream == 0
