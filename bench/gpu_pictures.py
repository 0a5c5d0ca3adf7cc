"""Pictures of GPU results, drawn from the kept files alone: the same file gives the same picture."""

from __future__ import annotations

from pathlib import Path

from bench.gpu.tables import head_line
from bench.record import Study
from mosaic.report.charts import Bar, Line, Words, draw_bars, draw_lines


def draw_pictures(study: Study, stem: Path) -> tuple[Path, ...]:
    """Writes ``STEM-scaling.png`` and ``STEM-models.png`` as far as there is something to draw."""
    drawn = []
    lines = scaling_lines(study)
    if lines:
        words = Words(
            title="Speed by quota, measured",
            subtitle=head_line(study),
            x_axis="slots",
            y_axis="speed, relative to the largest quota",
        )
        drawn.append(stem.with_name(f"{stem.name}-scaling.png"))
        draw_lines(lines, words, drawn[-1], level=1.0)
    bars = model_bars(study)
    if bars:
        words = Words(
            title="A training step, measured",
            subtitle=head_line(study),
            x_axis="speed-up over the plain loop in rounds taken in turn; lines are 95 % intervals",
        )
        drawn.append(stem.with_name(f"{stem.name}-models.png"))
        draw_bars(bars, words, drawn[-1], level=1.0)
    return tuple(drawn)


def scaling_lines(study: Study) -> list[Line]:
    """Returns speed over quota, a line for each kernel."""
    by_work: dict[str, list[tuple[int, float, float, float]]] = {}
    for figure in study.of("scaling", "time_ms"):
        if figure.value and figure.low and figure.high:
            point = (int(figure.labels["quota"]), figure.value, figure.low, figure.high)
            by_work.setdefault(figure.labels["work"], []).append(point)
    lines = []
    for work, points in by_work.items():
        points.sort()
        whole = points[-1][1]
        speeds = tuple((float(quota), whole / ms, whole / high, whole / low) for quota, ms, low, high in points)
        lines.append(Line(name=work, points=speeds))
    return lines


def model_bars(study: Study) -> list[Bar]:
    """Returns the speed-up of every variant of every model."""
    return [
        Bar(
            name=f"{figure.labels['model']}, batch {figure.labels['batch']}: {figure.labels['variant']}",
            group=figure.labels["variant"],
            value=figure.value,
            quartiles=(figure.low, figure.high) if figure.low is not None and figure.high is not None else None,
            text=f"{figure.value:.2f}x",
        )
        for figure in study.of("models", "speedup")
        if figure.value is not None
    ]
