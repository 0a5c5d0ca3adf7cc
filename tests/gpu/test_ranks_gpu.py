"""One rank under NCCL: the engine of several ranks on a real GPU computes what a plain loop computes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks.graphs import plan_for
from ranks.training import Model, batch, loss_of
from torch import nn

from mosaic.backends.base import Backend
from mosaic.backends.cuda.backend import CudaBackend
from mosaic.plan import Plan
from mosaic.ranks.colocate import colocate_ranks

pytestmark = pytest.mark.gpu
FIRST = ("image", "text", "audio")


@pytest.fixture(scope="module")
def backend(cuda_backend: CudaBackend) -> Backend:
    return cuda_backend


@pytest.fixture
def alone(backend: Backend, tmp_path: Path) -> Iterator[None]:
    assert dist.is_nccl_available(), "torch for this GPU was built without NCCL, which several ranks need"
    store, device = dist.FileStore(str(tmp_path / "store"), 1), backend.torch_device
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1, device_id=device)
    yield
    dist.destroy_process_group()


def plan_of(model: nn.Module, sample: dict[str, torch.Tensor], backend: Backend) -> Plan:
    """Returns a plan with the towers side by side, and the rest on all their slots."""
    slots = {name: (slot,) for slot, name in enumerate(FIRST)}
    members = dict.fromkeys((*FIRST, "backbone", "head"), (0,))
    return plan_for(model, sample, members, 1, backend=backend, slots=lambda name: slots.get(name, (0, 1, 2)))


def on(device: torch.device, step: int) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device) for name, tensor in batch(step, 8).items()}


def test_one_rank_under_nccl_trains_as_a_plain_loop(backend: Backend, alone: None):
    device = backend.torch_device
    torch.manual_seed(0)
    model = Model().to(device)
    twin = copy.deepcopy(model)
    plan = plan_of(model, on(device, 0), backend)
    handle = colocate_ranks(model, sample=on(device, 0), plan=plan, backend=backend)
    for one in (model, twin):
        optimizer = torch.optim.AdamW(one.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cuda")
        for step in range(5):
            for micro in range(2):
                scaler.scale(loss_of(one(**on(device, 10 * step + micro)))).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(one.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    found = handle.full_state_dict()
    spans = {(span.phase, span.module) for span in handle.timeline().spans}
    handle.remove()
    assert {(phase, name) for phase in ("forward", "backward") for name in FIRST} <= spans
    for name, tensor in twin.state_dict().items():
        assert found[name].device == tensor.device
        torch.testing.assert_close(found[name], tensor, atol=1e-4, rtol=1e-3)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_the_rows_of_a_step_are_told_without_waiting_for_the_device(backend: Backend, alone: None):
    device = backend.torch_device
    model = Model().to(device)
    plan = plan_of(model, on(device, 0), backend)
    handle = colocate_ranks(model, sample=on(device, 0), plan=plan, backend=backend)
    given = [on(device, step) for step in range(3)]
    loss_of(model(**given[0])).backward()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in (1, 2):
            loss_of(model(**given[step])).backward()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    handle.remove()
