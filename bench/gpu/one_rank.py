"""One rank on one GPU: what a process group around the colocated loop costs, against the same loop without one."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

import mosaic
from bench.gpu.bench import Bench
from bench.gpu.models.measure import even_plan
from bench.gpu.models.variants import Workload
from bench.record import Figure, median_figure
from mosaic.engine import find_modules
from mosaic.plan import Plan


def measure_one_rank(bench: Bench, *, name: str = "clip", batch: int = 8) -> Iterator[Figure]:
    """Measures steps of one model under one plan, plainly started and as a world of one rank, in turn.

    ``mosaic.colocate`` goes the same way in both: a world of one rank routes nothing. The figures say whether it holds.
    """
    work = Workload(name, batch, bench)
    work.step()
    finding = find_modules(work.model, work.loss, include=work.modules)
    plan = even_plan(finding.graph, bench.device)
    del finding
    rounds = 3 if bench.dry_run else 8
    plain, ranked = [], []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(rounds):
            if turn >= 2 and not bench.budget.allows(f"rounds from {turn + 1} on"):
                break
            plain.append(_step_ms(work, plan, bench))
            store = dist.FileStore(str(Path(folder) / f"store{turn}"), 1)
            kind, device = ("nccl", bench.torch_device) if bench.on_gpu else ("gloo", None)
            dist.init_process_group(kind, store=store, rank=0, world_size=1, device_id=device)
            try:
                ranked.append(_step_ms(work, plan, bench))
            finally:
                dist.destroy_process_group()
    labels = {"model": name, "batch": str(batch)}
    yield median_figure("step_ms", plain, labels=labels | {"variant": "mosaic, no process group"})
    yield median_figure("step_ms", ranked, labels=labels | {"variant": "mosaic, one rank"})
    ratios = [theirs / ours for ours, theirs in zip(plain, ranked, strict=True)]
    yield median_figure("one rank over no process group, step, ratio", ratios, labels=labels)


def _step_ms(work: Workload, plan: Plan, bench: Bench) -> float:
    handle = mosaic.colocate(work.model, sample=work.loss, plan=plan, backend=bench.backend, modules=work.modules)
    try:
        times = []
        for _ in range(2 if bench.dry_run else 12):
            bench.synchronize()
            began = time.perf_counter()
            work.step()
            bench.synchronize()
            times.append((time.perf_counter() - began) * 1e3)
        if bench.on_gpu:
            torch.cuda.synchronize(bench.torch_device)
        return statistics.median(times[1:])
    finally:
        handle.remove()
