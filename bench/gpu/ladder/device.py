"""Rungs on the device as a whole: what it is, and whether libraries should be told how much of it they have."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from bench.gpu.bench import Bench
from bench.gpu.ladder import SM_TARGET_SPEEDUP
from bench.gpu.ladder.lanes import figures_of, on_lanes, reading
from bench.record import Figure, median_figure, missing_figure
from mosaic.backends.cuda import driver as cuda
from mosaic.backends.cuda.backend import SM_TARGET_PAYS, CudaBackend
from mosaic.backends.cuda.environment import describe_nvml
from mosaic.backends.streams.libraries import (
    LibrarySettings,
    carveout_calls,
    carveout_for,
    cublas_calls,
    current_cublas_handle,
    loaded_cublas,
)
from mosaic.errors import MosaicError
from mosaic.microbench.kernels import half_type
from mosaic.microbench.settings import time_alone


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
        "fine slots": reading(lambda: cuda.CudaDriver(ordinal).describe_slots(fine=True).num_slots),
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
    """Says what the device is, and whether its slots add up."""
    slots, size, rest = result["num_slots"], result["sms_per_slot"], result["remainder_sms"]
    words, total = f"{result['name']}: {slots} slots of {size} SMs and {rest} left over", slots * size + rest
    if total != result["num_sms"]:
        words += f", which is {total} where torch says {result['num_sms']}: do not trust quotas here"
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
    """Times matrix products on parts of the device, with and without telling libraries how many SMs they have.

    If a target changes nothing, the library sees the green stream by itself, or its choice does not depend on it.
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
            for target in ("none", "torch", "cublas", "both"):
                labels = {"product": product, "quota": str(len(slots)), "target": target}
                if bench.budget.allows(f"{product} at {len(slots)} slots, target {target}"):
                    try:
                        with _told(target, lane.num_sms or 0, device):
                            times = time_alone(lane, call, settings).all_ms
                        yield median_figure("time_ms", times, labels=labels)
                    except Exception as error:  # what one library refuses, the others may do
                        yield missing_figure("time_ms", error, labels)


@contextmanager
def _told(target: str, num_sms: int, device: torch.device) -> Iterator[None]:
    """Tells torch (cuBLASLt's products), cuBLAS, or both how many SMs they have; both is what the product does."""
    if target == "both":
        with LibrarySettings(device, sm_target=True).during(num_sms):
            yield
        return
    if target == "none":
        yield
        return
    if target == "torch":
        (get, put), value = carveout_calls(), carveout_for(num_sms, device)
    else:
        (get, put), value = cublas_calls(loaded_cublas(), current_cublas_handle(device)), num_sms
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


def speedups_of(figures: Sequence[Figure]) -> dict[str, float]:
    """Returns what both targets together gain below the whole device, by product and quota."""
    times = {(f.labels["product"], int(f.labels["quota"]), f.labels["target"]): f.value for f in figures}
    whole, speedups = max((quota for _, quota, _ in times), default=0), {}
    for (product, quota, target), ms in times.items():
        plain = times.get((product, quota, "none"))
        if target == "both" and quota < whole and ms and plain:
            speedups[f"{product} at {quota} slots"] = plain / ms
    return speedups


def judge_products(speedups: Mapping[str, float], reasons: Sequence[str] = ()) -> str:
    """Says what libraries gain by knowing their SMs, and what that means for the switch."""
    if not speedups:
        return f"nothing was measured below the whole device: {'; '.join(reasons) or 'no time was left'}"
    mean = statistics.geometric_mean(speedups.values())
    switch = "SM targets pay, CudaBackend(sm_target=True)" if mean >= SM_TARGET_PAYS else "leave SM targets off"
    return f"{switch}: {mean:.2f}x, {', '.join(f'{what} {gain:.2f}x' for what, gain in speedups.items())}"
