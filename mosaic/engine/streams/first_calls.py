"""The first calls of modules on a device: libraries get ready, and what launching costs is measured."""

from __future__ import annotations

import time
from collections.abc import Iterable

from torch import nn

from mosaic.backends.streams.api import StreamApi
from mosaic.backends.streams.lanes import run_aside
from mosaic.find.restore import preserved
from mosaic.profiler import Subject


def warm_up(model: nn.Module, subjects: Iterable[Subject], api: StreamApi) -> float:
    """Lets libraries make their first calls (plans, autotuning) off the lanes, where these have failed for others.

    Returns:
        The time that one thread takes to launch the modules forward and backward, as a share of the time that they
        take on the whole device, gaps in which it waits for launches included: near 1 where launches decide.
    """
    named = list(subjects)
    with preserved(model, alone=named, elsewhere=True):
        for _ in range(2):  # the first calls are slow, and no measure of others
            times = run_aside(api, lambda: [_launch_and_device_ms(subject, api) for subject in named])
    device_ms = sum(device for _, device in times)
    return sum(launch for launch, _ in times) / device_ms if device_ms else 0.0


def _launch_and_device_ms(subject: Subject, api: StreamApi) -> tuple[float, float]:
    """Runs one module on an idle device: what is queued for it then blocks no launch."""
    start, end = api.new_event(timing=True), api.new_event(timing=True)
    api.synchronize()
    start.record(api.current_stream())
    began = time.perf_counter()
    subject.backward(subject.forward())
    launch_ms = (time.perf_counter() - began) * 1e3
    end.record(api.current_stream())
    api.synchronize()
    return launch_ms, start.elapsed_time(end)
