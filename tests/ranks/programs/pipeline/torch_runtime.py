"""A schedule that was written as CSV, run by torch's own runtime of pipelines."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from pipeline_cases import chain, images
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from mosaic.pipelining.partition import Request
from mosaic.pipelining.planner import plan_baseline
from mosaic.pipelining.torch_csv import to_torch_csv

MICROBATCHES, WIDTH = 4, 3


def on_two_ranks(rank: int, size: int, folder: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder.parent}/store", rank=rank, world_size=size
    )
    step = images(*[1] * MICROBATCHES)
    planned = plan_baseline("megatron", Request(model=chain(8), num_ranks=size, microbatches=step), step)
    file = folder.parent / f"schedule-{rank}.csv"
    file.write_text(to_torch_csv(planned.schedule()))

    torch.manual_seed(0)
    modules = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2 * size)]
    plain = nn.Sequential(*copy.deepcopy(modules))
    batch, target = torch.randn(2 * MICROBATCHES, WIDTH), torch.randn(2 * MICROBATCHES, WIDTH)
    for x, y in zip(batch.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
        nn.functional.mse_loss(plain(x), y).backward()

    own = {stage: modules[stage] for stage in (rank, size + rank)}
    stages = [PipelineStage(module, stage, 2 * size, torch.device("cpu")) for stage, module in own.items()]
    runtime = _PipelineScheduleRuntime(stages, MICROBATCHES, loss_fn=nn.functional.mse_loss, scale_grads=False)
    runtime._load_csv(str(file))
    runtime.step(*([batch] if rank == 0 else []), target=target if rank == size - 1 else None)
    for stage, module in own.items():
        for ours, theirs in zip(module.parameters(), plain[stage].parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
    torch.distributed.destroy_process_group()
    print("equal")
