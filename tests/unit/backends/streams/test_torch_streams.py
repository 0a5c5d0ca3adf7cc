"""``StreamApi`` asks ``torch.cuda``, argument by argument; no test here has a GPU."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from mosaic.backends.streams.api import StreamApi, start_autograd
from mosaic.errors import BackendUnavailableError


@pytest.fixture
def api() -> StreamApi:
    return StreamApi(1)


class Runtime:
    """The functions of ``torch._C`` that know current streams and devices."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: int = 0) -> None:
        self.device = device
        self.current = {number: (number * 10, number, 1) for number in range(2)}
        self.capturing: set[int] = set()
        for name in ("getDevice", "setDevice", "getCurrentStream", "setStream", "isCurrentStreamCapturing"):
            monkeypatch.setattr(torch._C, f"_cuda_{name}", getattr(self, name), raising=False)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", self.isCurrentStreamCapturing)

    def getDevice(self) -> int:  # noqa: N802
        return self.device

    def setDevice(self, device: int) -> None:  # noqa: N802
        self.device = device

    def getCurrentStream(self, device: int) -> tuple[int, int, int]:  # noqa: N802
        return self.current[device]

    def setStream(self, stream_id: int, device_index: int, device_type: int) -> None:  # noqa: N802
        self.device, self.current[device_index] = device_index, (stream_id, device_index, device_type)

    def isCurrentStreamCapturing(self) -> bool:  # noqa: N802
        return self.device in self.capturing


@pytest.mark.parametrize("device", [0, 1])
def test_a_block_makes_a_stream_and_its_device_current_and_both_are_put_back(
    api: StreamApi, monkeypatch: pytest.MonkeyPatch, device: int
):
    runtime = Runtime(monkeypatch, device)
    stream = Mock(stream_id=77, device_index=1, device_type=1)
    with suppress(KeyError), api.use_stream(stream):
        assert (runtime.device, runtime.current[1]) == (1, (77, 1, 1))
        raise KeyError
    assert (runtime.device, runtime.current[1]) == (device, (10, 1, 1))


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("capturing", [0, 1])
def test_capturing_is_asked_of_the_devices_own_current_stream(
    api: StreamApi, monkeypatch: pytest.MonkeyPatch, current: int, capturing: int
):
    runtime = Runtime(monkeypatch, current)
    runtime.capturing.add(capturing)
    monkeypatch.setattr(torch.cuda, "device", lambda device: api.use_stream(Mock(device_index=device.index)))
    assert api.is_capturing() is (capturing == 1)
    assert runtime.device == current


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_a_first_backward_is_run_where_the_caller_takes_no_gradients_too(mode: Any, monkeypatch: pytest.MonkeyPatch):
    ran = Mock(wraps=torch.Tensor.backward)
    monkeypatch.setattr(torch.Tensor, "backward", lambda self: ran(self))
    with mode():
        start_autograd(torch.device("cpu"))
    ran.assert_called_once()


class PoolStream:
    """A stream as torch gives it: a new object each time, equal to those of its handle, never referred to weakly."""

    __slots__ = ("cuda_stream",)

    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PoolStream) and self.cuda_stream == other.cuda_stream

    def __hash__(self) -> int:
        return hash(self.cuda_stream)


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


def test_streams_in_use_are_all_different_although_torch_hands_them_out_in_turn(api: StreamApi, pool: dict[str, int]):
    kept = [api.new_stream() for _ in range(31)]
    for _ in range(40):
        stream = api.new_stream()
        assert stream not in kept
        api.give_back(stream)
    assert len({*kept, api.new_stream()}) == 32


def test_more_streams_than_torch_has_are_an_error_and_those_of_another_priority_are_not(
    api: StreamApi, pool: dict[str, int]
):
    kept = [api.new_stream() for _ in range(32)]
    with pytest.raises(BackendUnavailableError, match=r"no stream of priority 0 is free.*32 streams in use.*of the 32"):
        api.new_stream()
    assert pool["asked"] == 64
    assert api.new_stream(-1) not in kept
    api.give_back(kept[5])
    assert api.new_stream() == PoolStream(5)


class Current:
    """The current streams as torch knows them while ``torch.cuda.graph`` itself, the real one, is at work."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.stream: Any = "the caller's"
        self.entered: list[str] = []
        for name in ("synchronize", "empty_cache"):
            patch.setattr(torch.cuda, name, lambda *args: None)
        patch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
        patch.setattr(torch._C, "_cuda_endAllocateToPool", self.refuse, raising=False)
        patch.setattr(torch.cuda, "stream", self.use)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: self.stream)

    def use(self, stream: Any) -> AbstractContextManager[None]:
        return Used(self, stream)

    def refuse(self, *args: Any) -> None:
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")


class Used(AbstractContextManager[None]):
    """As ``torch.cuda.StreamContext``: once it is left, and only then, what was current is so again."""

    def __init__(self, current: Current, stream: Any) -> None:
        self._current, self._stream = current, stream

    def __enter__(self) -> None:
        self._before, self._current.stream = self._current.stream, self._stream

    def __exit__(self, *error: object) -> None:
        self._current.stream = self._before


class Capture:
    """A graph that notes how its capture was begun, and fails when it is told to."""

    def __init__(self, *, fails: str = "") -> None:
        self.begun: list[Any] = []
        self._fails = fails

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(torch.cuda.CUDAGraph.capture_begin).bind(self, *args, **kwargs).arguments
        self.begun.append((given["pool"], given["capture_error_mode"], torch.cuda.current_stream()))
        if self._fails == "begin":
            raise RuntimeError("capture_begin failed")

    def capture_end(self) -> None:
        if self._fails == "end":
            raise RuntimeError("capture_end failed")


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> Current:
    return Current(monkeypatch)


def test_a_capture_is_from_its_stream_into_its_pool_and_lets_other_threads_call_cuda(api: StreamApi, current: Current):
    graph: Any = Capture()
    with api.capture(graph, stream="the lane's", pool="a pool"):  # type: ignore[arg-type]
        assert current.stream == "the lane's"
    assert graph.begun == [("a pool", "thread_local", "the lane's")]
    assert current.stream == "the caller's"


@pytest.mark.parametrize("fails", ["begin", "end"])
def test_a_capture_that_fails_leaves_the_callers_stream_current(api: StreamApi, current: Current, fails: str):
    graph: Any = Capture(fails=fails)
    with pytest.raises(RuntimeError, match=f"capture_{fails} failed"), api.capture(graph, stream="s", pool="p"):  # type: ignore[arg-type]
        pass
    assert current.stream == "the caller's"
