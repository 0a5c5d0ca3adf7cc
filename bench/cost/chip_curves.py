"""Surfaces and descriptions judged by the simulated chip; a cost model knows counted operators and a data sheet.

The chip has what the roofline and the prior of shapes do not: tiles of two blocks an SM, launches between kernels,
latency, queues, a cache. One chip is as described; another differs from its description in four figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from bench.cost.calibration import CountedTime, calibration_figures, calibration_names
from bench.cost.chip.spec import REQUEST_BYTES, Chip, Kernel, Work, draw_work
from bench.cost.ground import ChipScale
from bench.cost.simulated import simulate_alone
from bench.cost.surfaces import AT_DEGREES, AT_QUOTAS, SurfaceTruth, judge_surfaces, surface_names
from bench.record import Figure
from mosaic.cost.counts import Gemm, MemoryCounts, ModuleCounts, Operator, OperatorKind, PhaseCounts
from mosaic.cost.surfaces import shape_of
from mosaic.hardware import Hardware, find_hardware
from mosaic.microbench import Budget
from mosaic.profile import Sample
from mosaic.shape import ModuleShape

CHIPS = {
    "simulated chip as described: ": Chip(),
    "simulated chip unlike its description: ": Chip(
        speed=0.7, launch_ns=4000.0, dram_bytes_per_ns=320.0, sm_requests=64
    ),
}
"""By the head of their figures; the description is of the first."""

DEGREES = (1, 2, 4)
"""Data-parallel degrees of surfaces; the middle one is held out."""

FEW_QUOTAS = (2, 4, 8, 12)
"""At which descriptions are fitted and judged, and surfaces at the held-out degree."""

SHARE = 8
"""The chip is such a part of a GPU."""


def curve_names() -> tuple[str, ...]:
    """Returns the names of all figures."""
    return tuple(name for head in CHIPS for name in (*surface_names(head), *calibration_names(head)))


def simulate_curves(scale: ChipScale, budget: Budget) -> Iterator[Figure]:
    """Yields errors of surfaces, of sampling and of descriptions, on each chip."""
    for seed, (head, chip) in enumerate(islice(CHIPS.items(), scale.num_chips)):
        if not budget.allows(head):
            continue
        truth, times = curves_truth(scale, chip, head, seed=seed)
        yield from judge_surfaces(truth)
        yield from calibration_figures(described(), times, source="simulated", head=head)


def curves_truth(
    scale: ChipScale, chip: Chip, head: str, *, seed: int
) -> tuple[SurfaceTruth, tuple[tuple[CountedTime, ...], ...]]:
    """Runs three sets of modules alone: to fit descriptions, to choose by (with surfaces too), to judge (likewise)."""
    count, hardware = scale.num_modules, described()
    works = [draw_work(5000 + 1000 * seed + number) for number in range(3 * count)]
    fitted, chosen, judging = (works[start : start + count] for start in (0, count, 2 * count))
    quotas = tuple(range(1, chip.num_sms + 1))
    grid = tuple(sorted({max(1, round(tenth / 10 * chip.num_sms)) for tenth in range(1, 11)}))
    first, held_degree, last = DEGREES
    alone = simulate_alone(chip, (*chosen, *judging), quotas, first)
    far = simulate_alone(chip, (*chosen, *judging), grid, last)
    held = simulate_alone(chip, (*chosen, *judging), FEW_QUOTAS, held_degree)
    few = simulate_alone(chip, fitted, FEW_QUOTAS, first)
    truth = SurfaceTruth(
        source="simulated",
        head=head,
        fit=(*(one for one in alone if one.quota in grid), *far),
        held={
            AT_QUOTAS: tuple(one for one in alone if one.quota > grid[0] and one.quota not in grid),
            AT_DEGREES: held,
        },
        shapes=_shapes((*chosen, *judging), DEGREES, hardware, quotas),
        choose=tuple(work.name for work in chosen),
        judge=tuple(work.name for work in judging),
        grid=grid,
    )
    return truth, (_counted(few, fitted), _counted(alone, chosen), _counted(alone, judging))


def _shapes(
    works: Sequence[Work], degrees: Sequence[int], hardware: Hardware, quotas: Sequence[int]
) -> dict[str, ModuleShape]:
    found = {
        work.name: shape_of(work.name, {d: _module_counts(work.on_share(d)) for d in degrees}, hardware, quotas)
        for work in works
    }
    return {name: shape for name, shape in found.items() if shape is not None}


def _counted(samples: Sequence[Sample], works: Sequence[Work]) -> tuple[CountedTime, ...]:
    by_name = {work.name: work for work in works}
    return tuple(
        CountedTime(counts=count_work(by_name[one.module]), num_sms=one.quota, measured_ms=one.median_ms)
        for one in samples
        if one.module in by_name and one.quota in FEW_QUOTAS
    )


def described() -> Hardware:
    """Returns the catalogue's description of an H100, cut as the chip is: an eighth of what SMs share."""
    whole, num_sms = find_hardware("h100-80g"), Chip().num_sms
    share = num_sms / whole.num_sms
    return replace(
        whole,
        source=f"{whole.source}; {num_sms} SMs, an eighth of the memory",
        num_sms=num_sms,
        sms_per_slot=1,
        bf16_tflops=whole.bf16_tflops * share,
        tf32_tflops=whole.tf32_tflops * share,
        fp32_tflops=whole.fp32_tflops * share,
        fp64_tflops=whole.fp64_tflops * share,
        memory_gb_per_s=whole.memory_gb_per_s / SHARE,
    )


def count_work(work: Work) -> PhaseCounts:
    """Returns what counting operators would say of a module: operations, bytes, shapes; nothing of how well it runs."""
    return PhaseCounts(operators=tuple(_operator(kernel) for kernel in work.kernels))


def _operator(kernel: Kernel) -> Operator:
    steps = kernel.tiles * kernel.steps
    weights = kernel.columns * kernel.steps * kernel.shared
    columns = min(kernel.columns, kernel.tiles)
    gemm = Gemm(m=128 * -(-kernel.tiles // columns), n=256 * columns, k=32 * kernel.steps)
    return Operator(
        name=f"simulated.{kernel.kind}",
        kind=OperatorKind(kernel.kind),
        dtype="bfloat16",
        flops=kernel.flops * steps,
        read_bytes=REQUEST_BYTES * (steps * (kernel.streamed + kernel.scattered) + weights),
        written_bytes=REQUEST_BYTES * steps * kernel.written,
        gemm=gemm if kernel.kind == "matmul" else None,
    )


def _module_counts(work: Work) -> ModuleCounts:
    return ModuleCounts(forward=count_work(work), backward=PhaseCounts(), memory=MemoryCounts(parameter_bytes=0))
