"""The parts of ``bench.cost`` in order, each with its share of the time; also a measurement of ``bench.gpu``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from bench.cost.analytic import AFTER, BEFORE, measure_analytic
from bench.cost.figures import SLOTS, absent, judged
from bench.cost.ground import GPU, TINY, Ground, Scale
from bench.cost.groups import group_names, measure_groups
from bench.cost.plans import measure_plans, plan_names
from bench.cost.sampling import SAMPLING, measure_sampling
from bench.cost.simulated import simulate_all, simulated_names
from bench.cost.surface import AT_DEGREES, AT_QUOTAS, REPEATED, measure_surface, simulate_surface
from bench.gpu.bench import Bench
from bench.record import Figure, Part, one_line
from mosaic.microbench import Budget
from mosaic.profiler import ForeignLoad

SURFACE = (AT_QUOTAS, AT_DEGREES, REPEATED)
MEASURED = (*SURFACE, *group_names(), *plan_names(), BEFORE, AFTER, *SAMPLING)
SIMULATED_SURFACE = tuple(
    f"simulated ({num} slots): {name}" for num in SLOTS for name in (AT_QUOTAS, AT_DEGREES, *SAMPLING)
)
EVERY_NAME = (*MEASURED, *SIMULATED_SURFACE, *simulated_names())
"""Names of all figures that the study writes."""


@dataclass
class CostStudy:
    """One run of the study on one backend."""

    bench: Bench
    """Where."""
    scale: Scale
    """How much."""
    parts: list[Part] = field(default_factory=list)
    """Those that have run."""

    def run(self, *, simulated: bool = True) -> Iterator[Figure]:
        """Yields every figure by name; a part that fails costs its figures and no others."""
        ground = Ground(self.bench, self.scale)
        yield from self._part("surface", 0.3, SURFACE, lambda: measure_surface(ground))
        yield from self._part("interference", 0.35, group_names(), lambda: measure_groups(ground))
        yield from self._part("plans", 0.3, plan_names(), lambda: measure_plans(ground))
        yield from self._part("analytic", 0.1, [BEFORE, AFTER], lambda: measure_analytic(ground))
        yield from self._part("sampling", 0.1, SAMPLING, lambda: measure_sampling(ground))
        if simulated:
            yield from self._part(
                "surface, simulated",
                0.3,
                SIMULATED_SURFACE,
                lambda: simulate_surface(self.bench.budget),
                source="simulated",
            )
            yield from self._part(
                "interference and plans, simulated",
                1.0,
                simulated_names(),
                lambda: simulate_all(self.scale, self.bench.budget),
                source="simulated",
            )

    def _part(
        self,
        name: str,
        share: float,
        names: Sequence[str],
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
    """Is a measurement of ``bench.gpu``: all that is measured, on its backend and in its time."""
    study = CostStudy(bench, TINY if bench.dry_run else GPU)
    yield from study.run(simulated=False)
    bench.notes += [f"{part.name}: {part.status} {part.reason}".strip() for part in study.parts]
