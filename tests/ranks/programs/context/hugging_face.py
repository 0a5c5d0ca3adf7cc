"""Trains tiny models of transformers over context ranks, right and with faults, beside one process."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attention_cases import BLOCK
from hugging_face_cases import FAMILIES, MASK, difference, gradients, make, plainly, tokens
from mask_matrices import without
from torch import nn

from mosaic.context.attention import Attend, ContextBatch, attach, sum_gradients
from mosaic.context.plan import plan_context
from mosaic.context.words import MaskWords
from ranks.begun import join


def step(model: nn.Module, size: int, mask: MaskWords, **altered: Any) -> float:
    """One step over context ranks; leaves summed gradients in the model, returns the loss of all."""
    attend = Attend(plan_context(mask, size, block=BLOCK))
    handle = attach(model)
    given = ContextBatch(attend=attend).inputs(**tokens()) | altered
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


def faults(rank: int, size: int, folder: Path) -> None:
    """What is easily got wrong, each on its own."""
    join(rank, size, folder)
    plan = plan_context(MASK, size, block=BLOCK)
    attend = Attend(plan)
    batch = ContextBatch(attend=attend)
    own_labels = batch.cut(tokens()["labels"], fill=-100)
    shifted_late = torch.cat([own_labels[:, 1:], torch.full((1, 1), -100)], 1)
    variants: dict[str, tuple[MaskWords, dict[str, Any]]] = {
        "none": (MASK, {}),
        "no document test": (without(MASK, "documents"), unseen_documents(without(MASK, "documents"), size)),
        "nothing both ways": (without(MASK, "both"), {}),
        "labels shifted after cutting": (MASK, {"shift_labels": shifted_late}),
        "local positions": (MASK, {"position_ids": torch.arange(plan.layout.local_tokens)[None]}),
    }
    other = make("qwen3")
    plainly(other, tokens())
    found = {}
    for name, (mask, altered) in variants.items():
        own = make("qwen3")
        step(own, size, mask, **altered)
        found[name] = difference(gradients(own), gradients(other))
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


def unseen_documents(mask: MaskWords, size: int) -> dict[str, Any]:
    """Labels and positions by the right mask for a plan of the wrong one, so that attention alone is wrong."""
    right = ContextBatch(attend=Attend(plan_context(MASK, size, block=BLOCK)))
    wrong = ContextBatch(attend=Attend(plan_context(mask, size, block=BLOCK)))
    own = wrong.cut(right.shift(tokens()["labels"]), fill=-100)
    return {
        "position_ids": wrong.cut(torch.from_numpy(MASK.positions())[None]),
        "labels": own,
        "shift_labels": own,
        "num_items_in_batch": (right.shift(tokens()["labels"]) != -100).sum(),
    }


def example(rank: int, size: int, folder: Path) -> None:
    """The file under ``examples/``, as it stands."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    begin = dist.init_process_group
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group = lambda backend: begin(backend, store=store, rank=rank, world_size=size)
    picture = ["--picture", str(folder / "mask.png")] if rank == 0 else []
    sys.argv = ["context.py", "--steps", "3", "--tokens", "600", "--width", "32", *picture]
    runpy.run_path(str(Path(__file__).parents[4] / "examples" / "context.py"), run_name="__main__")
