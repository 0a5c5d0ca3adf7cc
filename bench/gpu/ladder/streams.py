"""Rungs about streams and the device: slots, events between contexts, SM ids, a graph over two lanes, SM targets.

Rungs run on lanes of the GPU, or in a rehearsal on the fake runtime. An error is also a reading.
"""

from __future__ import annotations

import ctypes
import itertools
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from bench.gpu.bench import Bench
from bench.gpu.ladder import SM_TARGET_SPEEDUP
from bench.record import Figure, median_figure, missing_figure, one_line
from mosaic.backends.cuda import driver as cuda
from mosaic.backends.cuda.backend import SM_TARGET_PAYS, CudaBackend
from mosaic.backends.cuda.environment import describe_nvml
from mosaic.backends.cuda.pool import CDP_SMS, StreamLoan
from mosaic.backends.streams.libraries import LibrarySettings
from mosaic.errors import MosaicError
from mosaic.microbench.kernels import half_type
from mosaic.microbench.settings import time_alone
from mosaic.microbench.variants import parts_of

Slots = tuple[int, ...]


@contextmanager
def on_lanes(bench: Bench) -> Iterator[CudaBackend]:
    """Yields the GPU's backend, or in a rehearsal one on the tests' fake runtime, which detects races."""
    if isinstance(bench.backend, CudaBackend):
        yield bench.backend
        return
    sys.path.insert(0, str(Path(__file__).parents[3] / "tests"))
    from fake_streams import FakeStreams
    from fake_streams.driver import FakeGreenDriver

    runtime = FakeStreams()
    with runtime.watching():
        yield CudaBackend(api=runtime, driver=FakeGreenDriver(16))


@contextmanager
def green_streams(backend: CudaBackend, partitions: Iterable[Slots]) -> Iterator[StreamLoan]:
    """Borrows streams of partitions without lanes, whose events a rung records itself."""
    loan = backend.borrow_streams(partitions)
    try:
        yield loan
    finally:
        backend.api.synchronize()
        loan.give_back()


def halves(backend: CudaBackend) -> tuple[Slots, Slots]:
    """Returns two partitions that together have all slots."""
    slots = backend.device.slots
    return slots[: len(slots) // 2], slots[len(slots) // 2 :]


def reading(look: Callable[[], Any]) -> Any:
    """Returns a reading, or its error as text, which does not affect the others."""
    try:
        return look()
    except Exception as error:  # any error is a reading
        return one_line(error, 160)


def rung(judge: Callable[[dict[str, Any]], str]) -> Callable[..., Callable[[Bench], Iterator[Figure]]]:
    """Converts a function that returns all readings of a rung to a measurement; an error is the reading ``error``."""

    def measurement(look: Callable[[Bench, CudaBackend], dict[str, Any]]) -> Callable[[Bench], Iterator[Figure]]:
        def measure(bench: Bench) -> Iterator[Figure]:
            with on_lanes(bench) as backend:
                readings = reading(lambda: look(bench, backend))
            result = {"error": readings} if isinstance(readings, str) else readings
            yield from figures_of(result)
            bench.verdict = judge(result)

        return measure

    return measurement


def figures_of(readings: Mapping[str, Any]) -> Iterator[Figure]:
    """Yields a figure per reading that is a number or an error; lists are only for the verdict."""
    for name, value in readings.items():
        if isinstance(value, bool | int | float):
            yield Figure(name=name, source="measured", value=float(value))
        elif isinstance(value, str):
            yield missing_figure(name, value)


def device(bench: Bench) -> Iterator[Figure]:
    with on_lanes(bench) as backend:
        result: dict[str, Any] = {
            "name": backend.device.name,
            "num_slots": backend.device.num_slots,
            "sms_per_slot": backend.device.sms_per_slot,
            "remainder_sms": backend.device.remainder_sms,
        }
    ordinal = bench.torch_device.index or 0
    result |= {
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()})",
        "num_sms": reading(lambda: torch.cuda.get_device_properties(bench.torch_device).multi_processor_count),
        "driver": reading(lambda: f"CUDA {cuda.describe_driver().version}"),
        "lacking": reading(lambda: ", ".join(function.name for function in cuda.describe_driver().missing)),
        "clocks": reading(lambda: _clocks(ordinal)),
        "free_gib": reading(lambda: torch.cuda.mem_get_info(bench.torch_device)[0] / 2**30),
    }
    with suppress(MosaicError):
        bench.driver_version = f"{describe_nvml().driver_version} ({result['driver']})"
    bench.notes += [f"{name}: {value}" for name, value in result.items() if isinstance(value, str)]
    yield from figures_of({name: value for name, value in result.items() if not isinstance(value, str)})
    bench.verdict = judge_device(result)


def judge_device(result: Mapping[str, Any]) -> str:
    """Returns a verdict on the device and its slots."""
    slots, size, rest = result["num_slots"], result["sms_per_slot"], result["remainder_sms"]
    words, total = f"{result['name']}: {slots} slots of {size} SMs and {rest} others", slots * size + rest
    if total != result["num_sms"]:
        words += f", in total {total}, but torch has {result['num_sms']}: quotas are not reliable"
    words += f"; driver {result['driver']}; torch {result['torch']}; {result['clocks']}"
    return words + (f"; the driver lacks {result['lacking']}" if result["lacking"] else "")


def _clocks(ordinal: int) -> str:
    import pynvml as nvml

    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByIndex(ordinal)
    now, most = (
        [read(handle, kind) for kind in (nvml.NVML_CLOCK_SM, nvml.NVML_CLOCK_MEM)]
        for read in (nvml.nvmlDeviceGetClockInfo, nvml.nvmlDeviceGetMaxClockInfo)
    )
    return f"SM clock {now[0]} of {most[0]} MHz, memory clock {now[1]} of {most[1]} MHz"


def products(bench: Bench) -> Iterator[Figure]:
    """Times matrix products on parts of the device, with and without SM targets.

    A target without effect means that the library already knows the stream's SMs, or ignores their number.
    """
    result = []
    with on_lanes(bench) as backend:
        for figure in _products(bench, backend):
            result.append(figure)
            yield figure
    speedups = speedups_of(result)
    if speedups:
        yield Figure(name=SM_TARGET_SPEEDUP, source="measured", value=statistics.geometric_mean(speedups.values()))
    bench.verdict = judge_products(speedups, sorted({figure.reason for figure in result if figure.reason}))


def _sm_target(device: torch.device, num_sms: int) -> AbstractContextManager[None]:
    return LibrarySettings(device).during(num_sms)


def _products(bench: Bench, backend: CudaBackend) -> Iterator[Figure]:
    device, dtype, settings = backend.torch_device, half_type(backend.torch_device), bench.settings(grid=4)
    size = 32 if bench.dry_run else 4096
    rows, weight = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    bias, out = torch.randn(size, device=device, dtype=dtype), torch.empty(size, size, device=device, dtype=dtype)
    products: dict[str, Callable[[], object]] = {
        "mm": lambda: torch.mm(rows, weight, out=out),
        "addmm (cuBLASLt)": lambda: torch.addmm(bias, rows, weight, out=out),
    }
    partitions = [backend.device.slots[:quota] for quota in settings.quotas(backend.device.num_slots)]
    with backend.open_lanes(partitions) as lanes:
        for slots, (product, call) in itertools.product(partitions, products.items()):
            lane = lanes.lane(slots)
            call()
            for target in ("none", "both"):
                labels = {"product": product, "quota": str(len(slots)), "target": target}
                if bench.budget.allows(f"{product} at {len(slots)} slots, target {target}"):
                    try:
                        with _sm_target(device, lane.num_sms or 0) if target == "both" else nullcontext():
                            times = time_alone(lane, call, settings).all_ms
                        yield median_figure("time_ms", times, labels=labels)
                    except Exception as error:  # other libraries may support it
                        yield missing_figure("time_ms", error, labels)


def speedups_of(figures: Sequence[Figure]) -> dict[str, float]:
    """Returns the gains by both targets on parts of the device, by product and quota."""
    times = {(f.labels["product"], int(f.labels["quota"]), f.labels["target"]): f.value for f in figures}
    whole, speedups = max((quota for _, quota, _ in times), default=0), {}
    for (product, quota, target), ms in times.items():
        plain = times.get((product, quota, "none"))
        if target == "both" and quota < whole and ms and plain:
            speedups[f"{product} at {quota} slots"] = plain / ms
    return speedups


def judge_products(speedups: Mapping[str, float], reasons: Sequence[str] = ()) -> str:
    """Returns a verdict on SM targets."""
    if not speedups:
        return f"not measured on parts of the device: {'; '.join(reasons) or 'no time was left'}"
    mean = statistics.geometric_mean(speedups.values())
    switch = "use SM targets, CudaBackend(sm_target=True)" if mean >= SM_TARGET_PAYS else "do not use SM targets"
    return f"{switch}: {mean:.2f}x, {', '.join(f'{what} {gain:.2f}x' for what, gain in speedups.items())}"


SPIN_NS = 20_000
"""Time for which a block of the probe occupies its SM, so that later blocks use other SMs."""


def events(bench: Bench) -> Iterator[Figure]:
    """Writes on one stream after a long kernel, and reads on another after an event, in all combinations."""
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
    """Returns a verdict on the order and timing by events."""
    wrong = [f"{name}: {value}" for name, value in result.items() if isinstance(value, str)]
    wrong += [f"{name}: the read does not see the write" for name, value in result.items() if value is False]
    backwards = [name for name, value in result.items() if name.startswith("ms") and _is_number(value) and value <= 0]
    wrong += [f"{name}: no time elapsed" for name in backwards]
    if not wrong:
        return "events order and time green streams and the default stream in all combinations"
    return (
        f"{'; '.join(wrong)}: green streams cannot be used with this driver, since torch itself records such events "
        "(record_stream, autograd); use plain streams, without quotas"
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
    """Returns the granted SMs and the probed ids of each partition."""
    with green_streams(backend, parts_of(quotas)) as loan:
        return [(record.granted_sms, record.sm_ids or ()) for record in loan.records.values()]


def judge_partitions(result: Mapping[str, Any]) -> str:
    """Returns a verdict on disjoint and complete layouts; a CDP module accounts for at most two shared SMs."""
    words = []
    for layout, seen in result.items():
        if isinstance(seen, str):
            words.append(f"{layout}: {seen}")
            continue
        shared = {sm for (_, first), (_, other) in combinations(seen, 2) for sm in set(first) & set(other)}
        unread = sum(not ids for _, ids in seen)
        wrong = [(granted, len(ids)) for granted, ids in seen if ids and len(ids) != granted]
        if shared:
            cause = "as after a module with dynamic parallelism" if len(shared) <= CDP_SMS else "QUOTAS DO NOT HOLD"
            words.append(f"{layout}: SMs {sorted(shared)} are shared, {cause}")
        if wrong:
            words.append(f"{layout}: " + ", ".join(f"{granted} granted, {count} seen" for granted, count in wrong))
        if unread:
            words.append(f"{layout}: the ids of {unread} partitions could not be read")
    return "; ".join(words) or f"disjoint, with the granted numbers of SMs: {', '.join(result)}"


def judge_capture(result: Mapping[str, Any]) -> str:
    if "error" in result:
        return f"stages cannot be captured: {result['error']}"
    words = [] if (result["left value"], result["right value"]) == (4.0, 8.0) else ["two replays have wrong values"]
    for side in ("left", "right"):
        if result[f"{side} ids"] is not None:
            inside, granted = (set(ids or ()) for ids in result[f"{side} ids"])
            if outside := inside - granted:
                words.append(f"the {side} half ran on {len(outside)} SMs outside its partition")
    if result["left ids"] is None:
        words.append("SM ids could not be read")
    return "; ".join(words) or "a graph spans two lanes, and each half stays on its SMs"


@rung(judge_capture)
def capture(bench: Bench, backend: CudaBackend) -> dict[str, Any]:
    """Captures one graph that forks from one lane to another, and replays it from the default stream."""
    api, device = backend.api, backend.torch_device
    probe = SmProbe.of(device) if bench.on_gpu else None
    with backend.open_lanes(halves(backend)) as lanes:
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


class SmProbe:
    """Mosaic's probe kernel, launched through the driver, so it can be captured.

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
        """Compiles the probe for a device."""
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        return cls(cuda.CudaDriver(device.index or 0).probe_image(), num_sms)

    def launch(self, address: int, num_words: int, stream: int) -> None:
        """Sets a bit at ``address`` for each SM of the stream's kernels."""
        words = (address, num_words, SPIN_NS), (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64)
        function = self._driver.CUfunction(int(self._kernel))
        self._call("cuLaunchKernel", function, self._blocks, 1, 1, 1024, 1, 1, 0, stream, words, 0)

    def _call(self, name: str, *arguments: Any) -> Any:
        status, *result = getattr(self._driver, name)(*arguments)
        if int(status) != 0:
            raise RuntimeError(f"{name} returned {status}")
        return result[0] if result else None


def sm_ids(words: Sequence[int]) -> tuple[int, ...]:
    """Returns the ids of set bits."""
    return tuple(32 * index + bit for index, word in enumerate(words) for bit in range(32) if word >> bit & 1)
