"""How much memory a module's phases need at their height, by the allocator's own count."""

from __future__ import annotations

import statistics

import torch

from mosaic.backends.base import Lanes
from mosaic.backends.streams.lanes import StreamLanes
from mosaic.backends.streams.memory import measure_lane_memory
from mosaic.profiler.subject import Subject


def phase_peaks(subject: Subject, device: torch.device) -> tuple[int, int]:
    """Runs a step on a GPU; returns the most bytes in use during forward and backward, each above those before it.

    The allocator counts when memory is asked for, by the launching thread: nothing waits for the device. Its own
    record of the highest use on the device is reset.
    """
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    outputs = subject.forward()
    forward = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.reset_peak_memory_stats(device)
    between = torch.cuda.memory_allocated(device)
    subject.backward(outputs)
    backward = torch.cuda.max_memory_allocated(device) - between
    return max(0, forward), max(0, backward)


def lane_bytes_of(lanes: Lanes) -> int:
    """Returns the bytes that libraries and the allocator keep for one lane, the median of all; 0 on the host."""
    if not isinstance(lanes, StreamLanes):
        return 0
    return round(statistics.median(found.reserved_bytes for found in measure_lane_memory(lanes)))
