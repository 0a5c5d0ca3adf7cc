"""Tables of GPU results, for the terminal and for pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bench.record import Figure, Study


def text_table(study: Study) -> str:
    """Returns all figures of a result as lines, by part."""
    lines = [head_line(study), ""]
    if study.dry_run:
        lines += ["DRY RUN at minimal sizes: the numbers are meaningless.", ""]
    for part in study.parts:
        lines.append(f"{part.name}: {part.asks} [{part.status}, {part.seconds:.1f} s]")
        lines += [f"    {text}" for text in (part.verdict, part.reason) if text]
        lines += [_text_row(figure) for figure in study.figures if figure.part == part.name]
        lines += [f"    note: {note}" for note in part.notes]
        if part.left_out:
            lines.append(f"    no time for: {', '.join(part.left_out[:4])}{', ...' if len(part.left_out) > 4 else ''}")
    return "\n".join(lines) + "\n"


def head_line(study: Study) -> str:
    """Returns machine, versions, date and commit of a result."""
    machine = study.machine.name if study.machine is not None else "an unknown machine"
    driver = f", driver {study.driver_version}" if study.driver_version else ""
    machine = f"DRY RUN on {machine}" if study.dry_run else machine
    return f"{machine}, torch {study.torch_version}{driver}, {study.created[:10]}, commit {study.commit or 'unknown'}"


def number(value: float | None, digits: int = 3) -> str:
    """Formats a number with significant digits, without an exponent."""
    if value is None:
        return "-"
    if value == 0 or abs(value) >= 10 ** (digits - 1):
        return f"{value:.0f}"
    return f"{float(f'{value:.{digits}g}'):g}"


def _text_row(figure: Figure) -> str:
    labels = ", ".join(f"{name} {value}" for name, value in figure.labels.items())
    shown = f"not measured: {figure.reason}" if figure.value is None else number(figure.value, 4)
    spread = f" [{number(figure.low, 4)}, {number(figure.high, 4)}]" if figure.low is not None else ""
    source = "dry run" if figure.dry_run else figure.source
    return f"    {figure.name} ({labels}): {shown}{spread} ({source})"


MAX_LOSS_DIFFERENCE = 0.02
"""Tolerance of losses in half precision; above it, times do not count."""
NOT_YET = "not measured yet\n"
_VARIANTS = (
    *("plain", "plain, one CUDA graph", "plain streams"),
    *("green lanes", "green lanes, graphs", "green lanes, SM targets"),
    "mosaic",
)
_STEPS = (
    ("forward+backward", "eager"),
    ("forward+backward", "captured"),
    ("forward", "eager"),
    ("forward", "captured"),
)


def pool_table(study: Study) -> str:
    """Returns the cost of creating and acquiring contexts, a row per figure."""
    rows = [
        (figure.name, ", ".join(f"{name} {value}" for name, value in figure.labels.items()), number(figure.value))
        for figure in study.of("pool")
        if figure.value is not None
    ]
    return _table(study, "pool", ("measured", "of", "median"), rows)


def scaling_table(study: Study) -> str:
    """Returns time by quota, a row per kernel."""
    figures = [figure for figure in study.of("scaling", "time_ms") if figure.value is not None]
    quotas = sorted({int(figure.labels["quota"]) for figure in figures})
    works = list(dict.fromkeys(figure.labels["work"] for figure in figures))
    cells = {(figure.labels["work"], int(figure.labels["quota"])): _median(figure) for figure in figures}
    rows = [(work, *(cells.get((work, quota), "-") for quota in quotas)) for work in works]
    return _table(study, "scaling", ("time by slots", *map(str, quotas)), rows)


def overlap_table(study: Study) -> str:
    """Returns a step of two modules by variant, and the gains by concurrency and quotas."""
    figures = [figure for figure in study.of("overlap", "step_ms") if figure.value is not None]
    variants = list(dict.fromkeys(figure.labels["variant"] for figure in figures))
    cells = {
        (figure.labels["variant"], figure.labels["passes"], figure.labels["launching"]): _median(figure)
        for figure in figures
    }
    rows = [(variant, *(cells.get((variant, *step), "-") for step in _STEPS)) for variant in variants]
    words = {
        "total": "gain: one after the other, over the best partitions",
        "concurrency": "of which concurrency: one after the other, over plain streams",
        "quotas": "of which quotas: plain streams, over the best partitions",
    }
    for name, text in words.items():
        gains = {(f.labels["passes"], f.labels["launching"]): number(f.value) for f in study.of("overlap", name)}
        if gains:
            rows.append((text, *(gains.get(step, "-") for step in _STEPS)))
    heads = ("step of two modules", *(f"{passes}, {launching}" for passes, launching in _STEPS))
    return _table(study, "overlap", heads, rows)


def models_table(study: Study) -> str:
    """Returns measured step times and speed-ups of the six models, and the predicted roofline bound."""
    steps = study.of("models", "step_ms")
    keys = dict.fromkeys((figure.labels["model"], figure.labels["batch"], figure.part) for figure in steps)
    models = list(dict.fromkeys(model for model, *_ in keys))
    rows = []
    for model, batch, part in sorted(keys, key=lambda key: (models.index(key[0]), int(key[1]))):
        cells = [_step_cell(study, part, variant) for variant in _VARIANTS]
        bound = next((f for f in study.of(part, "bound_ms")), None)
        rows.append((model, batch, *cells, f"{number(bound.value)} ms" if bound and bound.value is not None else "-"))
    heads = ("model", "batch", *(f"{variant}, measured" for variant in _VARIANTS), "roofline's bound, predicted")
    return _table(study, "models", heads, rows, _why_not(steps))


def _step_cell(study: Study, part: str, variant: str) -> str:
    figures = [f for f in study.of(part, "step_ms") if f.labels["variant"] == variant and f.value is not None]
    if not figures:
        return "-"
    text = _median(figures[0])
    speedup = _same(study, part, "speedup", figures[0], ("variant", "plan"))
    if speedup is not None:
        text += f" ({number(speedup.value)}x, {number(speedup.low)} to {number(speedup.high)})"
    far = _differs_by(study, figures[0])
    if far:
        text += f" LOSSES DIFFER by {number(far)}"
    plan, launching = figures[0].labels.get("plan", ""), figures[0].labels.get("launching", "")
    return ", ".join(filter(None, (text, launching, plan if "hand" in plan else "")))


def _differs_by(study: Study, figure: Figure) -> float:
    """Returns the difference of a variant's losses from the plain loop's if it is too large, otherwise 0."""
    far = _same(study, figure.part, "loss_difference", figure, ("variant", "plan"))
    value = 0.0 if far is None or far.value is None else far.value
    return 0.0 if value <= MAX_LOSS_DIFFERENCE else value


def _why_not(steps: tuple[Figure, ...]) -> tuple[str, ...]:
    """Returns a line per variant and reason, with its models."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for figure in steps:
        if figure.value is None:
            of = f"{figure.labels['model']} {figure.labels['batch']}"
            reasons.setdefault((figure.labels["variant"], figure.reason), []).append(of)
    return tuple(f"{variant} not measured ({', '.join(of)}): {reason}" for (variant, reason), of in reasons.items())


def _table(
    study: Study, part: str, heads: tuple[str, ...], rows: list[tuple[str, ...]], more: tuple[str, ...] = ()
) -> str:
    notes = list(more)
    notes += [
        f"{own.name} {own.status}: {own.reason or ', '.join(own.left_out[:3])}"
        for own in study.parts
        if (own.name == part or own.name.startswith(f"{part}/")) and own.status != "done"
    ]
    text = f"{head_line(study)}; medians.\n\n{table(heads, rows)}"
    return text + ("\n" + "".join(f"* {note}\n" for note in notes) if notes else "")


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (heads, ["---"] * len(heads), *rows))


def _median(figure: Figure | None) -> str:
    return "-" if figure is None or figure.value is None else f"{number(figure.value)} ms"


def _same(study: Study, part: str, name: str, like: Figure, labels: tuple[str, ...]) -> Figure | None:
    """Returns the figure of another name for the same subject."""
    wanted = {label: like.labels.get(label) for label in labels}
    return next((f for f in study.of(part, name) if {label: f.labels.get(label) for label in labels} == wanted), None)
