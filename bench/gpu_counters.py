"""GPM, the hardware's counters through NVML: can they be read here, as root and as nobody, and what do they tell?"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.gpu.bench import Bench
from bench.record import Figure, missing_figure, one_line
from mosaic.microbench.kernels import half_type

METRICS = {2: "sm_util_percent", 3: "sm_occupancy_percent", 5: "tensor_util_percent", 10: "dram_bandwidth_percent"}
"""By NVML's number."""
BETWEEN_S = 0.6
"""Time between the two samples; NVML wants more than 100 ms."""
NOBODY = 65534


def measure_counters(bench: Bench) -> Iterator[Figure]:
    """Reads GPM over a while of matrix products, as the user that runs this, and as nobody if that is root."""
    size = 64 if bench.dry_run else 8192
    dtype = half_type(bench.torch_device)
    left, right, out = (torch.randn(size, size, device=bench.torch_device, dtype=dtype) for _ in range(3))

    def keep_busy() -> None:
        torch.mm(left, right, out=out)
        bench.synchronize()

    ordinal = bench.torch_device.index or 0
    users = {"root": None, "nobody": NOBODY} if os.geteuid() == 0 else {f"user {os.geteuid()}": None}
    for user, number in users.items():
        found = apart(lambda: read_gpm(ordinal), as_user=number, meanwhile=keep_busy)
        if "error" in found:
            yield missing_figure("gpm", found["error"], {"user": user})
        for name, value in found.get("values", {}).items():
            yield Figure(name=name, source="measured", value=value, labels={"user": user})


def read_gpm(ordinal: int) -> dict[str, Any]:
    """Takes two samples and returns the metrics between them, in percent of the whole device."""
    import pynvml as nvml

    nvml.nvmlInit()
    device = nvml.nvmlDeviceGetHandleByIndex(ordinal)
    if not nvml.nvmlGpmQueryDeviceSupport(device).isSupportedDevice:
        return {"error": "NVML says that this device has no GPM"}
    first, second = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
    nvml.nvmlGpmSampleGet(device, first)
    time.sleep(BETWEEN_S)
    nvml.nvmlGpmSampleGet(device, second)
    asked = nvml.c_nvmlGpmMetricsGet_t()
    asked.version = nvml.NVML_GPM_METRICS_GET_VERSION
    asked.numMetrics = len(METRICS)
    asked.sample1, asked.sample2 = first, second
    for index, number in enumerate(METRICS):
        asked.metrics[index].metricId = number
    nvml.nvmlGpmMetricsGet(asked)
    found = {
        name: float(asked.metrics[index].value)
        for index, name in enumerate(METRICS.values())
        if asked.metrics[index].nvmlReturn == 0
    }
    return {"values": found} if found else {"error": "NVML took two samples and made no metric of them"}


def apart(
    read: Callable[[], dict[str, Any]], *, as_user: int | None, meanwhile: Callable[[], None], seconds: float = 15
) -> dict[str, Any]:
    """Runs ``read`` in a forked process, as another user if asked to, while this one does something again and again."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        _answer(read, as_user, send)
    os.close(send)
    text = b""
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            meanwhile()
            if select.select([receive], [], [], 0)[0]:
                piece = os.read(receive, 65536)
                if not piece:
                    break
                text += piece
        else:
            os.kill(child, 9)
            return {"error": f"no answer in {seconds:.0f} s"}
    finally:
        os.close(receive)
        os.waitpid(child, 0)
    return json.loads(text) if text else {"error": "the process that asked ended without an answer"}


def _answer(read: Callable[[], dict[str, Any]], as_user: int | None, send: int) -> None:
    try:
        if as_user is not None:
            os.setgroups([])
            os.setgid(as_user)
            os.setuid(as_user)
        found = read()
    except BaseException as error:
        found = {"error": one_line(error)}
    os.write(send, json.dumps(found).encode())
    os._exit(0)
