"""Encoders on lanes beside the backbone: measured on one rank of this machine, and simulated for H100s.

On the host one rank has all cores. Its lanes have a thread a core; the same partition merged on one thread, 1F1B over a
mixed partition and the plain loop have one thread for each operator or as many as there are cores, and take turns, step
by step. The plain loop runs in a process of its own too, whose threads spin while they wait, as torch's do by default
and lanes' may not: the fastest of all these loops is what lanes are compared with.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.pipeline.steps import Job, simulated
from bench.record import Figure, missing_figure
from mosaic.backends.host import HostBackend
from mosaic.errors import InfeasibleError
from mosaic.pipelining.order.search import OrderLimits
from mosaic.pipelining.planner import PlannerOptions, plan_baseline, plan_step
from mosaic.ranks.pipeline.begin import make_candidates
from mosaic.ranks.pipeline.given import Given
from mosaic.ranks.pipeline.trying.candidates import Candidates
from mosaic.ranks.pipeline.trying.fit_candidates import fit_candidates
from mosaic.ranks.pipeline.trying.fit_lanes import fit_lanes
from mosaic.ranks.pipeline.trying.trial import COLOCATED, RIVAL
from mosaic.ranks.pipeline.ways import Way
from mosaic.ranks.world.world import World

IMAGES = (2, 0, 4, 1, 4, 0, 3, 2)
"""Of the microbatches of a step."""
PATCHES, WORDS, LAYERS = 48, 96, 4
SLOTS = 16
"""Of an H100."""
MERGED, PLAIN = "the same on one thread", "plain loop"


class SeeingModel(nn.Module):
    """A vision encoder of torch's layers before a text model; both have about the same work in a step."""

    def __init__(self, width: int) -> None:
        super().__init__()

        def layers(own: int) -> nn.ModuleList:
            one = {"dim_feedforward": 4 * own, "dropout": 0.0, "batch_first": True, "norm_first": True}
            return nn.ModuleList(nn.TransformerEncoderLayer(own, own // 32, **one) for _ in range(LAYERS))

        self.vision, self.text = layers(width), layers(width)
        self.projector = nn.Linear(width, width)

    def forward(self, words: Tensor, pixels: Tensor | None = None) -> Tensor:
        """Returns the mean square of what the text model makes."""
        if pixels is not None:
            for layer in self.vision:
                pixels = layer(pixels)
            words = torch.cat([self.projector(pixels.mean(1))[None], words], dim=1)
        for layer in self.text:
            words = layer(words)
        return words.square().mean()


def on_host(width: int, rounds: int) -> Iterator[Figure]:
    """Measures steps of each way, and says what was predicted for those that are planned.

    Args:
        width: Of the model.
        rounds: Timed steps of each way.
    """
    of = f"lanes on the host, width {width}"
    cores = HostBackend().device.num_slots
    if cores < 2:
        yield missing_figure(f"{of}: step, ms", "one core, and lanes need one each", source="measured")
        return
    torch.manual_seed(0)
    model, step = SeeingModel(width), _step(width)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    given = Given(loss=lambda output, _: output, data=1, options=_options(3), backend=HostBackend())
    world = World.join(torch.device("cpu"))
    torch.set_num_threads(cores)
    own = fit_candidates(make_candidates(model, step, world, given), step)
    own = fit_lanes(own, _made(own, COLOCATED, options=_options(3, "colocated")), step)
    lanes = _made(own, COLOCATED, options=_options(3, "colocated"))
    rival = _made(own, RIVAL, baseline=RIVAL)
    ways: dict[str, Callable[[], object]] = {
        MERGED: _run_of(replace(own, backend=None), lanes, step),
        RIVAL: _run_of(own, rival, step),
        PLAIN: lambda: _plain(model, step),
    }
    runs = {COLOCATED: _run_of(own, lanes, step)} | {
        f"{name}, {threads} thread{'s' if threads > 1 else ''}": _threaded(run, threads)
        for name, run in ways.items()
        for threads in (1, cores)
    }
    times = _take_turns(model, runs, rounds)
    times |= {f"{PLAIN}, {count} spinning": _spinning(width, count, rounds) for count in (1, cores)}
    best = min((name for name in times if name != COLOCATED), key=lambda name: statistics.median(times[name]))
    for name, found in times.items():
        yield _measured(f"{of}: {name}: step, ms", found)
    ratios = [a / b for a, b in zip(times[best], times[COLOCATED], strict=True)]
    yield replace(_measured(f"{of}: the fastest other way over lanes, ratio", ratios), labels={"way": best})
    for way in (lanes, rival):
        yield Figure(name=f"{of}: {way.name}: step, ms", source="predicted", value=way.predicted_ms)
    own.grids.close()
    world.close()
    dist.destroy_process_group()


def on_h100s(names: Sequence[str], seeds: Sequence[int], seconds: float) -> Iterator[Figure]:
    """Simulates steps of PipeWeaver's models on H100s: other partitions and 1F1B over lanes, which do not interfere.

    Args:
        names: Of models.
        seeds: Of steps.
        seconds: Of each search.
    """
    for name in names:
        job = Job(name=name)
        request = replace(job.request, slots_per_rank=SLOTS)
        steps = [job.step(seed) for seed in seeds]

        def planned(partition: str, job: Job = job, request: Any = request, steps: Any = steps) -> list[float]:
            options = _options(seconds, partition)
            return [plan_step(request, one, space=job.space, options=options).makespan_ns / 1e6 for one in steps]

        lanes = planned("colocated")
        yield simulated(f"{name}: encoders on lanes: step, ms", lanes)
        for partition in ("separated", "mixed-v"):
            found = planned(partition)
            yield simulated(
                f"{name}: {partition} over lanes, ratio", [a / b for a, b in zip(found, lanes, strict=True)]
            )
        try:
            rival = [plan_baseline(RIVAL, request, one, space=job.space).makespan_ns / 1e6 for one in steps]
        except InfeasibleError as error:
            yield missing_figure(f"{name}: {RIVAL} over lanes, ratio", str(error), source="simulated")
        else:
            yield simulated(f"{name}: {RIVAL} over lanes, ratio", [a / b for a, b in zip(rival, lanes, strict=True)])


def _measured(name: str, found: Sequence[float]) -> Figure:
    return Figure(name=name, source="measured", value=statistics.median(found), samples=tuple(found))


def _made(own: Candidates, name: str, **asked: Any) -> Way:
    way = own.make(name, **asked)
    assert isinstance(way, Way), way
    return way


def _options(seconds: float, partition: str = "auto") -> PlannerOptions:
    return PlannerOptions(partition=partition, limits=OrderLimits(effort=seconds))


def _step(width: int) -> list[dict[str, Tensor]]:
    made = [{"words": torch.randn(1, WORDS, width)} for _ in IMAGES]
    for one, count in zip(made, IMAGES, strict=True):
        if count:
            one["pixels"] = torch.randn(count, PATCHES, width)
    return made


def _plain(model: nn.Module, step: Sequence[Mapping[str, Tensor]]) -> None:
    for one in step:
        (model(**one) / len(step)).backward()


def _run_of(own: Candidates, way: Way, step: Sequence[Mapping[str, Tensor]]) -> Callable[[], object]:
    runner, shared = own.runner(way, keeps_all=True), way.plan_shared(way.request.microbatches)
    return lambda: runner.run(shared, step, shapes=own.shapes(step))


def _threaded(run: Callable[[], object], threads: int) -> Callable[[], object]:
    def go() -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        run()
        torch.set_num_threads(before)

    return go


def _spinning(width: int, threads: int, rounds: int) -> list[float]:
    """Times the plain loop in a process of its own, whose threads wait as torch's do by default."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    command = [sys.executable, "-m", "bench.pipeline.on_lanes", *map(str, (width, threads, rounds))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    times: list[float] = json.loads(done.stdout)
    return times


def _take_turns(model: nn.Module, runs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for at in range(rounds + 2):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            if at > 1:  # the first two warm up
                taken[name].append(1e3 * (time.perf_counter() - began))
            model.zero_grad()
    return taken


if __name__ == "__main__":
    width, threads, rounds = map(int, sys.argv[1:])
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    model, step = SeeingModel(width), _step(width)
    print(json.dumps(_take_turns(model, {PLAIN: lambda: _plain(model, step)}, rounds)[PLAIN]))
