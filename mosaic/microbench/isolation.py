"""``isolation``: which SMs does a partition really use, and does a long kernel in one delay a short one in another?"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar

from mosaic.backends.base import Backend
from mosaic.device import FORBID_EXTRA
from mosaic.errors import BackendUnavailableError, MosaicError
from mosaic.microbench.beside import measure_beside
from mosaic.microbench.budget import Budget
from mosaic.microbench.devices import alternatives
from mosaic.microbench.kernels import Kernel, kernels_named, long_kernels, short_kernel
from mosaic.microbench.result import Recorder, Result, Spread
from mosaic.microbench.settings import BenchSettings
from mosaic.microbench.sharing.variants import UNAVAILABLE, Split, open_variant
from mosaic.microbench.timing import time_alone
from mosaic.microbench.units import units_of, units_of_backward

DELAYED = ("partitions", "plain", "prioritised", "torch_contexts")
"""Variants on which a short kernel is timed beside a long one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionUnits:
    """What one partition was seen to run on."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    slots: tuple[int, ...]
    """Its slots."""
    num_sms: int | None
    """SMs that it was granted; None where the backend does not tell."""
    units: tuple[int, ...]
    """Ids of SMs (cores on the host) that its work ran on, sorted."""
    backward_units: tuple[int, ...]
    """The same of a backward whose forward ran on the partition."""

    @property
    def keeps_backward(self) -> bool:
        """Whether backward stayed inside the partition."""
        return set(self.backward_units) <= set(self.units)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutUnits:
    """The partitions of one layout."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    slots_are: str
    """``default``, or the option by which slots or partitions were made."""
    quotas: tuple[int, ...]
    """Slots of each partition."""
    partitions: tuple[PartitionUnits, ...]
    """In the order of ``quotas``."""

    @property
    def disjoint(self) -> bool:
        """Whether no two partitions ran on the same SM or core."""
        return all(
            set(one.units).isdisjoint(other.units)
            and set(one.backward_units).isdisjoint(other.backward_units)
            for one, other in combinations(self.partitions, 2)
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """A short kernel alone, and while a long one keeps running on the other lane."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    variant: str
    """Kind of lanes."""
    long_kernel: str
    """What kept running."""
    long_ms: float
    """Median time of the long kernel alone on its lane."""
    alone_ms: Spread
    """The short kernel with the other lane idle: from its launch's turn in the stream to its end."""
    beside_ms: Spread | None
    """The same while the long kernel ran throughout; None where no call did."""
    worst_ms: float | None
    """Longest of these."""
    note: str = ""
    """What to know about the variant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementTime:
    """A kernel on half of the device, by the option with which slots or partitions were made."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    slots_are: str
    """``default`` or the option."""
    kernel: str
    """What ran."""
    num_sms: int | None
    """SMs that the half was granted; None where the backend does not tell."""
    time_ms: Spread
    """Time of a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationResult(Result):
    """Where work ran, and what it suffered from its neighbours."""

    layouts: tuple[LayoutUnits, ...]
    """SM or core ids."""
    delays: tuple[Delay, ...]
    """Short beside long."""
    placements: tuple[PlacementTime, ...]
    """Kernels on half of the device."""


def measure_isolation(backend: Backend, settings: BenchSettings, budget: Budget | None = None) -> IsolationResult:
    """Reads back what partitions run on, then times a short kernel beside long ones.

    Args:
        backend: Where to measure.
        settings: Sizes and bounds.
        budget: Time; what does not fit is named in ``left_out``.
    """
    recorder = Recorder(backend, budget or Budget())
    layouts: list[LayoutUnits] = []
    placements: list[PlacementTime] = []
    delays = _delays(backend, settings, recorder)
    for name, make in (("default", lambda: backend), *alternatives(backend).items()):
        if not recorder.budget.allows(f"SM ids, {name}"):
            continue
        try:
            made = make()
            layouts += _layouts(made, name, recorder)
            placements += _placements(made, name, settings, recorder)
        except UNAVAILABLE as error:
            recorder.cannot(name, error)
    if not alternatives(backend):
        recorder.cannot("finer slots and split placement", f"the {backend.name} backend has one kind of slot")
    return IsolationResult(
        layouts=tuple(layouts),
        delays=tuple(delays),
        placements=tuple(placements),
        absent=tuple(recorder.absent),
        left_out=recorder.left_out,
        origin=recorder.origin(),
    )


def layouts_of(num_slots: int) -> tuple[tuple[int, ...], ...]:
    """Returns quotas of layouts that are worth looking at: halves, uneven halves, quarters, single slots, the whole."""
    half, quarter = num_slots // 2, num_slots // 4
    wanted: list[tuple[int, ...]] = [(half, num_slots - half), (quarter, num_slots - quarter), (quarter,) * 4]
    wanted += [(1,) * min(num_slots, 16), (num_slots,)]
    return tuple(dict.fromkeys(quotas for quotas in wanted if min(quotas) > 0))


def slots_in_turn(quotas: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Returns neighbouring partitions of these sizes, from slot 0 on."""
    starts = [sum(quotas[:index]) for index in range(len(quotas))]
    return tuple(tuple(range(start, start + quota)) for start, quota in zip(starts, quotas, strict=True))


def _layouts(backend: Backend, name: str, recorder: Recorder) -> list[LayoutUnits]:
    found: list[LayoutUnits] = []
    for quotas in layouts_of(backend.device.num_slots):
        if not recorder.budget.allows(f"SM ids of {'+'.join(map(str, quotas))} slots, {name}"):
            continue
        partitions = slots_in_turn(quotas)
        try:
            with backend.open_lanes(partitions) as lanes:
                seen = tuple(
                    PartitionUnits(
                        slots=slots,
                        num_sms=getattr(lanes.lane(slots), "num_sms", None),
                        units=units_of(backend, lanes.lane(slots)),
                        backward_units=units_of_backward(backend, lanes.lane(slots)),
                    )
                    for slots in partitions
                )
        except BackendUnavailableError as error:
            recorder.cannot(f"SM ids, {name}", error)
            break  # it will not be there for the next layout either
        except MosaicError as error:
            recorder.cannot(f"SM ids of {'+'.join(map(str, quotas))} slots, {name}", error)
        else:
            found.append(LayoutUnits(slots_are=name, quotas=quotas, partitions=seen))
    return found


def _placements(backend: Backend, name: str, settings: BenchSettings, recorder: Recorder) -> list[PlacementTime]:
    half = tuple(range(max(1, backend.device.num_slots // 2)))
    found: list[PlacementTime] = []
    with backend.open_lanes([half]) as lanes:
        for kernel in kernels_named(("gemm", "attention"), settings.scale, backend.torch_device):
            if recorder.budget.allows(f"{kernel.name} on half of the device, {name}"):
                lane, call = lanes.lane(half), kernel.prepare(backend.torch_device)
                spread = Spread.of(time_alone(lane, call, settings).all_ms)
                num_sms = getattr(lane, "num_sms", None)
                found.append(PlacementTime(slots_are=name, kernel=kernel.name, num_sms=num_sms, time_ms=spread))
    return found


def _delays(backend: Backend, settings: BenchSettings, recorder: Recorder) -> list[Delay]:
    count = backend.device.num_slots
    if count < 2:
        recorder.cannot("a short kernel beside a long one", "the device has one slot, and two partitions need two")
        return []
    found: list[Delay] = []
    for kind in DELAYED:
        for kernel in long_kernels(settings.scale, backend.torch_device):
            if not recorder.budget.allows(f"a short kernel beside {kernel.name}, {kind}"):
                continue
            try:
                found.append(_delay(backend, kind, (count // 2, count - count // 2), kernel, settings))
            except UNAVAILABLE as error:
                recorder.cannot(kind.replace("_", " "), error)
    return found


def _delay(backend: Backend, kind: str, split: Split, kernel: Kernel, settings: BenchSettings) -> Delay:
    short = short_kernel(settings.scale, backend.torch_device)
    single = dataclasses.replace(settings, piece_ms=1e-4)  # every call is timed by itself
    variant = open_variant(kind, backend, split)
    with variant.lanes as lanes:
        calls = (short.prepare(backend.torch_device), kernel.prepare(backend.torch_device))
        both = ((variant.both[0], calls[0]), (variant.both[1], calls[1]))
        shorts, longs = measure_beside(lanes, both, single, backend.torch_device)
    return Delay(
        variant=variant.name,
        long_kernel=kernel.name,
        long_ms=Spread.of(longs.alone_ms).median,
        alone_ms=Spread.of(shorts.alone_ms),
        beside_ms=Spread.of(shorts.beside_ms) if shorts.beside_ms else None,
        worst_ms=max(shorts.beside_ms, default=None),
        note=variant.note,
    )
