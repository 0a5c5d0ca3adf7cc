"""``StreamApi`` asks ``torch.cuda``, argument by argument; no test here has a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

from mosaic.backends.streams.api import StreamApi
from mosaic.errors import BackendUnavailableError


@pytest.fixture
def api() -> StreamApi:
    return StreamApi(1)


@dataclass(frozen=True, slots=True)
class PoolStream:
    """A stream as torch gives it: a new object each time, equal to those of its handle, never referred to weakly."""

    cuda_stream: int


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """torch's pool: 32 streams of each priority in turn; also says which one is current."""
    state = {"current": -1, "asked": 0}
    given: dict[int, int] = {}

    def take(device: Any = None, priority: int = 0) -> PoolStream:
        state["asked"] += 1
        given[priority] = given.get(priority, -1) + 1
        return PoolStream(100 * abs(priority) + given[priority] % 32)

    monkeypatch.setattr(torch.cuda, "Stream", take)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: PoolStream(state["current"]))
    return state


def test_streams_in_use_all_differ_and_more_than_torch_has_of_a_priority_are_an_error(
    api: StreamApi, pool: dict[str, int]
):
    kept = [api.new_stream() for _ in range(31)]
    for _ in range(40):  # torch hands them out in turn, those in use as well
        stream = api.new_stream()
        assert stream not in kept
        api.give_back(stream)
    kept.append(api.new_stream())
    assert len({*kept}) == 32
    asked = pool["asked"]
    with pytest.raises(BackendUnavailableError, match=r"no stream of priority 0 is free.*32 streams in use.*32 per"):
        api.new_stream()
    assert pool["asked"] == asked + 32
    assert api.new_stream(-1) not in kept
    api.give_back(kept[5])
    assert api.new_stream() == PoolStream(5)


@pytest.mark.parametrize("fails", ["", "begin", "end"])
def test_a_capture_is_from_its_stream_into_its_pool_and_leaves_the_callers_stream_current(
    api: StreamApi, monkeypatch: pytest.MonkeyPatch, fails: str
):
    current, begun = ["the caller's"], []

    @contextmanager
    def use(stream: Any) -> Iterator[None]:
        before, current[0] = current[0], stream
        try:
            yield
        finally:
            current[0] = before

    class Graph:
        def capture_begin(self, pool: Any, capture_error_mode: str, **_: Any) -> None:
            begun.append((pool, capture_error_mode, current[0]))
            assert fails != "begin"

        def capture_end(self) -> None:
            assert fails != "end"

    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: None)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", Mock(side_effect=RuntimeError), raising=False)
    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current[0])
    graph, stream = cast(Any, Graph()), cast(Any, "the lane's")
    with pytest.raises(AssertionError) if fails else nullcontext(), api.capture(graph, stream=stream, pool="a pool"):
        assert current == ["the lane's"]
    assert begun == [("a pool", "thread_local", "the lane's")]
    assert current == ["the caller's"]
