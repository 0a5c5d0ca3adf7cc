"""The pictures of ``bench_cost``: scaling surfaces, predicted against measured, residuals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from bench.cost.figures import FORMS, RULES
from bench.cost.ground import FIT_DEGREES, HELD_DEGREE
from bench.cost.study import CostStudy
from bench.cost.surface import tenths
from bench.cost.truth import simulated_samples
from bench.cost_groups import Judged
from bench.cost_simulated import simulate
from mosaic.cost import ScalingSurface
from mosaic.errors import InvalidProfileError
from mosaic.profile import Phase, Sample
from mosaic.report.charts import Words
from mosaic.report.cost_charts import Predictions, SurfaceLine, SurfacePanel, draw_predictions, draw_surfaces

_PICTURE_SLOTS = 16


def draw_all(run: CostStudy, folder: Path) -> Iterator[Path]:
    """Draws what a study has; measured and simulated in pictures of their own."""
    if run.ground is not None:
        device = run.ground.bench.device.name
        yield _surfaces(
            run.ground.profile.samples,
            run.ground.later.samples,
            Words(title="Scaling surfaces, measured: forward", subtitle=device, x_axis="quota in slots", y_axis="ms"),
            folder / "surfaces-measured.png",
        )
        subtitle = f"{device}; slowest module of groups that no fit has seen, both phases"
        yield _predictions(run.seen.judged, "measured", subtitle, folder / "predictions-measured.png")
    every = [s for degree in (*FIT_DEGREES, HELD_DEGREE) for s in simulated_samples(_PICTURE_SLOTS, degree)]
    grid = tenths(_PICTURE_SLOTS)
    fit = [s for s in every if s.degree in FIT_DEGREES and s.quota in grid]
    inside = [s for s in every if s not in fit and s.quota >= grid[0]]
    words = Words(
        title="Scaling surfaces, simulated: forward",
        subtitle="analytic model of an H100 in 16 slots, waves of tiles included; every tenth is fitted",
        x_axis="quota in slots",
        y_axis="ms",
    )
    yield _surfaces(fit, inside, words, folder / "surfaces-simulated.png")
    for rule in RULES:
        path = folder / f"predictions-simulated-{rule.replace(' ', '-')}.png"
        found = simulate(rule, 0).judged
        subtitle = f"bandwidth shared {rule}; groups of 2 to 8 modules; fitted were others"
        yield _predictions(found, "simulated", subtitle, path)


def _surfaces(fit: Sequence[Sample], held: Sequence[Sample], words: Words, path: Path) -> Path:
    panels = []
    for module in dict.fromkeys(sample.module for sample in fit):
        mine, theirs = (
            [s for s in samples if (s.module, s.phase) == (module, Phase.FORWARD) and s.times_ms]
            for samples in (fit, held)
        )
        try:
            surface = ScalingSurface(mine)
        except InvalidProfileError:
            continue
        lines = [_line(surface, degree, mine, theirs) for degree in sorted({s.degree for s in (*mine, *theirs)})]
        panels.append(SurfacePanel(title=module.rpartition(".")[2], lines=tuple(lines)))
    draw_surfaces(panels, words, path)
    return path


def _line(surface: ScalingSurface, degree: int, fit: Iterable[Sample], held: Iterable[Sample]) -> SurfaceLine:
    quotas = surface.quotas(surface.degrees[0])
    known = {s.quota for s in fit if s.degree == degree}
    return SurfaceLine(
        name=f"{degree} device{'s' if degree > 1 else ''}{'' if degree in surface.degrees else ', held out'}",
        fitted=tuple((quota, surface.time_ms(degree, quota)) for quota in quotas),
        samples=tuple((s.quota, s.median_ms) for s in fit if s.degree == degree),
        held_out=tuple((s.quota, s.median_ms) for s in held if s.degree == degree and s.quota not in known),
    )


def _predictions(judged: Sequence[Judged], source: str, subtitle: str, path: Path) -> Path:
    models = [
        Predictions(name=words, pairs=tuple((j.measured_ms, j.predicted_ms) for j in judged if j.form == form))
        for form, words in FORMS.items()
    ]
    title = f"Held-out plans, {source}"
    words = Words(title=title, subtitle=subtitle, x_axis=f"{source}, ms", y_axis="predicted, ms")
    draw_predictions(models, words, path)
    return path
