"""Rungs on streams: events between contexts, SM ids of partitions, and a graph over two of them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import torch

from bench.gpu.bench import Bench
from bench.gpu.ladder.lanes import Slots, figures_of, green_streams, halves, on_lanes, reading, readings
from bench.record import Figure
from mosaic.backends.cuda import driver as cuda
from mosaic.backends.cuda.backend import CudaBackend
from mosaic.backends.cuda.pool import CDP_SMS
from mosaic.microbench.variants import parts_of

SPIN_NS = 20_000
"""A block of the probe holds its SM for this time, so that later ones go to the others."""


def events(bench: Bench) -> Iterator[Figure]:
    """Lets one stream write behind a long kernel and another read behind an event, every way round."""
    size = 8 if bench.dry_run else 4096
    with on_lanes(bench) as backend, green_streams(backend, halves(backend)) as loan:
        left, right = (backend.api.external_stream(handle) for handle in loan.streams.values())
        streams = {"default": backend.api.current_stream(), "left": left, "right": right}
        ways = [("default", "left"), ("left", "default"), ("left", "right")]
        result = {
            f"{a} before {b}": reading(lambda a=a, b=b: _ordered(backend, streams[a], streams[b], size))
            for a, b in ways
        }
        result |= {
            f"ms {a} to {b}": reading(lambda a=a, b=b: _elapsed(backend, streams[a], streams[b], size)) for a, b in ways
        }
    yield from figures_of(result)
    bench.verdict = judge_events(result)


def judge_events(result: Mapping[str, Any]) -> str:
    """Says which ways events order and time, and what to do where they do not."""
    wrong = [f"{name}: {value}" for name, value in result.items() if isinstance(value, str)]
    wrong += [f"{name}: what was written is not seen" for name, value in result.items() if value is False]
    backwards = [name for name, value in result.items() if name.startswith("ms") and _is_number(value) and value <= 0]
    wrong += [f"{name}: no time passed" for name in backwards]
    if not wrong:
        return "events order and time green streams and the default stream, every way"
    return (
        f"{'; '.join(wrong)}: green streams cannot be used with this driver, since torch itself records such events "
        "(record_stream, autograd); only plain streams are left, without quotas"
    )


def _is_number(value: object) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool)


def _delay(backend: CudaBackend, size: int) -> None:
    """Launches some milliseconds of work on the current stream."""
    square = torch.randn(size, size, device=backend.torch_device)
    for _ in range(8):
        square = square @ square / size


def _ordered(backend: CudaBackend, first: Any, second: Any, size: int) -> bool:
    api = backend.api
    source = torch.zeros(1 << 16, device=backend.torch_device)
    target = torch.zeros_like(source)
    api.synchronize()
    with api.use_stream(first):
        _delay(backend, size)
        source.fill_(1.0)
    event = api.new_event()
    event.record(first)
    event.wait(second)
    with api.use_stream(second):
        target.copy_(source)
    api.synchronize()
    return bool((target == 1.0).all())


def _elapsed(backend: CudaBackend, first: Any, second: Any, size: int) -> float:
    api = backend.api
    start, middle, end = (api.new_event(timing=True) for _ in range(3))
    start.record(first)
    with api.use_stream(first):
        _delay(backend, size)
    middle.record(first)
    middle.wait(second)
    end.record(second)
    api.synchronize()
    return float(start.elapsed_time(end))


def partitions(bench: Bench) -> Iterator[Figure]:
    """Opens layouts and reads back the SMs of each partition."""
    with on_lanes(bench) as backend:
        count = backend.device.num_slots
        layouts = [(count // 2, count - count // 2), (count - count // 4, count // 4), (1,) * count]
        result = {"+".join(map(str, quotas)): reading(lambda q=quotas: _seen(backend, q)) for quotas in layouts}
        bench.notes += backend.notes
    for layout, seen in result.items():
        if isinstance(seen, str):
            yield from figures_of({layout: seen})
        else:
            num_seen = float(sum(len(ids) for _, ids in seen))
            yield Figure(name="num_sms_seen", source="measured", value=num_seen, labels={"layout": layout})
    bench.verdict = judge_partitions(result)


def _seen(backend: CudaBackend, quotas: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
    """Returns the SMs granted and the ids seen, for each partition."""
    with green_streams(backend, parts_of(quotas)) as loan:
        return [(record.granted_sms, record.sm_ids or ()) for record in loan.records.values()]


def judge_partitions(result: Mapping[str, Any]) -> str:
    """Says which layouts are disjoint and full; at most two shared SMs are what a CDP module takes."""
    words = []
    for layout, seen in result.items():
        if isinstance(seen, str):
            words.append(f"{layout}: {seen}")
            continue
        shared = {sm for (_, one), (_, other) in combinations(seen, 2) for sm in set(one) & set(other)}
        unread = sum(not ids for _, ids in seen)
        wrong = [(granted, len(ids)) for granted, ids in seen if ids and len(ids) != granted]
        if shared:
            cause = "as after a module with dynamic parallelism" if len(shared) <= CDP_SMS else "QUOTAS DO NOT HOLD"
            words.append(f"{layout}: SMs {sorted(shared)} are shared, {cause}")
        if wrong:
            words.append(f"{layout}: " + ", ".join(f"{granted} granted, {count} seen" for granted, count in wrong))
        if unread:
            words.append(f"{layout}: the ids of {unread} partitions were not read")
    return "; ".join(words) or f"disjoint, and as many SMs as granted: {', '.join(result)}"


def capture(bench: Bench) -> Iterator[Figure]:
    """Captures one graph that forks from one lane to another, and replays it from the default stream."""
    with on_lanes(bench) as backend:
        result = readings(lambda: _captured(bench, backend, halves(backend)))
    yield from figures_of(result)
    bench.verdict = judge_capture(result)


def _captured(bench: Bench, backend: CudaBackend, parts: tuple[Slots, Slots]) -> dict[str, Any]:
    api, device = backend.api, backend.torch_device
    probe = SmProbe.of(device) if bench.on_gpu else None
    with backend.open_lanes(parts) as lanes:
        both = list(lanes)
        values = [torch.full((1024,), float(number), device=device) for number in (1, 2)]
        seen = [torch.zeros(32, dtype=torch.int32, device=device) for _ in both]
        api.synchronize()
        graph = api.new_graph()

        def work(number: int) -> None:
            values[number].mul_(2.0)
            if probe is not None:
                probe.launch(seen[number].data_ptr(), seen[number].numel(), both[number].stream.cuda_stream)

        with api.capture(graph, stream=both[0].stream, pool=api.new_graph_pool()):
            fork, join = api.new_event(), api.new_event()
            fork.record(both[0].stream)
            fork.wait(both[1].stream)
            work(0)
            with api.use_stream(both[1].stream):
                work(1)
            join.record(both[1].stream)
            join.wait(both[0].stream)
        for _ in range(2):
            api.synchronize()
            graph.replay()
        api.synchronize()
        result: dict[str, Any] = {
            f"{side} value": float(value[0]) for side, value in zip(("left", "right"), values, strict=True)
        }
        for side, bits, record in zip(("left", "right"), seen, lanes.partitions, strict=True):
            result[f"{side} ids"] = None if probe is None else (sm_ids(bits.tolist()), record.sm_ids)
        graph.reset()
    return result


def judge_capture(result: Mapping[str, Any]) -> str:
    if "error" in result:
        return f"stages cannot be captured here: {result['error']}"
    words = [] if (result["left value"], result["right value"]) == (4.0, 8.0) else ["two replays left wrong values"]
    for side in ("left", "right"):
        if result[f"{side} ids"] is not None:
            inside, granted = (set(ids or ()) for ids in result[f"{side} ids"])
            if outside := inside - granted:
                words.append(f"the {side} half ran on {len(outside)} SMs outside of its partition")
    if result["left ids"] is None:
        words.append("SM ids were not read")
    return "; ".join(words) or "a graph spans two lanes, and each half stays on its SMs"


class SmProbe:
    """The product's probe kernel, launched through the driver so that it can be captured.

    Args:
        image: The compiled kernel.
        num_sms: SMs of the device.
    """

    def __init__(self, image: bytes, num_sms: int) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._blocks = 4 * num_sms  # two of 1,024 threads fill an SM
        self._image = image
        library = self._call("cuLibraryLoadData", self._image, [], [], 0, [], [], 0)
        self._kernel = self._call("cuLibraryGetKernel", library, b"mosaic_smid")

    @classmethod
    def of(cls, device: torch.device) -> SmProbe:
        """Compiles it for a device."""
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        return cls(cuda.CudaDriver(device.index or 0).probe_image(), num_sms)

    def launch(self, address: int, num_words: int, stream: int) -> None:
        """Sets a bit at ``address`` for each SM that the stream's kernels run on."""
        words = (address, num_words, SPIN_NS), (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64)
        function = self._driver.CUfunction(int(self._kernel))
        self._call("cuLaunchKernel", function, self._blocks, 1, 1, 1024, 1, 1, 0, stream, words, 0)

    def _call(self, name: str, *arguments: Any) -> Any:
        status, *result = getattr(self._driver, name)(*arguments)
        if int(status) != 0:
            raise RuntimeError(f"{name} returned {status}")
        return result[0] if result else None


def sm_ids(words: Sequence[int]) -> tuple[int, ...]:
    """Returns the ids whose bits are set."""
    return tuple(32 * index + bit for index, word in enumerate(words) for bit in range(32) if word >> bit & 1)
