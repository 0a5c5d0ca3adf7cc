"""One launch on gloo ranks: DistributedDataParallel and ``mosaic.colocate`` take turns at steps of one model."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import mosaic
from bench.ddp.models import make
from bench.loops import Loop, ratios
from bench.record import Figure
from mosaic.engine.options import DEFAULT_OPTIONS, Options
from mosaic.ranks import RankHandle
from mosaic.ranks.plans import data_parallel_plan
from mosaic.ranks.world.world import World
from mosaic.take_turns import take_turns

_VIEW = {"gradient_as_bucket_view": True}
SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "as it comes": {},
        "gradient_as_bucket_view": _VIEW,
        "gradient_as_bucket_view, static_graph": _VIEW | {"static_graph": True},
        "gradient_as_bucket_view, buckets of 100 MiB": _VIEW | {"bucket_cap_mb": 100},
    }
)
"""Settings of DistributedDataParallel, of which the fastest is compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The extent of a launch."""

    rounds: int = 3
    """Rounds of turns, and steps of each setting of DistributedDataParallel."""
    steps: int = 2
    """Steps of each in a turn."""
    warm_steps: int = 1
    """Warm-up steps at the start, and before each turn."""
    settings: int = len(SETTINGS)
    """Tried settings of DistributedDataParallel."""


def take(loop: Loop, world: World, steps: int, *, warm: int) -> list[float]:
    """Runs steps after a barrier; returns the slowest rank's milliseconds of the timed ones."""
    dist.barrier()
    times_ms = [loop.step_ms() for _ in range(warm + steps)]
    return list(map(max, zip(*world.all_gather(times_ms), strict=True)))[warm:]


def launch(
    rank: int, size: int, *, name: str, scale: Scale, best: str | None = None, options: Options = DEFAULT_OPTIONS
) -> Iterator[Figure]:
    """Yields the figures of this launch with their samples, against ``best`` or the fastest setting of DDP."""
    world = World.join(torch.device("cpu"))
    if best is None:
        step_of = {setting: _tried(world, name, rank, setting, scale) for setting in list(SETTINGS)[: scale.settings]}
        best = min(step_of, key=lambda setting: step_of[setting])
    theirs, ours, alike = (make(name, rank) for _ in range(3))
    wrapped = DistributedDataParallel(theirs.model, **SETTINGS[best])
    handle = mosaic.colocate(ours.model, sample=ours.batch, options=options)
    assert isinstance(handle, RankHandle)
    plan = data_parallel_plan(handle.graph, handle.plan.device, size)
    plain = mosaic.colocate(alike.model, sample=alike.batch, plan=plan)
    loops = {"ddp": Loop(wrapped, theirs), "ours": Loop(ours.model, ours), "alike": Loop(alike.model, alike)}
    for loop in loops.values():
        take(loop, world, 0, warm=scale.warm_steps)
    turns = take_turns(
        {kind: lambda loop=loop: take(loop, world, scale.steps, warm=scale.warm_steps) for kind, loop in loops.items()},
        range(scale.rounds),
    )
    for kind, runs in turns.items():
        yield _figure(kind, list(chain(*runs)), setting=best)
    steps = {kind: list(map(statistics.median, runs)) for kind, runs in turns.items()}
    yield _figure("gain", ratios(steps["ddp"], steps["ours"]))
    yield _figure("alike over ddp", ratios(steps["alike"], steps["ddp"]))
    trained = [parameter.nbytes for parameter in theirs.model.parameters() if parameter.requires_grad]
    yield _figure("MB", [sum(trained) / 1e6])
    places = " | ".join(f"{p.module}: ranks {', '.join(map(str, p.devices))}" for p in handle.plan.placements)
    has_plan = "times as fast as data-parallel" in handle.describe()
    yield _figure("picked", [float(has_plan)], plan=f"{handle.plan.search.method}: {places}")
    yield _figure("parameters", [_difference(handle, wrapped)])
    plain.remove()
    handle.remove()


def _tried(world: World, name: str, rank: int, setting: str, scale: Scale) -> float:
    work = make(name, rank)
    loop = Loop(DistributedDataParallel(work.model, **SETTINGS[setting]), work)
    return statistics.median(take(loop, world, scale.rounds, warm=scale.warm_steps))


def _difference(handle: RankHandle, wrapped: DistributedDataParallel) -> float:
    """Returns the length of the difference of all parameters after the same steps, over their length."""
    state = handle.full_state_dict()
    pairs = [(state[name].double(), tensor.double()) for name, tensor in wrapped.module.state_dict().items()]
    apart = math.fsum(float((a - b).square().sum()) for a, b in pairs)
    return math.sqrt(apart / math.fsum(float(b.square().sum()) for _, b in pairs))


def _figure(name: str, samples: list[float], **labels: str) -> Figure:
    return Figure(name=name, source="measured", value=statistics.median(samples), samples=tuple(samples), labels=labels)
