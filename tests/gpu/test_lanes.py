"""Lanes on a real GPU: confinement of forward and backward, independence, memory, errors.

What lanes promise in general is in ``tests/contract``, whose cases for ``cuda`` are marked ``gpu`` too.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mosaic.backends.cuda import driver as cuda
from mosaic.backends.cuda.backend import CudaBackend

pytestmark = pytest.mark.gpu

Halves = tuple[tuple[int, ...], tuple[int, ...]]
LONG_CYCLES = 2_000_000_000
"""About a second of one SM."""


class Look(torch.autograd.Function):
    """Passes a tensor on, and notes the SMs that the current stream's kernels run on, forward and backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, seen: dict[str, Any]) -> torch.Tensor:
        ctx.seen = seen
        seen["forward"] = look(value)
        return value * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.seen["backward"] = look(gradients[0])
        ctx.seen["thread"] = threading.get_ident()
        return gradients[0], None


def look(value: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    stream = int(torch.cuda.current_stream(value.device).cuda_stream)
    return stream, cuda.CudaDriver(value.device.index or 0).probe_stream(stream)


def test_forward_and_backward_stay_on_the_sms_of_their_partition(cuda_backend: CudaBackend, halves: Halves):
    with cuda_backend.open_lanes(halves) as lanes:
        seen: list[dict[str, Any]] = [{}, {}]
        weight = torch.ones(64, 64, device=cuda_backend.torch_device, requires_grad=True)

        def forward(number: int) -> torch.Tensor:
            return Look.apply(weight @ weight, seen[number]).sum()

        losses = [lane.submit(lambda number=number: forward(number)) for number, lane in enumerate(lanes)]
        total = sum(ticket.wait() for ticket in losses)
        total.backward()  # from the caller's stream, on autograd's thread
        torch.cuda.synchronize()
        for lane, record, found in zip(lanes, lanes.partitions, seen, strict=True):
            assert found["thread"] != threading.get_ident()
            for phase in ("forward", "backward"):
                stream, sms = found[phase]
                assert stream == lane.stream.cuda_stream, phase
                assert set(sms) == set(record.sm_ids), phase


def test_a_long_kernel_in_one_partition_does_not_delay_a_short_one_in_another(
    cuda_backend: CudaBackend, halves: Halves
):
    with cuda_backend.open_lanes(halves) as lanes:
        first, second = lanes
        second.submit(lambda: torch.ones(256, device=cuda_backend.torch_device).sum())
        lanes.drain()
        long = first.submit(lambda: torch.cuda._sleep(LONG_CYCLES))
        short = second.submit(lambda: torch.ones(256, device=cuda_backend.torch_device).sum())
        ends = [lane.mark() for lane in (second, first)]
        short.end.synchronize()
        assert not long.done
        assert ends[0].ms_until(ends[1]) > 0.0


def test_results_survive_reuse_of_memory_between_streams(cuda_backend: CudaBackend, halves: Halves):
    with cuda_backend.open_lanes(halves) as lanes:
        total = torch.zeros((), device=cuda_backend.torch_device)
        for number in range(200):
            for lane in lanes:
                filled = lane.submit(partial(torch.full, (1 << 16,), float(number), device="cuda")).wait()
                total += filled.mean()
                del filled
        assert total.item() == 2 * sum(range(200))


def test_tensors_and_graphs_may_outlive_their_lanes(cuda_backend: CudaBackend, halves: Halves):
    weight = torch.ones(128, 128, device=cuda_backend.torch_device, requires_grad=True)
    kept = [torch.ones(128, 128, device=cuda_backend.torch_device)]

    def forward() -> torch.Tensor:
        lanes = cuda_backend.open_lanes(halves)
        for lane in lanes:
            cuda_backend.api.record_use(kept[0], lane.stream)
        loss: torch.Tensor = lanes.lane(halves[1]).submit(lambda: (kept[0] @ weight).sum()).wait()
        lanes.close()
        return loss

    loss = forward()
    gc.collect()
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.sum().item() == 128.0**3
    kept.clear()  # the allocator now notes an event on each stream that used it
    del loss
    torch.cuda.empty_cache()
    torch.cuda.synchronize()


def test_plain_and_prioritised_streams_are_lanes_of_the_whole_device(cuda_backend: CudaBackend, halves: Halves):
    with cuda_backend.open_plain_lanes(halves, priorities=(-1, 0)) as lanes:
        assert [lane.stream.priority for lane in lanes] == [-1, 0]
        whole = cuda.describe_devices()[0].num_sms
        assert all(len(cuda.CudaDriver(0).probe_stream(lane.stream.cuda_stream)) == whole for lane in lanes)


STEP = """
import sys, torch
import torch.cuda._sanitizer as sanitizer
sanitizer.enable_cuda_sanitizer()
from mosaic.backends.cuda.backend import CudaBackend
from mosaic.backends.streams.lanes import run_aside
backend = CudaBackend()
slots = backend.device.slots
halves = slots[: len(slots) // 2], slots[len(slots) // 2 :]
lanes = backend.open_lanes(halves)
weights = [torch.ones(64, 64, device="cuda", requires_grad=True) for _ in halves]
for step in range(3):
    given = torch.ones(64, 64, device="cuda")
    tickets = [
        lane.submit(lambda weight=weight: (given @ weight).relu())
        for lane, weight in zip(lanes, weights, strict=True)
    ]
    if sys.argv[1] == "ordered":
        parts = [ticket.wait() for ticket in tickets]
    else:
        parts = [ticket.result for ticket in tickets]
    joined = parts[0].detach() + parts[1].detach()
torch.cuda.synchronize()
lanes.close()
print("the step ended")
"""


@pytest.mark.parametrize("order", ["ordered", "unordered"])
def test_torchs_sanitizer_finds_no_race_in_a_step_and_finds_one_without_the_order(order: str, tmp_path: Path):
    script = tmp_path / "step.py"
    script.write_text(STEP)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path])}
    done = subprocess.run(
        [sys.executable, str(script), order], env=environ, capture_output=True, text=True, timeout=240
    )
    told = done.stdout + done.stderr
    if order == "ordered":
        assert done.returncode == 0, told
        assert "CSAN detected" not in told
        assert "the step ended" in told
    else:
        assert "CSAN detected" in told, told
