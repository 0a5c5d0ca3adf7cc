"""The parts of ``bench_cost`` in order, each with its share of the time; also a measurement of ``bench.gpu.__main__``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from bench.cost.analytic import AFTER, BEFORE, measure_analytic
from bench.cost.figures import ALL, COUNTS, FORMS, RULES, SLOTS, absent, error_name, judged, step_name
from bench.cost.ground import GPU, TINY, Ground, Scale
from bench.cost.plans import IN_TURN, measure_plans, ms_name
from bench.cost.sampling import measure_sampling, sampling_names
from bench.cost.surface import (
    AT_DEGREES,
    AT_QUOTAS,
    REPEATED,
    measure_surface,
    simulate_surface,
)
from bench.cost_groups import REPEATED as PLANS_REPEATED
from bench.cost_groups import SLOWDOWN, Seen, measure_groups
from bench.cost_simulated import simulate_all
from bench.gpu.bench import Bench
from bench.record import Figure, Part, one_line
from mosaic.microbench import Budget
from mosaic.profiler import ForeignLoad


@dataclass
class CostStudy:
    """One run of the study on one backend."""

    bench: Bench
    """Where."""
    scale: Scale
    """How much."""
    seen: Seen = field(default_factory=Seen)
    """Comparisons and fits."""
    parts: list[Part] = field(default_factory=list)
    """What has run."""
    ground: Ground | None = None
    """Modules and profiles, once they are there."""

    def run(self, *, simulated: bool = True) -> Iterator[Figure]:
        """Yields every figure by name; a part that fails costs its figures and no others."""
        self.ground = ground = Ground(self.bench, self.scale)
        yield from self._part("surface", 0.3, surface_names(), lambda: measure_surface(ground))
        yield from self._part("interference", 0.35, group_names(), lambda: measure_groups(ground, self.seen))
        yield from self._part("plans", 0.3, plan_names(), lambda: measure_plans(ground, self.seen.fits))
        yield from self._part("analytic", 0.1, [BEFORE, AFTER], lambda: measure_analytic(ground))
        yield from self._part("sampling", 0.1, sampling_names(), lambda: measure_sampling(ground))
        if simulated:
            names = simulated_surface_names()
            yield from self._part("surface, simulated", 0.3, names, simulate_surface, source="simulated")
            names = simulated_names()
            run = lambda: simulate_all(self.scale, self.bench.budget)  # noqa: E731
            yield from self._part("interference and plans, simulated", 1.0, names, run, source="simulated")

    def _part(
        self,
        name: str,
        share: float,
        names: list[str],
        measure: Callable[[], Iterator[Figure]],
        *,
        source: str = "measured",
    ) -> Iterator[Figure]:
        """Runs one part with a share of the time that is left, and fills in what it did not give."""
        whole, load, start = self.bench.budget, ForeignLoad(), time.monotonic()
        self.bench.budget = budget = Budget(share * whole.left_s)
        open_, reason, noted = dict.fromkeys(names), "", len(self.bench.notes)
        try:
            for figure in measure():
                open_.pop(figure.name, None)
                yield judged(replace(figure, labels={"of": name, **figure.labels}))
        except Exception as error:
            reason = one_line(error)
        finally:
            self.bench.budget = whole
        foreign = "unknown" if load.share is None else f"{load.share:.2f}"
        status = "failed" if reason else "cut short" if budget.left_out else "done"
        for figure in absent(open_, reason or "the part did not come to it", source=source):
            yield judged(replace(figure, labels={"of": name}))
        self.parts.append(
            Part(
                name=name,
                asks=name,
                status=status,
                seconds=round(time.monotonic() - start, 2),
                reason=reason,
                left_out=budget.left_out,
                notes=(f"CPU taken by other processes: {foreign}", *self.bench.notes[noted:]),
            )
        )


def measure_cost(bench: Bench) -> Iterator[Figure]:
    """Is a measurement of ``bench.gpu.__main__``: all that is measured, on its backend and in its time."""
    study = CostStudy(bench, TINY if bench.dry_run else GPU)
    yield from study.run(simulated=False)
    bench.notes += [f"{part.name}: {part.status} {part.reason}".strip() for part in study.parts]


def surface_names() -> list[str]:
    """Returns the names of figures of surfaces."""
    return [AT_QUOTAS, AT_DEGREES, REPEATED]


def group_names() -> list[str]:
    """Returns the names of figures of held-out plans."""
    errors = [error_name(count, form) for count in COUNTS for form in FORMS]
    return [*errors, *(text.format(count) for count in COUNTS for text in (SLOWDOWN, PLANS_REPEATED))]


def plan_names() -> list[str]:
    """Returns the names of figures of plans that ran."""
    steps = [step_name(count, form) for count in (*COUNTS, ALL) for form in FORMS]
    return [*steps, *(ms_name(count, of) for count in (*COUNTS, ALL) for of in (*FORMS.values(), IN_TURN))]


def simulated_surface_names() -> list[str]:
    """Returns the names of the simulated figures of surfaces and sampling."""
    names = [AT_QUOTAS, AT_DEGREES, *sampling_names()]
    return [f"simulated ({num_slots} slots): {name}" for num_slots in SLOTS for name in names]


def simulated_names() -> list[str]:
    """Returns the names of the simulated figures of held-out plans and of plans that ran."""
    named = (error_name, step_name)
    return [name(n, form, rule=rule) for rule in RULES for name in named for n in COUNTS for form in FORMS]


def every_name() -> list[str]:
    """Returns the names of all figures that the study writes."""
    measured = [*surface_names(), *group_names(), *plan_names(), BEFORE, AFTER, *sampling_names()]
    return [*measured, *simulated_surface_names(), *simulated_names()]
