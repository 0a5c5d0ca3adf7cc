"""Rungs on the device as a whole: what it is, and whether libraries should be told how much of it they have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from bench.gpu.bench import Bench
from bench.gpu.ladder.lanes import figures_of, on_lanes, reading
from bench.gpu.unknowns import measure_sm_target
from bench.record import Figure
from mosaic.backends.cuda.driver import driver as cuda
from mosaic.errors import MosaicError

PAYS = 1.03
"""Speed-up of a product from which on an SM target counts as a gain."""


def device(bench: Bench) -> Iterator[Figure]:
    """Reads versions, clocks, SMs and slots."""
    with on_lanes(bench) as backend:
        found: dict[str, Any] = {
            "name": backend.device.name,
            "num_slots": backend.device.num_slots,
            "sms_per_slot": backend.device.sms_per_slot,
            "remainder_sms": backend.device.remainder_sms,
        }
    found |= {
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()})",
        "num_sms": reading(lambda: torch.cuda.get_device_properties(bench.torch_device).multi_processor_count),
        "driver": reading(lambda: f"CUDA {cuda.describe_driver().version}"),
        "lacking": reading(lambda: ", ".join(function.name for function in cuda.describe_driver().missing)),
        "clocks": reading(lambda: _clocks(bench.torch_device.index or 0)),
        "free_gib": reading(lambda: torch.cuda.mem_get_info(bench.torch_device)[0] / 2**30),
    }
    with suppress(MosaicError):
        bench.driver_version = f"{cuda.describe_nvml().driver_version} ({found['driver']})"
    bench.notes += [f"{name}: {value}" for name, value in found.items() if isinstance(value, str)]
    yield from figures_of({name: value for name, value in found.items() if not isinstance(value, str)})
    bench.verdict = judge_device(found)


def judge_device(found: Mapping[str, Any]) -> str:
    """Says what the device is, and whether its slots add up."""
    slots, size, rest = found["num_slots"], found["sms_per_slot"], found["remainder_sms"]
    words, total = f"{found['name']}: {slots} slots of {size} SMs and {rest} left over", slots * size + rest
    if total != found["num_sms"]:
        words += f", which is {total} where torch says {found['num_sms']}: do not trust quotas here"
    words += f"; driver {found['driver']}; torch {found['torch']}; {found['clocks']}"
    return words + (f"; the driver lacks {found['lacking']}" if found["lacking"] else "")


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
    """Times matrix products at four quotas, with and without an SM target."""
    found = []
    with on_lanes(bench) as backend:
        for figure in measure_sm_target(replace(bench, backend=backend)):
            found.append(figure)
            yield figure
    bench.verdict = judge_products(found)


def judge_products(figures: Sequence[Figure]) -> str:
    """Says at which quotas telling a library its SMs gained, and what that means for the switch."""
    times = {(f.labels["product"], int(f.labels["quota"]), f.labels["target"]): f.value for f in figures}
    lines, gains, whole = [], [], max((quota for _, quota, _ in times), default=0)
    for (product, quota, target), ms in times.items():
        plain = times.get((product, quota, "none"))
        if target != "none" and ms and plain:
            lines.append(f"{product} at {quota} slots with {target}'s target {plain / ms:.2f}x")
            gains += [plain / ms] if quota < whole else []
    if not gains:
        reasons = sorted({figure.reason for figure in figures if figure.reason})
        return f"nothing was measured below the whole device: {'; '.join(reasons) or 'no time was left'}"
    paying = sum(gain >= PAYS for gain in gains)
    switch = "leave SM targets off"
    if paying:
        switch = f"SM targets pay in {paying} of {len(gains)} cases, CudaBackend(sm_target=True)"
    return f"{switch}: {', '.join(lines)}"
