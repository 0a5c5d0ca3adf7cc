"""Faults of pipelines of the user's models; each function is one rank's program."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import BatchEncoding

import mosaic
from mosaic.engine.options import RankSettings
from mosaic.errors import (
    BackendUnavailableError,
    InvalidPlanError,
    InvalidScheduleError,
    ModuleContractError,
    MosaicError,
    UnsplittableError,
)
from mosaic.graph import Part
from mosaic.pipelining.partition import Chunk, Partition
from mosaic.ranks.pipeline.handle import Pipeline
from ranks.begun import TIMEOUT_S, WATCH, join, kill_this_process
from ranks.programs.pipeline.trained import llama, llava, microbatch, options, ragged, train, words

PATIENCE_S = 6.0
"""How long a rank waits for one that does not come: longer than a busy machine keeps one from starting."""


def begun(make: Callable[[], nn.Module] = llama, **asked: Any) -> tuple[Pipeline, nn.Module]:
    torch.manual_seed(1)
    model = make()
    sample = ragged()[0] if make is llava else words(0)
    plan = {"plan": halves(2)} if make is llama else {}
    watch = RankSettings(**{"timeout_s": TIMEOUT_S, **WATCH, **asked.pop("watch", {})})
    return mosaic.pipeline(
        model, sample, **{"trial": False, "options": options(), "ranks": watch, **plan, **asked}
    ), model


# Refused on all ranks; the same pipeline, or another one, goes on.


def refused_steps(rank: int, size: int, place: Path) -> None:
    """Microbatches that were not foreseen, or differ between ranks, are refused; the next step is right."""
    join(rank, size, place)
    pipe, model = begun()
    expected = pipe.step(words(1))
    one = words(0)[0]
    ids = one["input_ids"]
    of_known_shapes = [{**each, "input_ids": each["input_ids"] + rank} for each in words(1)]
    for wrong, kind, said in (
        (of_known_shapes, InvalidScheduleError, "microbatches of rank 1 have other values"),
        ([], ValueError, "a step is a list of microbatches"),
        (one, ValueError, "a step is a list of microbatches, dicts of the model's arguments"),
        ([{"inputs_embeds": torch.randn(1, 5, 16).double().requires_grad_()}], ValueError, "compute it in the model"),
        ([{**one, "use_cache": rank == 0}], InvalidScheduleError, "microbatches of rank 1 have other values"),
        ([BatchEncoding({**one, "input_ids": ids + rank})], InvalidScheduleError, "rank 1 have other values"),
        ([one] * (2 + rank), InvalidScheduleError, "microbatches of rank 1 have other shapes"),
        ([{**one, "input_ids": ids[0]}], IndexError, "dimension"),  # the model's own words
    ):
        with pytest.raises(kind, match=said) as caught:
            pipe.step(wrong)
        if kind is IndexError:
            assert caught.value.__notes__ == [
                "raised between layers, where this rank has zeros for what other ranks compute",
                "the model cannot take microbatch 0 of 1: "
                "input_ids int64[5], attention_mask int64[1, 5], labels int64[1, 5]",
            ]
    head = model.lm_head
    model.lm_head = nn.Linear(16, 32, bias=False).double()
    with pytest.raises(ModuleContractError, match="lm_head is not what it was"):
        pipe.step(words(1))
    model.lm_head = head
    hook = model.model.norm.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ModuleContractError, match=r"model\.norm\.weight has a hook on its gradient"):
        pipe.step(words(1))
    hook.remove()
    model.model.gradient_checkpointing = True
    with pytest.raises(UnsplittableError, match="gradient_checkpointing=True"):
        pipe.step(words(1))
    model.model.gradient_checkpointing = False
    model.zero_grad()
    same = [{name: value.int() if name != "labels" else value for name, value in one.items()} for one in words(1)]
    for step in (words(1), same):  # other types of whole numbers mean the same here
        assert torch.equal(pipe.step(step), expected)
    pipe.remove()
    print("refused")


def refused_starts(rank: int, size: int, place: Path) -> None:
    """Other plans and lists of layers on some ranks, plans that do not fit, a sample without what comes later."""
    join(rank, size, place)
    cuts = (1, 2) if rank == 0 else (1, 3)
    with pytest.raises(InvalidPlanError, match="the ranks were given different plans"):
        begun(plan=halves(cuts[rank]))
    with pytest.raises(ValueError, match="for 2 ranks in each of 3 replicas, and there are 2"):
        begun(data=3)
    with pytest.raises(MosaicError, match="the plan is of another model"):
        begun(llava, plan=halves(2))
    with pytest.raises(
        BackendUnavailableError, match=r"found: text = model\.layers of 4 layers on rank 1; needed: model ="
    ):
        begun(modules={"text": "model.layers"} if rank == 1 else None, plan=None)
    torch.manual_seed(1)
    pipe = mosaic.pipeline(llava(), [microbatch(0, 6)], trial=False, options=options())
    with pytest.raises(UnsplittableError, match=r"model.vision_tower\S* is called with this microbatch, and was not"):
        pipe.step([microbatch(2, 6)])
    pipe.remove()
    one = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for loss, kind in ((lambda output, _: output, r"tensor of shape \(2, 4\)"), (lambda *_: {}, "dict")):
        with pytest.raises(UnsplittableError, match=f"the loss of the model's Tensor is a {kind}; give pipeline"):
            mosaic.pipeline(one, {"input": torch.ones(2, 4)}, loss=loss, trial=False)
    with pytest.raises(UnsplittableError, match="gives other results when it is called again"):
        mosaic.pipeline(Remembering(nn.Linear(4, 4), nn.Linear(4, 4)), {"x": torch.randn(2, 4)}, trial=False)
    pipe = mosaic.pipeline(Growing(nn.Linear(4, 4), nn.Linear(4, 4)), {"x": torch.randn(2, 4)}, trial=False, data=1)
    for rows in (3, 4):
        with pytest.raises(UnsplittableError, match="longest changes with one of these microbatches"):
            pipe.step([{"x": torch.randn(2, 4)}, {"x": torch.randn(rows, 4)}])
        assert pipe.step([{"x": torch.ones(2, 4)}]).isfinite()
    pipe.remove()
    pipe, model = begun(plan=halves(2))
    with pytest.raises(ValueError, match="the model is in a pipeline, or colocated, already"):
        mosaic.pipeline(model, words(0))
    pipe.step(words(0))
    with pytest.raises(ModuleContractError, match=r"was called for model\..* here and for another part on other ranks"):
        nn.utils.clip_grad_norm_([each for each in pipe.parameters() if each.grad is not None][-1:], 1.0)
    train(pipe, torch.optim.SGD(pipe.parameters(), 0.1), 1)
    pipe.remove()
    with pytest.raises(ValueError, match="the pipeline was removed"):
        pipe.step(words(0))
    print("refused")


class Remembering(nn.Sequential):
    """Adds what it returned the last time."""

    last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x if self.last is None else x + self.last)
        self.last = x.detach().mean()
        return x.sum()


class Growing(nn.Sequential):
    """Scales by the largest batch so far, as caches of positions are made for one."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.longest = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self.longest:
            self.longest = len(x)
        return super().forward(x / self.longest).sum()


def halves(first: int) -> Partition:
    """The first layers on one rank, the rest on the other."""
    return Partition(
        chunks=(
            Chunk(rank=0, parts=(Part(module="model", first=0, count=first, total=4),)),
            Chunk(rank=1, parts=(Part(module="model", first=first, count=4 - first, total=4),)),
        ),
        num_ranks=2,
    )


# What ends all ranks.


def no_loss(rank: int, size: int, place: Path) -> None:
    """The sample has no labels."""
    join(rank, size, place)
    torch.manual_seed(1)
    mosaic.pipeline(llama(), [{"input_ids": words(0)[0]["input_ids"]}], options=options())


def killed_in_a_backward(rank: int, size: int, place: Path) -> None:
    """Of a layer of the backbone, with a message of the other rank on its way."""
    join(rank, size, place)
    pipe, model = begun(llava)
    pipe.step(ragged()[0])
    if rank == 1:
        own = next(one for one in model.model.language_model.layers.parameters() if not one.is_meta)
        own.register_hook(lambda _: kill_this_process())
    pipe.step(ragged()[0])


def killed_in_a_save(rank: int, size: int, place: Path) -> None:
    """One rank is killed when it has written a part of its file of the second checkpoint."""
    join(rank, size, place)
    pipe, model = begun()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    train(pipe, optimizer, 1)
    pipe.save(place / "kept", step=1, optimizer=optimizer)
    pipe.finish_saving()
    train(pipe, optimizer, 1, first=1)
    if rank == 1:
        writing = sys.modules["mosaic.checkpoint.checkpointer"]

        def write_and_die(path: Path, *_: object, **__: object) -> None:
            path.write_bytes(b"\0" * 100)
            kill_this_process()

        writing.write_tensors = write_and_die  # type: ignore[attr-defined]
    pipe.save(place / "kept", step=2, optimizer=optimizer)
    pipe.finish_saving()


def resumed(rank: int, size: int, place: Path) -> None:
    """From the checkpoint before; as a run that was never cut."""
    join(rank, size, place)
    digests = []
    for kept in (True, False):
        pipe, model = begun()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        first = pipe.load(place.parent / "killed_in_a_save" / "kept", optimizer=optimizer).step if kept else 0
        assert first == kept
        train(pipe, optimizer, 3 - first, first=first)
        digests.append(pipe.digest())
        pipe.remove()
    assert digests[0] == digests[1]
    print("equal")


def busy(rank: int, size: int, place: Path) -> None:
    """One rank does not come to the next step."""
    join(rank, size, place)
    dist.barrier()
    pipe, _ = begun(watch={"timeout_s": PATIENCE_S})
    pipe.step(words(0))
    if rank == 1:
        threading.Event().wait(3 * PATIENCE_S)
        return
    pipe.step(words(0))
