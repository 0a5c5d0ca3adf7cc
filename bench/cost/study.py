"""The parts of ``bench.cost`` in order, each with its share of the time; also a measurement of ``bench.gpu``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from bench.cost.calibration import calibration_names, measure_calibration
from bench.cost.chip_curves import curve_names, simulate_curves
from bench.cost.estimates import absent
from bench.cost.ground import GPU, TINY, Ground, Scale
from bench.cost.groups import fit_forms, group_names, judge_forms, measure_groups, measured_names
from bench.cost.plans import measure_plans, plan_names
from bench.cost.simulated import HEAD, chip_plan_names, simulate_plans, simulate_truth
from bench.cost.surfaces import REPEATED, measure_surface, surface_names
from bench.cost.truth import OTHER, SAME
from bench.gpu.bench import Bench
from bench.record import Figure, Part, Source, one_line
from mosaic.microbench import Budget
from mosaic.profiler import ForeignLoad


class StudyPart(NamedTuple):
    """One part of the study."""

    name: str
    """Its name."""
    source: Source
    """Of all its figures."""
    share: float
    """Of the time that is left."""
    names: tuple[str, ...]
    """Of its figures."""
    run: Callable[[], Iterator[Figure]]
    """Yields them."""


@dataclass
class CostStudy:
    """One run of the study on one backend."""

    bench: Bench
    """Where."""
    scale: Scale
    """How much."""
    parts: list[Part] = field(default_factory=list)
    """Those that have run."""

    def all_parts(self) -> tuple[StudyPart, ...]:
        """Returns every part; nothing has run yet, but the model is made."""
        ground, chip = Ground(self.bench, self.scale), self.scale.chip
        return (
            StudyPart(
                "interference, simulated",
                "simulated",
                0.5,
                (*group_names(HEAD, (SAME, OTHER), chip.sizes), *chip_plan_names()),
                lambda: self._simulate_groups(),
            ),
            StudyPart(
                "surfaces and descriptions, simulated",
                "simulated",
                0.5,
                curve_names(),
                lambda: simulate_curves(chip, self.bench.budget),
            ),
            StudyPart("surface", "measured", 0.3, (*surface_names(), REPEATED), lambda: measure_surface(ground)),
            StudyPart("interference", "measured", 0.5, measured_names(ground), lambda: measure_groups(ground)),
            StudyPart("plans", "measured", 0.7, plan_names(), lambda: measure_plans(ground)),
            StudyPart("descriptions", "measured", 1.0, calibration_names(), lambda: measure_calibration(ground)),
        )

    def run(self, only: Source | None = None) -> Iterator[Figure]:
        """Yields every figure by name, of one source or of both; a part that fails costs its figures and no others."""
        for part in self.all_parts():
            if only in (None, part.source):
                yield from self._run(part)

    def _simulate_groups(self) -> Iterator[Figure]:
        if self.bench.budget.allows("modules on the simulated chip"):
            truth = simulate_truth(self.scale.chip)
            fits = fit_forms(truth)
            yield from judge_forms(truth, fits, self.scale.chip.sizes)
            yield from simulate_plans(truth, fits[0], self.scale.chip)

    def _run(self, part: StudyPart) -> Iterator[Figure]:
        """Runs one part with a share of the time that is left, and fills in what it did not give."""
        whole, load, start = self.bench.budget, ForeignLoad(), time.monotonic()
        self.bench.budget = budget = Budget(part.share * whole.left_s)
        open_, reason, noted = dict.fromkeys(part.names), "", len(self.bench.notes)
        try:
            for figure in part.run():
                open_.pop(figure.name, None)
                yield replace(figure, labels={"of": part.name, **figure.labels})
        except Exception as error:
            reason = one_line(error)
        finally:
            self.bench.budget = whole
        foreign = "unknown" if load.share is None else f"{load.share:.2f}"
        status = "failed" if reason else "cut short" if budget.left_out else "done"
        for figure in absent(open_, reason or "the part did not come to it", source=part.source):
            yield replace(figure, labels={"of": part.name})
        self.parts.append(
            Part(
                name=part.name,
                asks=part.name,
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
    yield from study.run("measured")
    bench.notes += [f"{part.name}: {part.status} {part.reason}".strip() for part in study.parts]
