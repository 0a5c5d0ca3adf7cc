"""``isolation``: the SMs that a partition uses, and the delay of a short kernel beside a long one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from mosaic.backends.base import Backend, Lane
from mosaic.errors import MosaicError
from mosaic.microbench.kernels import Kernel, elementwise, gemm, half_type
from mosaic.microbench.result import Question, Result, Row, Setup, absent, bars_figure
from mosaic.microbench.settings import Spread, measure_beside
from mosaic.microbench.variants import UNAVAILABLE, open_variant, parts_of
from mosaic.report.plan_view import slots_text

DELAYED = ("partitions", "plain", "prioritised")
"""Variants for a short kernel beside a long one."""


def measure_isolation(setup: Setup) -> Iterator[Row]:
    """Times a short kernel beside long ones, then reads back the SMs (on the host, cores) of partitions."""
    yield from _delays(setup)
    if setup.budget.allows("SM ids"):
        yield from _partitions(setup)


def _partitions(setup: Setup) -> Iterator[Row]:
    """Yields a row per partition of each layout: its SMs, those of a backward, and shared ones."""
    backend, count = setup.backend, setup.backend.device.num_slots
    halves, quarters = (count // 2, count - count // 2), (count // 4,) * 4
    for quotas in dict.fromkeys([halves, quarters, (1,) * min(count, 16), (count,)]):
        if min(quotas) == 0:
            continue
        layout = "+".join(map(str, quotas))
        if not setup.budget.allows(f"SM ids of {layout} slots"):
            continue
        partitions = parts_of(quotas)
        try:
            with backend.open_lanes(partitions) as lanes:
                units = [set(lanes.lane(slots).submit(backend.read_units).wait()) for slots in partitions]
                backward = [_units_of_backward(backend, lanes.lane(slots)) for slots in partitions]
                num_sms = [lanes.lane(slots).num_sms for slots in partitions]
        except MosaicError as error:
            yield absent("SM ids", error)
            continue
        for index, slots in enumerate(partitions):
            others = set().union(*(units[at] | backward[at] for at in range(len(partitions)) if at != index))
            used_units = slots_text(sorted(units[index]))
            yield Row(
                of="partitions",
                labels={"layout": layout, "slots": slots_text(slots), "ran_on": used_units},
                values={
                    "num_units": len(units[index]),
                    "num_sms": num_sms[index],
                    "num_shared": len((units[index] | backward[index]) & others),
                    "num_backward_outside": len(backward[index] - units[index]),
                },
            )


def _units_of_backward(backend: Backend, lane: Lane) -> set[int]:
    """Returns the SMs of a backward that starts on the lane of its forward."""
    units: set[int] = set()

    class _Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value * 1.0

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            units.update(backend.read_units())
            return gradients[0]

    def work() -> None:
        value = torch.ones(8, device=backend.torch_device, requires_grad=True)
        _Look.apply(value).sum().backward()

    lane.submit(work).wait()
    return units


def _delays(setup: Setup) -> Iterator[Row]:
    count = setup.backend.device.num_slots
    if count < 2:
        yield absent("a short kernel beside a long one", "the device has one slot, but two partitions need two")
        return
    dtype, scale = half_type(setup.backend.torch_device), setup.settings.scale
    short = gemm({"tiny": 8, "host": 64, "gpu": 256}[scale], dtype)  # briefly fills few SMs
    long_kernels = (  # fill all SMs: bound by arithmetic, and by bandwidth
        gemm({"tiny": 64, "host": 768, "gpu": 8192}[scale], dtype),
        elementwise({"tiny": 1 << 12, "host": 1 << 23, "gpu": 1 << 30}[scale], dtype),
    )
    for kind in DELAYED:
        for kernel in long_kernels:
            if setup.budget.allows(f"a short kernel beside {kernel.name}, {kind}"):
                try:
                    yield _delay(setup, kind, (count // 2, count - count // 2), short, kernel)
                except UNAVAILABLE as error:
                    yield absent(kind, error)


def _delay(setup: Setup, kind: str, split: tuple[int, int], short: Kernel, kernel: Kernel) -> Row:
    """Times every call of the short kernel, from its turn in the stream to its end."""
    device = setup.backend.torch_device
    variant = open_variant(kind, setup.backend, split)
    with variant.lanes as lanes:
        works = list(zip(variant.both, (short.prepare(device), kernel.prepare(device)), strict=True))
        single = replace(setup.settings, piece_ms=1e-4)
        shorts, longs = measure_beside(lanes, works, single, device)
    alone, beside = Spread.of(shorts.alone_ms), Spread.of(shorts.beside_ms) if shorts.beside_ms else None
    return Row(
        of="delays",
        labels={"variant": variant.name, "long_kernel": kernel.name},
        values={
            "long_ms": Spread.of(longs.alone_ms).median,
            "alone_ms": alone,
            "beside_ms": beside,
            "worst_ms": max(shorts.beside_ms, default=None),
            "ratio": beside.median / alone.median if beside is not None and alone.median > 0 else None,
        },
        note=variant.note,
    )


def _summary(result: Result) -> Sequence[str]:
    layouts: dict[str, list[Row]] = {}
    for row in result.of("partitions"):
        layouts.setdefault(str(row.labels["layout"]), []).append(row)
    lines = []
    for layout, rows in layouts.items():
        units = " | ".join(str(row.labels["ran_on"]) for row in rows[:4]) + (" | ..." if len(rows) > 4 else "")
        disjoint = "NOT DISJOINT" if any(row.values["num_shared"] for row in rows) else "disjoint"
        inside = "NOT INSIDE" if any(row.values["num_backward_outside"] for row in rows) else "inside"
        lines.append(f"{layout} slots ran on {units}: {disjoint}, backward {inside}")
    return [*lines, *dict.fromkeys(f"{row.labels['variant']}: {row.note}" for row in result.of("delays") if row.note)]


def _picture(result: Result, title: str, subtitle: str) -> Any:
    bars: list[tuple[str, str, Spread | float, str]] = []
    for row in result.of("delays"):
        beside = f"beside {row.labels['long_kernel']}"
        for label, key in (("alone", "alone_ms"), (beside, "beside_ms")):
            number = row.number(key)
            text = "never met" if number is None else f"{number * 1e3:.1f} us"
            bars.append((f"{row.labels['variant']}, {label}", label, row.values[key] or 0.0, text))
    return bars_figure(title, subtitle, "milliseconds per call", bars)


ISOLATION = Question(
    name="isolation",
    asks="which SMs does a partition use, and does a long kernel delay a short one beside it?",
    measure=measure_isolation,
    title="A short kernel alone and beside a long one, measured",
    of="delays",
    columns={"variant": ("short on", None), "long_kernel": ("beside", None), "long_ms": ("duration\nms", 1),
             "alone_ms": ("alone, ms", 3), "beside_ms": ("beside it, ms", 3), "worst_ms": ("worst\nms", 3),
             "ratio": ("times\nas long", 2)},
    summary=_summary,
    picture=_picture,
)  # fmt: skip
