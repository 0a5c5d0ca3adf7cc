"""What gloo ranks measure: planners against DDP, bytes against the least, overlap, start-up, memory, predictions."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.ranks.tape import Tape
from bench.record import Figure, Source, median_figure, missing_figure
from mosaic.backends.host.backend import HostBackend
from mosaic.cost.communication import ModuleTraffic, route_ms
from mosaic.graph import ModuleGraph, Part
from mosaic.models import build, loss_of, make_batch
from mosaic.plan import Grid, Placement, Plan, SearchRecord, Stage
from mosaic.profiler import ProfileSettings, measure_ring, measure_route, repeat_batch, traffic_of
from mosaic.ranks.choosing.planning import link_of
from mosaic.ranks.colocate import colocate_ranks
from mosaic.ranks.compare import COMPARED, MeasuredMethod, Rounds, Steps, compare_plans
from mosaic.ranks.rows.routing import RowRouting
from mosaic.ranks.running.prepare import cores_of_rank, find_for_ranks

SETTINGS = ProfileSettings(sample_seconds=0.1, min_repeats=2, max_repeats=5, foreign_share=2.0)
MB = 1e6


@dataclass(frozen=True, slots=True)
class Zoo:
    """A tiny model of the zoo on a rank's batch."""

    model: nn.Module
    sample: Any
    loss: Callable[[Any], torch.Tensor]

    @staticmethod
    def make(name: str, batch: int, seed: int = 0) -> Zoo:
        """Makes it with the same weights every time."""
        return Zoo(build(name, "tiny"), make_batch(name, "tiny", batch=batch, seed=seed), loss_of)


def least_moved(held: Sequence[int], parts: Sequence[int]) -> int:
    """How many rows must travel at least, whoever routes: what ranks are short of."""
    return sum(max(0, part - own) for part, own in zip(parts, held, strict=True))


def one(name: str, value: float, source: Source = "measured", samples: tuple[float, ...] = (), **labels: str) -> Figure:
    """Returns a figure of one number, with its samples and how many there are."""
    kept = samples or (value,)
    return Figure(name=name, source=source, value=value, samples=kept, labels={"samples": str(len(kept)), **labels})


def planners(
    rank: int, size: int, *, model: str, batch: int, rounds: Rounds, methods: tuple[str, ...] = COMPARED
) -> Iterator[Figure]:
    """Every planner's plan on the same ranks, each in turn with DDP: steps, ratios, bytes, memory, predictions."""
    found = compare_plans(lambda: Zoo.make(model, batch), methods, rounds=rounds, settings=SETTINGS)
    of = f"{model}-tiny, {size} ranks"
    for measured in found:
        yield from _of_method(measured, of)
    yield _order(found, of)


def _order(found: Sequence[MeasuredMethod], of: str) -> Figure:
    """Of each two plans that differ, whether the one that is predicted faster is."""
    name = f"pairs of plans of which the faster one is predicted to be, {of}, share"
    plans = [one for one in found if one.plan is not None and not one.same_as]
    pairs = [
        (a.predicted_ms - b.predicted_ms) * (statistics.median(a.ratios) - statistics.median(b.ratios)) > 0
        for a, b in combinations(plans, 2)
        if a.predicted_ms is not None and b.predicted_ms is not None
    ]
    if not pairs:
        return missing_figure(name, "all methods have one plan")
    return one(name, sum(pairs) / len(pairs), samples=tuple(map(float, pairs)))


def _of_method(measured: MeasuredMethod, of: str) -> Iterator[Figure]:
    method = measured.method
    names = {
        "step": f"{method}: step, {of}, ms",
        "ratio": f"{method}: step over DDP's on the same ranks, {of}, ratio",
        "held": f"{method}: parameters, gradients and optimizer state of the fullest rank over DDP's, {of}, ratio",
    }
    if measured.plan is None:
        yield from (missing_figure(name, measured.reason) for name in names.values())
        return
    labels = {"samples": str(len(measured.step_ms))} | ({"same plan as": measured.same_as} if measured.same_as else {})
    labels["plan"] = " | ".join(f"{p.module}: ranks {', '.join(map(str, p.devices))}" for p in measured.plan.placements)
    yield median_figure(names["step"], measured.step_ms, labels=labels)
    yield median_figure(names["ratio"], measured.ratios, labels=labels | {"samples": str(len(measured.ratios))})
    yield one(f"{method}: modules of a step, predicted, {of}, ms", measured.predicted_ms or 0.0, "predicted")
    yield one(f"{method}: of it communication, {of}, ms", measured.plan.communication_ms, "predicted")
    held = [ours / theirs for ours, theirs in zip(measured.held_bytes, measured.ddp_held_bytes, strict=True)]
    yield one(names["held"], max(held), samples=tuple(held), papers="Spindle Fig. 15: less than Megatron and DeepSpeed")
    sent = measured.sent_bytes
    yield one(f"{method}: rows that all ranks send in a step, {of}, MB", (sent["forward"] + sent["backward"]) / MB)
    yield one(f"{method}: gradients of parameters that are summed in a step, {of}, MB", sent["reduce"] / MB)
    yield one(f"{method}: from a plan to a model that trains, {of}, s", measured.started_s)


def apart_plan(graph: ModuleGraph, size: int) -> Plan:
    """Returns a plan with modules on one rank each, in turn, every third on all: rows travel, gradients are summed."""
    slots = (0,)
    stages = []
    for index, name in enumerate(graph.topological_order()):
        devices = tuple(range(size)) if index % 3 == 2 else (index % size,)
        stages.append(Stage(placements=(Placement(part=Part(module=name), slots=slots, grid=Grid(ranks=devices)),)))
    return Plan(
        device=HostBackend(cores=cores_of_rank()).device,
        num_devices=size,
        stages=tuple(stages),
        graph=graph.fingerprint,
        search=SearchRecord(method="manual"),
    )


def moved(rank: int, size: int, *, model: str, batch: int, steps: int) -> Iterator[Figure]:
    """Start-up, bytes and overlap of a plan in which everything travels."""
    of = f"{model}-tiny, {size} ranks"
    finding = find_for_ranks(Zoo.make(model, batch).model, Zoo.make(model, batch).sample)
    plan = apart_plan(finding.graph, size)
    zoo = Zoo.make(model, batch)
    made_s: list[float] = []
    with _timed_groups(made_s):
        began = time.perf_counter()
        handle = colocate_ranks(zoo.model, sample=zoo.sample, plan=plan)
        started_s = time.perf_counter() - began
    yield one(f"start-up of groups, all {len(made_s)} communicators, {of}, s", sum(made_s), samples=tuple(made_s))
    yield one(f"start-up, from a plan to a model that trains, {of}, s", started_s)
    loop = Steps(zoo.model, zoo)
    loop.take(2)
    traffic = {s.name: traffic_of(repeat_batch(s, size)) for s in finding.subjects}
    yield from _bytes(handle, loop, plan, traffic, batch, of)
    yield from _overlap(loop, steps, of)
    handle.remove()


@contextmanager
def _timed_groups(times: list[float]) -> Iterator[None]:
    real = dist.new_group

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        group = real(*args, **kwargs)
        times.append(time.perf_counter() - began)
        return group

    dist.new_group = timed  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.new_group = real


def _bytes(
    handle: Any, loop: Steps, plan: Plan, traffic: dict[str, ModuleTraffic], batch: int, of: str
) -> Iterator[Figure]:
    handle.clear_timeline()
    loop.take(1)
    metrics = handle.metrics()
    sent = torch.tensor(
        [
            sum(value for name, value in metrics.items() if name.startswith(f"sent_bytes/{phase}/"))
            for phase in ("forward", "backward", "reduce")
        ],
        dtype=torch.float64,
    )
    dist.all_reduce(sent)
    least = {"forward": 0.0, "backward": 0.0}
    for placed in plan.placements:
        rows = RowRouting(held=(batch,) * plan.num_devices, members=tuple(sorted(placed.devices)))
        share = least_moved(rows.held, rows.parts) / sum(rows.held)
        own = traffic[placed.module]
        least["forward"] += share * (own.arguments + own.results)
        least["backward"] += share * (own.argument_gradients + own.result_gradients)
    total = sum(least.values())
    moved_bytes = float(sent[0] + sent[1])
    name = f"rows moved in a step over the least that has results where they are called, {of}, ratio"
    if total > 0:
        yield one(name, moved_bytes / total, moved_MB=f"{moved_bytes / MB:.4g}", least_MB=f"{total / MB:.4g}")
    else:
        yield missing_figure(name, "nothing has to travel")
    yield one(f"rows moved in a step, {of}, MB", moved_bytes / MB)
    yield one(f"least rows to move in a step, {of}, MB", total / MB, "predicted")


def _overlap(loop: Steps, steps: int, of: str) -> Iterator[Figure]:
    """A step, its compute alone and its communication alone; each is that of the slowest rank."""
    tape = Tape()
    with tape.recording():
        loop.take(1)
    whole, compute, talk = [], [], []
    for _ in range(steps):
        whole += loop.take(1)
        with tape.left_out():
            compute += loop.take(1)
        dist.barrier()
        talk.append(tape.play_ms())
    times = torch.tensor([whole, compute, talk], dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    whole, compute, talk = times.tolist()
    yield median_figure(f"a step, {of}, ms", whole, labels={"samples": str(steps)})
    yield median_figure(f"its compute alone, {of}, ms", compute, labels={"samples": str(steps)})
    yield median_figure(f"its communication alone, {of}, ms", talk, labels={"samples": str(steps)})
    hidden = [(c + t - w) / min(c, t) for w, c, t in zip(whole, compute, talk, strict=True)]
    middle = [statistics.median(times) for times in (whole, compute, talk)]
    yield one(
        f"overlap: (compute + communication - step) / the shorter of both, medians, {of}",
        (middle[1] + middle[2] - middle[0]) / min(middle[1:]),
        samples=tuple(hidden),
    )


def links(rank: int, size: int) -> Iterator[Figure]:
    """Rows from all ranks to the first one: predicted from what ``colocate`` measures at other sizes, and measured."""
    ring, route = measure_ring(torch.device("cpu")), measure_route(torch.device("cpu"), group=dist.group.WORLD)
    link = link_of(route)
    for what, found in (("ring of", ring), ("way of rows between", route)):
        yield one(f"{what} {size} ranks: latency, us", found.latency_us)
        yield one(f"{what} {size} ranks: bandwidth, GB/s", found.gb_per_s)
    yield one(f"agreement of {size} ranks, ms", route.agreement_ms)
    for num_bytes in (2**16, 2**20, 2**24):
        rows = 64
        routing = RowRouting(held=(rows,) * size, members=(0,))
        given = torch.zeros(rows, num_bytes // (4 * rows * size))
        made = given.new_empty((sum(routing.receives(rank)), *given.shape[1:]))
        samples = []
        for _ in range(8):
            dist.barrier()
            began = time.perf_counter()
            dist.all_to_all_single(made, given, list(routing.receives(rank)), list(routing.sends(rank)))
            samples.append((time.perf_counter() - began) * 1e3)
        times = torch.tensor(samples[1:], dtype=torch.float64)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        of = f"rows of {num_bytes // 1024} KiB from {size} ranks to one"
        measured, predicted = statistics.median(times.tolist()), route_ms(num_bytes, size, 1, link)
        yield median_figure(f"{of}, ms", times.tolist(), labels={"samples": str(len(times))})
        yield one(f"{of}, predicted, ms", predicted, "predicted")
        yield one(f"{of}: predicted over measured - 1, %", 100 * (predicted / measured - 1))


def peak(rank: int, size: int, *, model: str, batch: int, with_mosaic: bool) -> Iterator[Figure]:
    """How far a rank's resident memory grew, from before the model to after some steps."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    zoo = Zoo.make(model, batch)
    if with_mosaic:
        finding = find_for_ranks(Zoo.make(model, batch).model, zoo.sample)
        colocate_ranks(zoo.model, sample=zoo.sample, plan=apart_plan(finding.graph, size))
        loop = Steps(zoo.model, zoo)
    else:
        loop = Steps(DistributedDataParallel(zoo.model), zoo)
    loop.take(3)
    grown = torch.tensor([float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)])
    found = [torch.zeros(1) for _ in range(size)]
    dist.all_gather(found, grown)
    each = tuple(float(one_rank) * 1024 / MB for one_rank in found)
    what = "Mosaic" if with_mosaic else "DDP"
    yield one(
        f"{what}: growth of resident memory of the fullest rank, {model}-tiny, {size} ranks, MB",
        max(each),
        samples=each,
    )
