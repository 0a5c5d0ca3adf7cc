"""Tables of GPU results: one for the terminal, and those that stand in the README."""

from __future__ import annotations

from bench.record import Figure, Study


def text_table(study: Study) -> str:
    """Returns everything in a result as plain lines, part by part."""
    lines = [head_line(study), ""]
    if study.dry_run:
        lines += ["DRY RUN on CPU cores at the smallest sizes: no number below means anything.", ""]
    for part in study.parts:
        lines.append(f"{part.name}: {part.asks} [{part.status}, {part.seconds:.1f} s]")
        if part.reason:
            lines.append(f"    {part.reason}")
        lines += [_text_row(figure) for figure in study.figures if figure.part == part.name]
        lines += [f"    note: {note}" for note in part.notes]
        if part.left_out:
            lines.append(f"    no time for: {', '.join(part.left_out[:4])}{', ...' if len(part.left_out) > 4 else ''}")
    return "\n".join(lines) + "\n"


def head_line(study: Study) -> str:
    """Returns where and when a result was made."""
    machine = study.machine.name if study.machine is not None else "an unknown machine"
    driver = f", driver {study.driver_version}" if study.driver_version else ""
    return f"{machine}, torch {study.torch_version}{driver}, {study.created[:10]}, commit {study.commit or 'unknown'}"


def number(value: float | None, digits: int = 3) -> str:
    """Returns a number with so many significant digits, without an exponent."""
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
