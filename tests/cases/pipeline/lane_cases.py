"""Steps of models whose encoders run on lanes beside the backbone, on ranks that are threads; and the plain loop's."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from executor_cases import order
from pipeline_cases import cut_in_pieces
from torch import nn

from bench.pipeline.in_process import InProcess
from mosaic.backends.base import Backend
from mosaic.backends.host import HostBackend
from mosaic.hardware import find_cluster
from mosaic.parts.finding.find import find_split
from mosaic.parts.parted_model import PartedModel
from mosaic.pipelining.partition import Partition, Request
from mosaic.pipelining.plan import PipelinePlan
from mosaic.pipelining.rank_hardware import Degrees, RankHardware
from mosaic.pipelining.schedule import PipelineSchedule, lower
from mosaic.pipelining.task_graph import task_graph
from mosaic.ranks.pipeline.chunk_work import ChunkWork, StepData
from mosaic.ranks.pipeline.counting import CountedModel, count_model
from mosaic.ranks.pipeline.executor import Executor
from mosaic.ranks.pipeline.lanes import check_lanes, open_lanes
from mosaic.ranks.pipeline.random_numbers import DrawnNumbers
from mosaic.ranks.pipeline.transport import Transport

Microbatch = Mapping[str, Any]
WIDTH = 8


class Layer(nn.Module):
    """Mixes columns, and drops some elements."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.outer(torch.tanh(self.inner(x))))


class Seen(nn.Module):
    """A vision and an audio encoder before a text model; either may be left out of a microbatch."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.vision = nn.ModuleList(Layer(dropout) for _ in range(3))
        self.audio = nn.ModuleList(Layer(dropout) for _ in range(2))
        self.text = nn.ModuleList(Layer(dropout) for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(
        self, words: torch.Tensor, pixels: torch.Tensor | None = None, sound: torch.Tensor | None = None
    ) -> torch.Tensor:
        hidden = words
        for given, layers in ((pixels, self.vision), (sound, self.audio)):
            if given is None:
                continue
            for layer in layers:
                given = layer(given)
            hidden = hidden + given.mean(0)
        for layer in self.text:
            hidden = layer(hidden)
        return self.head(hidden).square().mean()


def seen_step(*counts: tuple[int, int], words: int = 5) -> list[dict[str, torch.Tensor]]:
    """Microbatches of so many images and sounds each, in double precision."""
    found = []
    for number, (images, sounds) in enumerate(counts):
        one = {"words": torch.randn(words + number, WIDTH, dtype=torch.float64)}
        if images:
            one["pixels"] = torch.randn(images, words + number, WIDTH, dtype=torch.float64)
        if sounds:
            one["sound"] = torch.randn(sounds, words + number, WIDTH, dtype=torch.float64)
        found.append(one)
    return found


@dataclass(frozen=True, kw_only=True)
class LanedModel:
    """A model that is cut, with encoders beside the backbone, and a step of it."""

    model: nn.Module
    counted: CountedModel
    partition: Partition
    step: Sequence[Microbatch]
    loss: Callable[[Any, Microbatch], torch.Tensor]

    def drawn(self, seed: int, *, strategy: str = "keep") -> PipelineSchedule:
        """Any order that can run."""
        seen = [self.counted.microbatch(one) for one in self.step]
        graph = task_graph(self.counted.model, self.partition, seen, strategies=strategy)
        return lower(self.partition, graph, order(graph, random.Random(seed)), strategies=strategy)


def laned(
    model: nn.Module,
    step: Sequence[Microbatch],
    *,
    num_ranks: int = 1,
    sizes: Mapping[str, int] | None = None,
    own_lanes: bool = False,
    loss: Callable[[Any, Microbatch], torch.Tensor] = lambda output, _: output,
) -> LanedModel:
    """Cuts a model; the first microbatch has every modality.

    Args:
        model: The user's.
        step: Microbatches.
        num_ranks: Of the pipeline.
        sizes: Units of pieces.
        own_lanes: Whether each encoder has a lane of its own.
        loss: Of the model's output.
    """
    split = find_split(model, step[0])
    counted = count_model(model, split, step[0], RankHardware(cluster=find_cluster("host", 2)))
    seen = [counted.microbatch(one) for one in step]
    request = Request(model=counted.model, num_ranks=num_ranks, microbatches=seen, slots_per_rank=4)
    partition = cut_in_pieces("colocated", request, dict(sizes or {}))
    if own_lanes:
        lanes = {name: lane for lane, name in enumerate(reversed(partition.modules))}
        chunks = [replace(one, lane=lanes[one.parts[0].module], share=0.25) for one in partition.chunks]
        partition = replace(partition, chunks=tuple(chunks))
    return LanedModel(model=model, counted=counted, partition=partition, step=step, loss=loss)


Gradients = dict[str, torch.Tensor]


def lanes_of_host() -> Backend:
    """Four slots, on however many cores."""
    return HostBackend(4, num_threads=1)


def run(
    laned: LanedModel, schedule: PipelineSchedule, *, backend: Callable[[], Backend] | None = lanes_of_host
) -> tuple[Gradients, list[float]]:
    """Runs a step, each rank with a copy of the model; without a backend one thread a rank does it all."""
    split, partition = laned.counted.split, laned.partition
    check_lanes(laned.model, split, PipelinePlan(name="lanes", degrees=Degrees(), partition=partition))
    turn, start = threading.RLock(), torch.get_rng_state()  # ranks that are threads have one generator

    def program(transport: Transport) -> tuple[Gradients, dict[int, torch.Tensor]]:
        model, chunks = copy.deepcopy(laned.model), partition.chunks
        own = [index for index, chunk in enumerate(chunks) if chunk.rank == transport.rank]
        parted = PartedModel(model, split, [chunk.parts for chunk in chunks], own)
        data = StepData(
            split=split,
            partition=partition,
            schedule=schedule,
            microbatches=laned.step,
            layers=laned.counted.layers,
            averaged_over=len(laned.step),
        )
        numbers = DrawnNumbers(parted)
        with turn:
            torch.set_rng_state(start)
            states = numbers.before_each(laned.step, [numbers.draw(each) for each in laned.step])
        work = ChunkWork(parted, laned.loss, data, states=states, turn=turn)
        way = open_lanes(backend and backend(), partition, transport.rank)
        Executor(transport).run(schedule, work, lanes=way)
        grads = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        return grads, work.losses

    gradients: Gradients = {}
    losses: dict[int, torch.Tensor] = {}
    ranks = InProcess(partition.num_ranks)
    alone = partition.num_ranks == 1  # on this thread, whose settings lanes take over
    for found, ended in (program(ranks.transports[0]),) if alone else ranks.run(program):
        for name, gradient in found.items():  # ranks that share a weight have a part of its gradient each
            gradients[name] = gradients[name] + gradient if name in gradients else gradient
        losses |= ended
    return gradients, [float(losses[at]) for at in range(len(laned.step))]


def plain(laned: LanedModel) -> tuple[Gradients, list[float]]:
    """Returns the gradients and losses of the plain loop."""
    model, losses = copy.deepcopy(laned.model), []
    for one in laned.step:
        loss = laned.loss(model(**one), one)
        (loss / len(laned.step)).backward()
        losses.append(loss.item())
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}, losses


def check_equal(laned: LanedModel, *schedules: PipelineSchedule, **options: Any) -> None:
    """Steps on lanes make the plain loop's losses, gradients and random numbers."""
    torch.manual_seed(11)
    wanted, losses = plain(laned)
    drawn = torch.get_rng_state()
    for schedule in schedules:
        torch.manual_seed(11)
        found, ended = run(laned, schedule, **options)
        assert torch.equal(torch.get_rng_state(), drawn)
        assert torch.allclose(torch.tensor(ended), torch.tensor(losses), rtol=1e-12)
        assert found.keys() == wanted.keys()
        for name, gradient in found.items():
            assert (gradient - wanted[name]).norm() <= 1e-11 * (1e-2 + wanted[name].norm()), name
