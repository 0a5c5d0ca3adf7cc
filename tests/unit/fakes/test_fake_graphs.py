"""The fake runtime's graphs keep the rules of CUDA's and torch's that graphs of modules rely on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_streams import FakeStreams, RaceError

X = torch.ones(4)


@pytest.fixture
def runtime() -> Iterator[FakeStreams]:
    made = FakeStreams()
    with made.watching():
        yield made


def captured(runtime: FakeStreams, work: Callable[[], Any], *, pool: Any = None, stream: Any = None) -> tuple[Any, Any]:
    graph = runtime.new_graph()
    with runtime.capture(graph, stream=stream or runtime.new_stream(), pool=pool or runtime.new_graph_pool()):
        made = work()
    return graph, made


def replay_on_two_streams(runtime: FakeStreams, *graphs: Any) -> None:
    runtime.synchronize()
    for graph in graphs:
        with runtime.use_stream(runtime.new_stream()):
            graph.replay()


def test_what_a_capture_made_is_garbage_until_a_replay(runtime: FakeStreams):
    graph, made = captured(runtime, lambda: X + 1)
    runtime.synchronize()
    assert made.isnan().all()
    graph.replay()
    assert torch.equal(made, X + 1)


def test_a_replay_finds_garbage_where_its_graph_writes_nothing(runtime: FakeStreams):
    graph, (made, total) = captured(runtime, lambda: ((blank := torch.empty(4)), blank + X))
    runtime.synchronize()
    made.zero_()
    graph.replay()
    assert total.isnan().all()


def test_memory_that_an_earlier_graph_let_go_is_a_later_one_s(runtime: FakeStreams):
    pool, stream = runtime.new_graph_pool(), runtime.new_stream()
    first, made = captured(runtime, lambda: X + 1, pool=pool, stream=stream)
    seen = made.untyped_storage()
    del made
    second, _ = captured(runtime, lambda: X + 2, pool=pool, stream=stream)
    kept = torch.empty(0).set_(seen)
    first.replay()
    runtime.synchronize()
    assert torch.equal(kept, X + 1)
    second.replay()
    assert kept.isnan().all()


def test_two_graphs_of_one_pool_are_not_replayed_at_once(runtime: FakeStreams):
    pool = runtime.new_graph_pool()
    graphs = [captured(runtime, lambda: X + 1, pool=pool)[0] for _ in range(2)]
    with pytest.raises(RaceError, match="graphs of one memory pool"):
        replay_on_two_streams(runtime, *graphs)
    replay_on_two_streams(runtime, *(captured(runtime, lambda: X + 1)[0] for _ in range(2)))


def test_graphs_that_draw_race_for_a_generator_s_one_state_and_not_for_states_of_their_own(runtime: FakeStreams):
    replay_on_two_streams(runtime, *(captured(runtime, lambda: torch.rand(4))[0] for _ in range(2)))
    runtime.synchronize()
    runtime.generator = torch.zeros(2)
    with pytest.raises(RaceError, match="generator's state"):
        replay_on_two_streams(runtime, *(captured(runtime, lambda: torch.rand(4))[0] for _ in range(2)))


@pytest.mark.parametrize(
    "work",
    [
        lambda runtime: X.sum().item(),
        lambda runtime: X.nonzero(),
        lambda runtime: runtime.empty_cache(),
        lambda runtime: runtime.synchronize(),
        lambda runtime: torch.rand(4, generator=torch.Generator()),
    ],
    ids=["item", "nonzero", "empty_cache", "synchronize", "a generator of its own"],
)
def test_what_a_capture_refuses_invalidates_it(runtime: FakeStreams, work: Any):
    def survives() -> None:
        with pytest.raises(RuntimeError, match="not permitted while a stream is capturing"):
            work(runtime)

    with pytest.raises(RuntimeError, match="invalidated due to a previous error"):
        captured(runtime, survives)
    assert not runtime.is_capturing()


def test_an_event_of_a_finished_capture_is_of_no_use_outside(runtime: FakeStreams):
    event = runtime.new_event()
    captured(runtime, lambda: event.record(runtime.current_stream()))
    for use in (lambda: event.wait(runtime.main), event.query, event.synchronize):
        with pytest.raises(RuntimeError, match="last recorded in a capturing stream"):
            use()
