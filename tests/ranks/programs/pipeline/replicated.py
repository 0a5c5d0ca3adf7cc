"""Replicas of a pipeline beside the plain loop; each function is one rank's program."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from executor_cases import no_caption
from pipeline_cases import cut_in_pieces, images
from pipeline_cases import plain as plain_module
from torch import nn

import mosaic
from mosaic.artifact import save
from mosaic.errors import ModuleContractError
from mosaic.pipelining.layers import Feed, PipelineModel
from mosaic.pipelining.partition import Request
from mosaic.pipelining.planner import plan_step
from mosaic.ranks.pipeline.chunk_work import ChunkWork
from mosaic.ranks.pipeline.handle import Pipeline
from ranks.begun import in_turn, join
from ranks.programs.pipeline.trained import (
    begin,
    check_equal,
    check_gradients,
    llama,
    llava,
    microbatch,
    options,
    ragged,
    words,
)


def dropping_and_frozen_in_part() -> nn.Module:
    """The first layers of the vision tower train no more."""
    model = llava(dropout=0.2)
    for parameter in model.model.vision_tower.encoder.layers[:2].parameters():
        parameter.requires_grad_(False)
    return model


def two_of_two(rank: int, size: int, place: Path) -> None:
    """Two replicas of two ranks: tied weights, dropout, what is frozen, and few microbatches."""
    asked = options(partition="mixed-v")
    pipe, model, plain = begin(dropping_and_frozen_in_part, ragged()[0], options=asked, data=2)
    assert "2 replicas of 2" in pipe.describe()
    steps = [*ragged(), ragged()[0][:1]]  # the last one has nothing for a replica
    check_equal(pipe, model, plain, steps, ahead=True)
    check_accumulated(pipe, model, plain)
    model.model.vision_tower.encoder.layers[0].requires_grad_(True)
    with pytest.raises(ModuleContractError, match="requires_grad was False when the pipeline was made"):
        pipe.step(ragged()[0])
    pipe.remove()


def check_accumulated(pipe: Pipeline, model: nn.Module, plain: nn.Module) -> None:
    """Two steps before the optimizer's: gradients are the sums of both, tied weights' too."""
    plain.eval(), model.eval()
    for step in ragged():
        pipe.step(step)
        for one in step:
            (plain(**one).loss / len(step)).backward()
    check_gradients(model, plain, 1e-10)


def of_whole_models(rank: int, size: int, place: Path) -> None:
    """Data parallelism alone, by a schedule for one rank."""
    modules = (plain_module("vision_tower", 4), plain_module("language_model", 4, counts="all"))
    chain = PipelineModel(modules=modules, feeds=(Feed(source="vision_tower", target="language_model"),))
    request = Request(model=chain, num_ranks=1, microbatches=images(2, 3))
    partition = cut_in_pieces("separated", request, {"vision_tower": 2})
    planned = plan_step(request, images(2, 3), options=options(), partition=partition)
    if rank == 0:
        save(planned.schedule(), place / "schedule.json")
    dist.barrier()
    pipe, model, plain = begin(llava, plan=place / "schedule.json")
    assert pipe.degrees.data == size
    assert [chunk.parts for chunk in pipe.partition.chunks] == [chunk.parts for chunk in planned.partition.chunks]
    check_equal(pipe, model, plain, ragged())
    pipe.remove()


def tried(rank: int, size: int, place: Path) -> None:
    """On four ranks all grids are looked at; what does not fit, or is predicted to be slower, is named."""
    torch.manual_seed(1)
    model = llama()
    model.config.use_cache = False
    pipe = mosaic.pipeline(model, words(0), options=options(), memory_bytes=130_000)
    looked_at = pipe.trial.step_ms.keys() | pipe.trial.reasons.keys()
    assert looked_at == {"planned", "1f1b", "data parallel", "planned, data=2"}, pipe.describe()
    assert "not tried: data parallel: " in pipe.describe()
    pipe.remove()


def an_error_in_one_replica(rank: int, size: int, place: Path) -> None:
    """Rank 1 fails in a backward; the other replica hears of it."""
    join(rank, size, place)
    pipe, *_ = begin(llama, data=2)
    pipe.step(words(0))
    if rank == 1:
        ChunkWork.backward = lambda *_: no_caption()  # type: ignore[method-assign]
    for step in range(1, 4):
        pipe.step(words(step))


def with_other_weights(rank: int, size: int, place: Path) -> None:
    join(rank, size, place)
    torch.manual_seed(rank)
    mosaic.pipeline(llama(), [microbatch(0, 6)], data=2, trial=False, options=options())


on_two_ranks = in_turn(of_whole_models)
on_four_ranks = in_turn(two_of_two, tried)
