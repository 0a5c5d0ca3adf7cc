"""``isolation``: the SMs that a partition really uses, and the delay of a short kernel by a long one beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch

from mosaic.backends.base import Backend, Lane
from mosaic.errors import BackendUnavailableError, MosaicError
from mosaic.microbench.kernels import Kernel, kernels_named, long_kernels, short_kernel
from mosaic.microbench.report import Picture, Report, bar_of, spread_text
from mosaic.microbench.result import Recorder, Result, Spread
from mosaic.microbench.settings import BenchSettings, Budget
from mosaic.microbench.timing import measure_beside, time_alone
from mosaic.microbench.variants import UNAVAILABLE, QuotaPair, open_variant
from mosaic.report.bars import slots_text
from mosaic.report.charts import Bar

DELAYED = ("partitions", "plain", "prioritised", "torch_contexts")
"""Variants that time a short kernel beside a long one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionUnits:
    """Observed units of one partition: sorted ids of SMs, or of cores on the host."""

    slots: tuple[int, ...]
    num_sms: int | None
    """Granted SMs; None if the backend does not report them."""
    units: tuple[int, ...]
    """Units of its work."""
    backward_units: tuple[int, ...]
    """Units of a backward whose forward ran on the partition."""

    @property
    def keeps_backward(self) -> bool:
        """True if backward stayed inside the partition."""
        return set(self.backward_units) <= set(self.units)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutUnits:
    """The partitions of one layout."""

    slots_are: str
    """``default``, or the option that created slots or partitions."""
    quotas: tuple[int, ...]
    """Slots of each partition."""
    partitions: tuple[PartitionUnits, ...]
    """In the order of ``quotas``."""

    @property
    def disjoint(self) -> bool:
        """True if no two partitions shared an SM or core."""
        units = [set(partition.units) | set(partition.backward_units) for partition in self.partitions]
        return all(first.isdisjoint(second) for first, second in combinations(units, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """A short kernel alone, and beside a long one on the other lane."""

    variant: str
    """Kind of lanes."""
    long_kernel: str
    long_ms: float
    """Median time of the long kernel alone on its lane."""
    alone_ms: Spread
    """The short kernel with the other lane idle, from its turn in the stream to its end."""
    beside_ms: Spread | None
    """The same within the long kernel's run; None without such a call."""
    worst_ms: float | None
    """Longest of these calls."""
    note: str = ""
    """Remark about the variant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementTime:
    """A kernel on half of the device, by the option that created slots or partitions."""

    slots_are: str
    """``default`` or the option."""
    kernel: str
    num_sms: int | None
    """Granted SMs of the half; None if the backend does not report them."""
    time_ms: Spread
    """Time of a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationResult(Result):
    """Observed units, and delays by neighbours."""

    layouts: tuple[LayoutUnits, ...]
    delays: tuple[Delay, ...]
    placements: tuple[PlacementTime, ...]


def measure_isolation(backend: Backend, settings: BenchSettings, budget: Budget | None = None) -> IsolationResult:
    """Reads back the units of partitions, then times a short kernel beside long ones."""
    recorder = Recorder(backend, budget or Budget())
    layouts: list[LayoutUnits] = []
    placements: list[PlacementTime] = []
    delays = _delays(backend, settings, recorder)
    for name, make in (("default", lambda: backend), *backend.alternatives().items()):
        if not recorder.budget.allows(f"SM ids, {name}"):
            continue
        try:
            variant_backend = make()
            layouts += _layouts(variant_backend, name, recorder)
            placements += _placements(variant_backend, name, settings, recorder)
        except UNAVAILABLE as error:
            recorder.cannot(name, error)
    if not backend.alternatives():
        recorder.cannot("finer slots and split placement", f"the {backend.name} backend has one kind of slot")
    return IsolationResult(
        layouts=tuple(layouts),
        delays=tuple(delays),
        placements=tuple(placements),
        **recorder.common(),
    )


def layouts_of(num_slots: int) -> tuple[tuple[int, ...], ...]:
    """Returns quotas of layouts to observe: halves, uneven halves, quarters, single slots, the whole."""
    half, quarter = num_slots // 2, num_slots // 4
    layouts: list[tuple[int, ...]] = [(half, num_slots - half), (quarter, num_slots - quarter), (quarter,) * 4]
    layouts += [(1,) * min(num_slots, 16), (num_slots,)]
    return tuple(dict.fromkeys(quotas for quotas in layouts if min(quotas) > 0))


def slots_in_turn(quotas: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Returns neighbouring partitions of these sizes, from slot 0 on."""
    starts = [sum(quotas[:index]) for index in range(len(quotas))]
    return tuple(tuple(range(start, start + quota)) for start, quota in zip(starts, quotas, strict=True))


def _layouts(backend: Backend, name: str, recorder: Recorder) -> list[LayoutUnits]:
    layouts: list[LayoutUnits] = []
    for quotas in layouts_of(backend.device.num_slots):
        if not recorder.budget.allows(f"SM ids of {'+'.join(map(str, quotas))} slots, {name}"):
            continue
        partitions = slots_in_turn(quotas)
        try:
            with backend.open_lanes(partitions) as lanes:
                units = tuple(
                    PartitionUnits(
                        slots=slots,
                        num_sms=lanes.lane(slots).num_sms,
                        units=lanes.lane(slots).submit(backend.read_units).wait(),
                        backward_units=_units_of_backward(backend, lanes.lane(slots)),
                    )
                    for slots in partitions
                )
        except BackendUnavailableError as error:
            recorder.cannot(f"SM ids, {name}", error)
            break  # the next layout would fail too
        except MosaicError as error:
            recorder.cannot(f"SM ids of {'+'.join(map(str, quotas))} slots, {name}", error)
        else:
            layouts.append(LayoutUnits(slots_are=name, quotas=quotas, partitions=units))
    return layouts


def _units_of_backward(backend: Backend, lane: Lane) -> tuple[int, ...]:
    """Returns the units of a backward that starts on the lane of its forward."""
    seen: list[tuple[int, ...]] = []

    class _Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value * 1.0

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            seen.append(backend.read_units())
            return gradients[0]

    def work() -> None:
        value = torch.ones(8, device=backend.torch_device, requires_grad=True)
        _Look.apply(value).sum().backward()

    lane.submit(work).wait()
    return seen[0]


def _placements(backend: Backend, name: str, settings: BenchSettings, recorder: Recorder) -> list[PlacementTime]:
    half = tuple(range(max(1, backend.device.num_slots // 2)))
    times: list[PlacementTime] = []
    with backend.open_lanes([half]) as lanes:
        for kernel in kernels_named(("gemm", "attention"), settings.scale, backend.torch_device):
            if recorder.budget.allows(f"{kernel.name} on half of the device, {name}"):
                lane, call = lanes.lane(half), kernel.prepare(backend.torch_device)
                spread = Spread.of(time_alone(lane, call, settings).all_ms)
                times.append(PlacementTime(slots_are=name, kernel=kernel.name, num_sms=lane.num_sms, time_ms=spread))
    return times


def _delays(backend: Backend, settings: BenchSettings, recorder: Recorder) -> list[Delay]:
    count = backend.device.num_slots
    if count < 2:
        recorder.cannot("a short kernel beside a long one", "the device has one slot, and two partitions need two")
        return []
    delays: list[Delay] = []
    for kind in DELAYED:
        for kernel in long_kernels(settings.scale, backend.torch_device):
            if not recorder.budget.allows(f"a short kernel beside {kernel.name}, {kind}"):
                continue
            try:
                delays.append(_delay(backend, kind, (count // 2, count - count // 2), kernel, settings))
            except UNAVAILABLE as error:
                recorder.cannot(kind.replace("_", " "), error)
    return delays


def _delay(backend: Backend, kind: str, split: QuotaPair, kernel: Kernel, settings: BenchSettings) -> Delay:
    short = short_kernel(settings.scale, backend.torch_device)
    single = dataclasses.replace(settings, piece_ms=1e-4)  # times every call separately
    variant = open_variant(kind, backend, split)
    with variant.lanes as lanes:
        calls = (short.prepare(backend.torch_device), kernel.prepare(backend.torch_device))
        work = ((variant.both[0], calls[0]), (variant.both[1], calls[1]))
        shorts, longs = measure_beside(lanes, work, single, backend.torch_device)
    return Delay(
        variant=variant.name,
        long_kernel=kernel.name,
        long_ms=Spread.of(longs.alone_ms).median,
        alone_ms=Spread.of(shorts.alone_ms),
        beside_ms=Spread.of(shorts.beside_ms) if shorts.beside_ms else None,
        worst_ms=max(shorts.beside_ms, default=None),
        note=variant.note,
    )


def report_isolation(result: IsolationResult) -> Report:
    """Returns a row per kind of lanes and long kernel, the partitions' units below, and bars of the times."""
    rows, bars = [], []
    for delay in result.delays:
        long = f"{delay.long_kernel}, {delay.long_ms:.1f} ms"
        alone = delay.alone_ms.median
        ratio = delay.beside_ms.median / alone if delay.beside_ms is not None and alone > 0 else None
        rows.append((delay.variant, long, alone, delay.beside_ms, delay.worst_ms, ratio))
        for label, spread in (("alone", delay.alone_ms), (f"beside {delay.long_kernel}", delay.beside_ms)):
            name = f"{delay.variant}, {label}"
            if spread is None:
                bars.append(Bar(name=name, group=label, text="never met"))
            else:
                bars.append(bar_of(name, label, spread, f"{spread.median * 1e3:.1f} us"))
    summary = [*map(_layout_text, result.layouts)]
    summary += [
        f"{time.kernel} on half of the device, {time.slots_are} slots: {spread_text(time.time_ms)} ms"
        + (f" on {time.num_sms} SMs" if time.num_sms is not None else "")
        for time in result.placements
    ]
    summary += dict.fromkeys(f"{delay.variant}: {delay.note}" for delay in result.delays if delay.note)
    return Report(
        title="Delay of a short kernel by a long one, measured",
        headings=(("short on", None), ("beside", None), ("alone\nms", 3), ("beside it\nms", 3), ("worst\nms", 3),
                  ("times\nas long", 2)),
        rows=rows,
        summary=summary,
        picture=Picture(
            title="A short kernel alone and beside a long one, measured", x_axis="milliseconds a call", bars=bars
        ),
    )  # fmt: skip


def _layout_text(layout: LayoutUnits) -> str:
    sizes = "+".join(str(quota) for quota in layout.quotas)
    units = " | ".join(slots_text(partition.units) for partition in layout.partitions[:4])
    more = " | ..." if len(layout.partitions) > 4 else ""
    is_inside = all(partition.keeps_backward for partition in layout.partitions)
    return (
        f"{sizes} slots ({layout.slots_are}) ran on {units}{more}: "
        f"{'disjoint' if layout.disjoint else 'NOT DISJOINT'}, backward {'inside' if is_inside else 'NOT INSIDE'}"
    )
