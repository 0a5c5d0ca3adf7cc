"""Tables for the terminal: style, graphs, measured profiles and compared planners."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from mosaic.graph import ModuleGraph
from mosaic.plan import Plan
from mosaic.profile import Phase, Profile, Sample, note_of_others

if TYPE_CHECKING:
    from rich.table import Table

    from mosaic.solver.compare import Comparison


def make_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    caption: str = "",
    bold: Collection[int] = (),
    ends: Collection[int] = (),
) -> Table:
    """Returns a table of rows; titles, cells and captions have no markup.

    ``>`` before a heading right-justifies its column without wrapping. ``bold`` has the indices of bold rows, ``ends``
    those of the last rows of sections.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(title, style="bold"),
        caption=Text(caption + "\n") if caption else None,
        box=box.SIMPLE_HEAD,
        title_justify="left",
        caption_justify="left",
        pad_edge=False,
        collapse_padding=True,
    )
    for heading in columns:
        is_number = heading.startswith(">")
        justify: Literal["right", "left"] = "right" if is_number else "left"
        table.add_column(heading.removeprefix(">"), justify=justify, no_wrap=is_number, overflow="fold")
    for index, cells in enumerate(rows):
        style = "bold" if index in bold else ""
        table.add_row(*(Text(cell, style=style) for cell in cells), end_section=index in ends)
    return table


def profile_table(profile: Profile) -> Table:
    """Returns medians and quartiles by module and quota, memory, and load of the machine."""
    from rich.filesize import decimal

    has_degrees = any(sample.degree > 1 for sample in profile.samples)
    columns = ["module", *[">degree"] * has_degrees, ">slots", ">forward ms\n(quartiles)", ">backward ms\n(quartiles)"]
    kept_bytes = {entry.module: entry.resident_bytes + entry.activation_bytes for entry in profile.memory}
    rows, ends = [], []
    for name in profile.graph.names:
        ran = [sample for sample in profile.samples if sample.module == name and sample.infeasible is None]
        samples = {(sample.degree, sample.quota, sample.phase): sample for sample in ran}
        for index, (degree, quota) in enumerate(sorted({key[:2] for key in samples})):
            pair = [samples.get((degree, quota, phase)) for phase in (Phase.FORWARD, Phase.BACKWARD)]
            peak_bytes = max(sample.peak_bytes for sample in pair if sample)
            sizes = [peak_bytes, *[kept_bytes.get(name, 0)] * (index == 0)]  # 0 is unknown in a profile
            cells = [name if index == 0 else "", *[str(degree)] * has_degrees, str(quota), *map(_times, pair)]
            rows.append([*cells, *(decimal(size) if size else "-" for size in sizes)])
        ends.append(len(rows) - 1)
    title = f"Profile, measured: {profile.device.name}, {profile.device.num_slots} slots"
    return make_table(title, [*columns, ">peak", ">keeps"], rows, caption=_profile_caption(profile), ends=ends)


def _times(sample: Sample | None) -> str:
    if sample is None:
        return "-"
    # three digits suffice for a median of a few runs, and fit into 80 columns
    digits = 1 if sample.median_ms >= 10 else 2
    first, third = (f"{time_ms:.{digits}f}" for time_ms in sample.quartiles_ms)
    return f"{sample.median_ms:.{digits}f} ({first}-{third})"


def _profile_caption(profile: Profile) -> str:
    where = profile.environment
    note = note_of_others(where.foreign_cpu_share, profile.device)
    lines = [
        f"measured {where.created} with torch {where.torch_version}",
        note or f"other processes used {where.foreign_cpu_share:.1%} of the CPU",
    ]
    if profile.pairs:
        worst = max(profile.pairs, key=lambda pair: pair.slowdown)
        usual = statistics.median(pair.slowdown for pair in profile.pairs)
        lines.append(f"beside another module {usual:.2f}× the time alone (median)")
        lines.append(f"at most {worst.slowdown:.2f}× ({worst.module} beside {worst.beside}, {worst.phase})")
    return "\n".join(lines)


def graph_table(graph: ModuleGraph) -> Table:
    """Returns the modules in call order with size, inputs, and modules that may run beside them."""
    rows = []
    for node in graph.modules:
        beside = [other for other in graph.names if graph.independent(node.name, other)]
        rows.append(
            (
                node.name,
                f"{node.num_parameters:,}",
                "yes" if node.trainable else "frozen" if node.num_parameters else "no parameters",
                ", ".join(graph.predecessors(node.name)) or "the batch",
                ", ".join(beside) or "-",
            )
        )
    columns = ("module", ">parameters", "trainable", "inputs from", "may run beside")
    caption = f"{len(graph.edges)} edges; graph {graph.fingerprint}"
    return make_table(f"Modules: {len(rows)}", columns, rows, caption=caption)


def comparison_table(compared: Sequence[Comparison]) -> Table:
    """Returns one row per planner: predicted time, search time and proof, or the reason for no plan."""
    rows = []
    best_ms = min((row.plan.predicted_ms for row in compared if row.plan is not None), default=0.0)
    for row in compared:
        search = f"{row.seconds:.2f}"
        if (plan := row.plan) is None:
            rows.append((row.method, "-", "-", "-", "-", search, row.reason))
            continue
        ratio = f"{plan.predicted_ms / best_ms:.2f}" if best_ms > 0 else "-"
        counts = str(len(plan.stages)), str(len(plan.sliced))
        rows.append((row.method, f"{plan.predicted_ms:.2f}", ratio, *counts, search, _note(plan)))
    best = [at for at, row in enumerate(compared) if row.plan is not None and row.plan.predicted_ms <= best_ms]
    columns = ("planner", ">predicted\nms", ">× best", ">stages", ">sliced\nmodules", ">search\ns", "note")
    caption = (
        "predicted; modules only, without optimizer and loss\n"
        "distmm is a reconstruction: the best plan of whole devices by Mosaic's search\n"
        "spindle slices between equal operators, whose number is assumed if unknown"
    )
    title = "Planners, predicted by one cost model"
    return make_table(title, columns, rows, caption=caption, bold=best)


def _note(plan: Plan) -> str:
    if plan.search.status == "optimal":
        return "proven best of whole modules"
    if plan.search.bound_ms > 0 and plan.predicted_ms:
        return f"at most {plan.predicted_ms / plan.search.bound_ms - 1:.1%} above the best of whole modules"
    return "cannot run: it slices modules" if plan.sliced else ""
