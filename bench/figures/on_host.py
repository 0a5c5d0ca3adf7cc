"""What of Mosaic's Fig. 4b and 11 the host can show: cores in the place of SMs, pinned threads in that of streams."""

from __future__ import annotations

import copy
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import torch
import torch.distributed as dist

import mosaic
from bench.colocate.models import Loop
from bench.gpu.models.measure import even_plan
from bench.record import Figure, median_figure
from mosaic.backends.host.backend import HostBackend
from mosaic.engine import find_modules
from mosaic.models import build, make_batch
from mosaic.plan import Plan, plan_from_quotas

LENDS = 2000
"""Lanes that are lent to time one of them."""
GROUP_BYTES = 1 << 20


def figure_4b(*, rounds: int, steps: int = 5) -> Iterator[Figure]:
    """CLIP on this machine's cores: a step and the share of the cores' time that it takes, by two plans in turn."""
    model, batch, backend = build("clip", "tiny"), make_batch("clip", "tiny"), HostBackend()
    graph, cores = find_modules(model, batch).graph, backend.device.num_slots
    in_turn = [{name: cores} for name in graph.topological_order()]
    plans = {
        "side by side": even_plan(graph, backend.device),
        "one after the other": plan_from_quotas(in_turn, graph=graph, device=backend.device),
    }
    times: dict[str, list[float]] = {name: [] for name in plans}
    busy: dict[str, list[float]] = {name: [] for name in plans}
    with ExitStack() as stack:
        loops = {}
        for name, plan in plans.items():
            loops[name] = Loop.of(copy.deepcopy(model), batch)
            handle = mosaic.colocate(loops[name].model, sample=batch, plan=plan, backend=backend)
            stack.callback(handle.remove)
            loops[name].step_ms()
        for number in range(rounds):
            for name in loops if number % 2 else reversed(loops):
                began, cpu = time.perf_counter(), time.process_time()
                times[name] += [loops[name].step_ms() for _ in range(steps)]
                busy[name].append(100 * (time.process_time() - cpu) / (time.perf_counter() - began) / cores)
    waits = {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "unset")}  # threads that spin count as busy
    for name in loops:
        yield median_figure(f"Fig. 4b: host: clip-tiny, {name}, step, ms", times[name])
        yield median_figure(f"Fig. 4b: host: clip-tiny, {name}, cores busy, %", busy[name], labels=waits)


def figure_11a(*, repeats: int = 30) -> Iterator[Figure]:
    """Making a lane of one core and ending it, and handing out one that is there."""
    backend = HostBackend()
    made = [_ms(lambda: backend.open_lanes([(0,)]).close()) for _ in range(repeats)]
    yield median_figure("Fig. 11a: host: a lane made on demand, and ended, ms", made)
    with backend.open_lanes([(0,)]) as lanes:
        lent = [_ms(lambda: [lanes.lane((0,)) for _ in range(LENDS)]) / LENDS for _ in range(repeats)]
    yield median_figure("Fig. 11a: host: a lane lent, ms", lent)


def figure_11b(*, name: str, rounds: int, steps: int = 5) -> Iterator[Figure]:
    """A step whose lanes were made beforehand, and the same with lanes of each of its stages made and ended in it."""
    model, batch, backend = build(name, "tiny"), make_batch(name, "tiny"), HostBackend()
    plan = even_plan(find_modules(model, batch).graph, backend.device)
    loop = Loop.of(model, batch)
    handle = mosaic.colocate(model, sample=batch, plan=plan, backend=backend)
    try:
        loop.step_ms()
        shorter = []
        for number in range(rounds):
            found: dict[bool, list[float]] = {}
            for on_demand in (True, False) if number % 2 else (False, True):
                extra = (lambda: _made_and_ended(backend, plan)) if on_demand else (lambda: None)
                found[on_demand] = [_ms(extra) + loop.step_ms() for _ in range(steps)]
            shorter.append(100 * (1 - statistics.median(found[False]) / statistics.median(found[True])))
    finally:
        handle.remove()
    labels = {"stages": str(len(plan.stages))}
    yield median_figure(f"Fig. 11b: host lanes: {name}-tiny: step shorter by, %", shorter, labels=labels)


def _made_and_ended(backend: HostBackend, plan: Plan) -> None:
    for stage in plan.stages:
        backend.open_lanes([placed.slots for placed in stage.placements]).close()


def group_reuse(rank: int, size: int, *, repeats: int = 30) -> Iterator[Figure]:
    """A sum over ranks in a process group that is there, and in one that is made for it and ended (section 4)."""
    rows, kept = torch.zeros(GROUP_BYTES // 4), dist.new_group()

    def in_new_group() -> None:
        group = dist.new_group()
        dist.all_reduce(rows, group=group)
        dist.destroy_process_group(group)

    ways: dict[str, Callable[[], object]] = {
        "a sum of 1 MiB in a group that is there, ms": lambda: dist.all_reduce(rows, group=kept),
        "the same in a group made for it and ended, ms": in_new_group,
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, call in ways.items():
            times[way].append(_ms(call))
    for way, found in times.items():
        yield median_figure(f"Fig. 11b: groups: {way}", found)


def _ms(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - began)
