"""The ground of all parts of ``bench.cost``: modules, the profile that is fitted, and what is measured after it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from bench.cost.forms import Fitted
from bench.cost.models import NAMES, Branches, Size, make_inputs
from bench.gpu.bench import Bench
from mosaic.cost import Bandwidths
from mosaic.cost.analytic import count_module
from mosaic.cost.counts import ModuleCounts
from mosaic.engine import find_modules
from mosaic.hardware import Hardware
from mosaic.microbench.kernels import half_type
from mosaic.profile import Profile, Sample
from mosaic.profiler import ProfileSettings, default_quotas, open_counters, profile_modules

FIT_DEGREES = (1, 2, 8)
HELD_DEGREE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipScale:
    """How much to simulate."""

    num_modules: int
    """Modules of each set."""
    sizes: tuple[int, ...]
    """Modules side by side."""
    num_fit: int
    """Groups to fit, of each size."""
    num_choose: int
    """Groups to choose a form by, of each size."""
    num_judge: int
    """Groups that judge, of each size and set."""
    num_plans: int
    """Models that every form plans for."""
    num_chips: int
    """Chips that judge surfaces, in the order of ``bench.cost.chip_curves``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much to measure."""

    size: Size
    """Of the modules."""
    num_modules: int
    """Modules in all."""
    settings: ProfileSettings
    """How carefully to profile."""
    num_groups: int
    """Most groups to measure of each number of modules in each of three sets."""
    rounds: int
    """Rounds in which plans take turns."""
    chip: ChipScale
    """How much to simulate."""


def _settings(repeats: int, seconds: float, foreign_share: float) -> ProfileSettings:
    # A busy machine is no reason to refuse: the load is recorded with every figure.
    return ProfileSettings(
        warmup=1,
        min_repeats=repeats,
        max_repeats=4 * repeats,
        sample_seconds=seconds,
        foreign_share=foreign_share,
        pairs=False,
    )


TINY = Scale(
    size="tiny",
    num_modules=3,
    settings=_settings(2, 0.02, 2.0),
    num_groups=1,
    rounds=2,
    chip=ChipScale(num_modules=1, sizes=(2,), num_fit=1, num_choose=1, num_judge=1, num_plans=1, num_chips=0),
)
QUICK = Scale(
    size="host",
    num_modules=6,
    settings=_settings(3, 0.1, 2.0),
    num_groups=5,
    rounds=3,
    chip=ChipScale(num_modules=3, sizes=(2, 3), num_fit=6, num_choose=4, num_judge=4, num_plans=1, num_chips=1),
)
FULL = Scale(
    size="host",
    num_modules=8,
    settings=_settings(9, 0.6, 0.3),
    num_groups=10,
    rounds=12,
    chip=ChipScale(
        num_modules=8,
        sizes=(2, 3, 4, 6),
        num_fit=12,
        num_choose=8,
        num_judge=12,
        num_plans=6,
        num_chips=2,
    ),
)
GPU = Scale(size="gpu", num_modules=8, settings=_settings(5, 0.1, 2.0), num_groups=4, rounds=5, chip=FULL.chip)


class NoNetwork:
    """Degrees without communication: one replica's share of the batch is all that counts."""

    def all_reduce_ms(self, num_bytes: float, degree: int) -> float:
        """Returns 0."""
        return 0.0


class Ground:
    """The modules on one backend; each profile is measured when it is first asked for.

    Attributes:
        fits: Forms fitted to groups that ran side by side, by their words, once there are any.
    """

    def __init__(self, bench: Bench, scale: Scale) -> None:
        """Makes the model of all modules and finds them in it."""
        self.bench = bench
        self.scale = scale
        self.fits: dict[str, Fitted] = {}
        self._model, inputs = self.model_of(NAMES[: scale.num_modules])
        self.finding = find_modules(self._model, inputs, include=["branches.*"])

    def model_of(self, names: Iterable[str]) -> tuple[Branches, dict[str, object]]:
        """Returns a new model of some modules, with its inputs; the same weights each time."""
        names = tuple(names)
        device, dtype = self.bench.torch_device, half_type(self.bench.torch_device)
        model = Branches(names, self.scale.size).to(device, dtype)
        return model, dict(make_inputs(names, self.scale.size, device, dtype))

    @property
    def names(self) -> tuple[str, ...]:
        """All modules, as the graph has them."""
        return self.finding.graph.names

    @property
    def num_slots(self) -> int:
        """Slots of the device."""
        return self.bench.device.num_slots

    @property
    def unit(self) -> str:
        """What a slot is called in reasons."""
        return "slots" if self.bench.on_gpu else "cores"

    @property
    def fit_quotas(self) -> tuple[int, ...]:
        """The paper's grid, and one slot, which groups of many need."""
        return tuple(sorted({1, *default_quotas(self.bench.device)}))

    @property
    def held_quotas(self) -> tuple[int, ...]:
        """Quotas that no fit sees, within those that it sees."""
        return tuple(q for q in range(1, self.num_slots) if q not in self.fit_quotas)

    @property
    def hardware(self) -> Hardware | None:
        """The catalogue's description of the device; None where there is none with as many slots."""
        found = hardware_of(self.bench.device)
        return found if found is not None and found.num_slots == self.num_slots else None

    @cached_property
    def profile(self) -> Profile:
        """What is fitted."""
        return self._measure(self.fit_quotas, FIT_DEGREES)

    @cached_property
    def later(self) -> Profile:
        """What judges: held-out quotas and a held-out degree, and once more the ends of the grid at degree 1."""
        _ = self.profile  # held-out points are measured after all that is fitted
        return self._measure({*self.held_quotas, self.fit_quotas[0], self.fit_quotas[-1]}, (1, HELD_DEGREE))

    @cached_property
    def counts(self) -> dict[str, ModuleCounts]:
        """Counted operators of every module."""
        kind = self.bench.device.kind
        return {s.name: count_module(s.module, s.args, s.kwargs, target=kind) for s in self.finding.subjects}

    @cached_property
    def bandwidths(self) -> Bandwidths:
        """What modules use alone: read from counters where there are any, else counted bytes over measured time."""
        counters = open_counters(self.bench.backend)
        if counters is None or counters.missing:
            why = "the host has none" if counters is None else counters.missing
            self.bench.notes.append(f"bandwidths are counted bytes over measured times, not measured: {why}")
            return Bandwidths(self._counted_samples())
        middle = self.fit_quotas[len(self.fit_quotas) // 2]
        with counters:
            seen = profile_modules(
                self._model,
                self.finding.subjects,
                self.finding.graph,
                self.bench.backend,
                quotas=(1, middle, self.num_slots),
                counters=counters,
                settings=self.scale.settings,
            )
        return Bandwidths(seen.samples)

    def _counted_samples(self) -> list[Sample]:
        """Samples with counted bytes over time, as a share of the peak or, without a description, of the fastest."""
        ran = [s for s in self.profile.samples if s.degree == 1 and s.times_ms and s.median_ms > 0]
        rates = [self.counts[s.module].phase(s.phase).moved_bytes / s.median_ms / 1e6 for s in ran]
        peak = self.hardware.memory_gb_per_s if self.hardware is not None else max(rates, default=1.0)
        return [
            replace(sample, bandwidth_utilisation=min(1.0, rate / peak))
            for sample, rate in zip(ran, rates, strict=True)
        ]

    def _measure(self, quotas: Iterable[int], degrees: tuple[int, ...]) -> Profile:
        return profile_modules(
            self._model,
            self.finding.subjects,
            self.finding.graph,
            self.bench.backend,
            quotas=quotas,
            degrees=degrees,
            network=NoNetwork(),
            settings=self.scale.settings,
        )
