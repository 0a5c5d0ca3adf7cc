"""Trains tiny models of transformers over context ranks, beside one process."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

import torch.distributed as dist
from attention_cases import BLOCK
from hugging_face_cases import FAMILIES, MASK, difference, gradients, make, plainly, tokens
from torch import nn

from mosaic.context.attention import Attend, ContextBatch, attach, sum_gradients
from mosaic.context.plan import plan_context
from mosaic.context.words import MaskWords
from ranks.begun import join


def step(model: nn.Module, size: int, mask: MaskWords) -> float:
    """One step over context ranks; leaves summed gradients in the model, returns the loss of all."""
    attend = Attend(plan_context(mask, size, block=BLOCK))
    handle = attach(model)
    given = ContextBatch(attend=attend).inputs(**tokens())
    loss = model(**given).loss
    loss.backward()
    handle.remove()
    sum_gradients(model.parameters())
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total)


def train(rank: int, size: int, folder: Path) -> None:
    """Each family, compared with one process that has a dense mask."""
    join(rank, size, folder)
    found = {}
    for family in FAMILIES:
        own, other = make(family), make(family)
        losses = step(own, size, MASK), plainly(other, tokens())
        found[family] = {
            "gradients": difference(gradients(own), gradients(other)),
            "loss": abs(losses[0] - losses[1]),
        }
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


def example(rank: int, size: int, folder: Path) -> None:
    """The file under ``examples/``, as it stands."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    begin = dist.init_process_group
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group = lambda backend: begin(backend, store=store, rank=rank, world_size=size)
    picture = ["--picture", str(folder / "mask.png")] if rank == 0 else []
    sys.argv = ["context.py", "--steps", "3", "--tokens", "600", "--width", "32", *picture]
    runpy.run_path(str(Path(__file__).parents[4] / "examples" / "context.py"), run_name="__main__")
