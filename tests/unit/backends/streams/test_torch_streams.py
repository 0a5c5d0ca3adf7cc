"""``TorchStreams`` asks ``torch.cuda``, argument by argument; no test here has a GPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any
from unittest.mock import Mock, create_autospec, sentinel

import pytest
import torch

from mosaic.backends.streams.api import TorchStreams, start_autograd
from mosaic.errors import BackendUnavailableError

DEVICE = torch.device("cuda", 1)


@pytest.fixture
def api() -> TorchStreams:
    return TorchStreams(1)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Puts a mock with the real signature in the place of a function of ``torch.cuda``."""

    def put(name: str, **behaviour: Any) -> Any:
        mock = create_autospec(getattr(torch.cuda, name), **behaviour)
        monkeypatch.setattr(torch.cuda, name, mock)
        return mock

    return put


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[dict[str, Any]]]:
    """Notes what instances of a class of ``torch.cuda`` are made with, by the names of the real ``__new__``."""

    def put(name: str) -> list[dict[str, Any]]:
        signature = inspect.signature(getattr(torch.cuda, name))
        calls: list[dict[str, Any]] = []

        def make(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            assert not given.pop("kwargs", None), "an argument that the class does not name"
            calls.append(given)
            return getattr(sentinel, f"{name}{len(calls)}")

        monkeypatch.setattr(torch.cuda, name, make)
        return calls

    return put


def test_the_device_is_the_one_of_the_number(api: TorchStreams):
    assert api.device == DEVICE


def test_an_external_stream_is_of_the_device_and_not_of_the_current_one(api: TorchStreams, made: Any):
    calls = made("ExternalStream")
    assert api.external_stream(4096) is sentinel.ExternalStream1
    assert calls == [{"stream_ptr": 4096, "device": DEVICE}]


def test_a_new_stream_is_of_the_device_and_has_the_priority(
    api: TorchStreams, made: Any, stand_in: Any, monkeypatch: pytest.MonkeyPatch
):
    stand_in("current_stream")
    calls = made("Stream")
    for number in (1, 2):
        monkeypatch.setattr(getattr(sentinel, f"Stream{number}"), "cuda_stream", number, raising=False)
    assert api.new_stream() is sentinel.Stream1
    assert api.new_stream(-3) is sentinel.Stream2
    assert calls == [{"device": DEVICE, "priority": 0}, {"device": DEVICE, "priority": -3}]


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


def test_the_current_stream_is_that_of_the_device(api: TorchStreams, stand_in: Any, monkeypatch: pytest.MonkeyPatch):
    Runtime(monkeypatch)
    current = stand_in("current_stream")
    assert api.current_stream() is api.current_stream() is current.return_value
    current.assert_called_once_with(DEVICE)


@pytest.mark.parametrize("device", [0, 1])
def test_a_block_makes_a_stream_and_its_device_current_and_both_are_put_back(
    api: TorchStreams, monkeypatch: pytest.MonkeyPatch, device: int
):
    runtime = Runtime(monkeypatch, device)
    stream = Mock(stream_id=77, device_index=1, device_type=1)
    with suppress(KeyError), api.use_stream(stream):
        assert (runtime.device, runtime.current[1]) == (1, (77, 1, 1))
        raise KeyError
    assert (runtime.device, runtime.current[1]) == (device, (10, 1, 1))


def test_an_event_has_times_where_they_are_asked_for_and_only_there(api: TorchStreams, made: Any):
    calls = made("Event")
    assert api.new_event() is sentinel.Event1
    assert api.new_event(timing=True) is sentinel.Event2
    assert calls == [{"enable_timing": False}, {"enable_timing": True}]


@pytest.mark.parametrize(("device", "is_told"), [("cuda:1", True), ("cuda:0", False), ("cpu", False)])
def test_the_allocator_is_told_of_tensors_on_the_device_alone(api: TorchStreams, device: str, is_told: bool):
    tensor = Mock(spec=torch.Tensor, device=torch.device(device))
    api.record_use(tensor, sentinel.stream)
    assert tensor.record_stream.call_args_list == ([((sentinel.stream,),)] if is_told else [])


def test_waiting_is_for_the_whole_device(api: TorchStreams, stand_in: Any):
    wait = stand_in("synchronize")
    api.synchronize()
    wait.assert_called_once_with(DEVICE)


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("capturing", [0, 1])
def test_capturing_is_asked_of_the_devices_own_current_stream(
    api: TorchStreams, monkeypatch: pytest.MonkeyPatch, current: int, capturing: int
):
    runtime = Runtime(monkeypatch, current)
    runtime.capturing.add(capturing)
    monkeypatch.setattr(torch.cuda, "device", lambda device: api.use_stream(Mock(device_index=device.index)))
    assert api.is_capturing() is (capturing == 1)
    assert runtime.device == current


def test_graphs_and_their_pools_are_new_ones(api: TorchStreams, made: Any, stand_in: Any):
    calls, pool = made("CUDAGraph"), stand_in("graph_pool_handle")
    assert (api.new_graph(), api.new_graph()) == (sentinel.CUDAGraph1, sentinel.CUDAGraph2)
    assert calls == [{}, {}]
    assert api.new_graph_pool() is pool.return_value


@pytest.mark.parametrize(
    ("version", "apart"), [("2.11.0+cu130", False), ("2.12.1", False), ("2.13.0+cpu", True), ("3.0", True)]
)
def test_graphs_draw_apart_since_torch_gives_each_its_own_seed_and_offset(
    api: TorchStreams, monkeypatch: pytest.MonkeyPatch, version: str, apart: bool
):
    monkeypatch.setattr(torch, "__version__", version)
    assert api.draws_apart is apart


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_a_first_backward_is_run_where_the_caller_takes_no_gradients_too(mode: Any, monkeypatch: pytest.MonkeyPatch):
    ran = Mock(wraps=torch.Tensor.backward)
    monkeypatch.setattr(torch.Tensor, "backward", lambda self: ran(self))
    with mode():
        start_autograd(torch.device("cpu"))
    ran.assert_called_once()


def test_memory_is_asked_for_by_the_device(api: TorchStreams, stand_in: Any):
    reserved, free = stand_in("memory_reserved", return_value=5), stand_in("mem_get_info", return_value=(7, 11))
    assert (api.reserved_bytes(), api.free_bytes()) == (5, 7)
    for asked in (reserved, free):
        asked.assert_called_once_with(DEVICE)


def test_workspaces_and_the_cache_are_given_back(api: TorchStreams, stand_in: Any, monkeypatch: pytest.MonkeyPatch):
    clear, cache = Mock(), stand_in("empty_cache")
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", clear, raising=False)
    api.release_workspaces()
    clear.assert_called_once_with()
    cache.assert_not_called()
    api.empty_cache()
    cache.assert_called_once_with()


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


def test_streams_in_use_are_all_different_although_torch_hands_them_out_in_turn(
    api: TorchStreams, pool: dict[str, int]
):
    kept = [api.new_stream() for _ in range(31)]
    for _ in range(40):
        stream = api.new_stream()
        assert stream not in kept
        api.give_back(stream)
    assert len({*kept, api.new_stream()}) == 32


def test_the_current_stream_is_not_given_out_as_a_new_one(api: TorchStreams, pool: dict[str, int]):
    pool["current"] = 0
    assert api.new_stream() == PoolStream(1)


def test_more_streams_than_torch_has_are_an_error_and_those_of_another_priority_are_not(
    api: TorchStreams, pool: dict[str, int]
):
    kept = [api.new_stream() for _ in range(32)]
    with pytest.raises(BackendUnavailableError, match=r"no stream of priority 0 is free.*32 streams in use.*of the 32"):
        api.new_stream()
    assert pool["asked"] == 64
    assert api.new_stream(-1) not in kept
    api.give_back(kept[5])
    assert api.new_stream() == PoolStream(5)


class Current:
    """What torch knows of current streams while ``torch.cuda.graph`` itself, the real one, is at work."""

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


def test_a_capture_is_from_its_stream_into_its_pool_and_lets_other_threads_call_cuda(
    api: TorchStreams, current: Current
):
    graph: Any = Capture()
    with api.capture(graph, stream="the lane's", pool="a pool"):  # type: ignore[arg-type]
        assert current.stream == "the lane's"
    assert graph.begun == [("a pool", "thread_local", "the lane's")]
    assert current.stream == "the caller's"


@pytest.mark.parametrize("fails", ["begin", "end"])
def test_a_capture_that_fails_leaves_the_callers_stream_current(api: TorchStreams, current: Current, fails: str):
    graph: Any = Capture(fails=fails)
    with pytest.raises(RuntimeError, match=f"capture_{fails} failed"), api.capture(graph, stream="s", pool="p"):  # type: ignore[arg-type]
        pass
    assert current.stream == "the caller's"


def test_an_error_inside_a_capture_comes_out_of_it(api: TorchStreams, current: Current):
    graph: Any = Capture()
    with pytest.raises(ZeroDivisionError), api.capture(graph, stream="s", pool="p"):  # type: ignore[arg-type]
        1 / 0  # noqa: B018
    assert current.stream == "the caller's"
