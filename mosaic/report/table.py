"""Tables and bars for the terminal: graphs, measured profiles, predicted plans, compared planners."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mosaic.graph import ModuleGraph
from mosaic.plan import Plan
from mosaic.profile import Phase, Profile, Sample, note_of_others
from mosaic.report.bars import bars_of_plan, device_text, ms_text, rows_of_slots, slots_text
from mosaic.report.frame import empty_table, make_table, plain
from mosaic.report.palette import colors_of, ink_on, lighter

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from mosaic.solver.compare import Comparison


def plan_table(plan: Plan, graph: ModuleGraph | None = None) -> Table:
    """Returns a table of a plan's placements with predicted times, stage by stage.

    Args:
        plan: The plan.
        graph: Adds each module's predecessors.
    """
    has_communication = plan.communication_ms > 0
    numbers = ["devices", "slots", "quota", "forward\nms", "backward\nms"]
    numbers += ["route\nms", "sum\nms"] if has_communication else []
    columns = [("stage", True), ("module", False), *((heading, True) for heading in numbers)]
    columns += [("waits for", False)] if graph else []
    table = empty_table(f"Plan, predicted: {device_text(plan)}", _plan_caption(plan), columns)
    for index, stage in enumerate(plan.stages):
        for row, placement in enumerate(stage.placements):
            cells = [
                str(index) if row == 0 else "",
                placement.module,
                slots_text(placement.devices),
                " / ".join(slots_text(slots) for slots in placement.slots_by_device or (placement.slots,)),
                f"{placement.quota}/{plan.device.num_slots} ({plan.device.fraction(placement.quota):.0%})",
                f"{placement.forward_ms:.2f}",
                f"{placement.backward_ms:.2f}",
            ]
            if has_communication:
                routing_ms = placement.route_forward_ms + placement.route_backward_ms
                cells += [f"{routing_ms:.2f}", f"{placement.reduce_ms:.2f}"]
            cells += [", ".join(graph.predecessors(placement.module)) or "-"] if graph else []
            table.add_row(*plain(cells), end_section=len(stage.placements) == 1)
        if len(stage.placements) > 1:
            slowest = ["", "slowest", "", "", "", f"{stage.forward_ms:.2f}", f"{stage.backward_ms:.2f}"]
            table.add_row(*plain(slowest, style="bold"), end_section=True)
    return table


def _plan_caption(plan: Plan) -> str:
    if plan.predicted_ms <= 0:
        return "no times are predicted in this plan"
    lines = [f"predicted step: {plan.predicted_ms:.2f} ms for the modules"]
    if plan.communication_ms > 0:
        lines.append(f"of all modules' times {plan.communication_ms:.2f} ms are communication:")
        lines.append("route: rows that travel between devices; sum: gradients summed after a backward")
    if plan.communication_sms:
        lines.append(f"{plan.communication_sms} SMs of each device are left to communication")
    if plan.sequential_ms > 0:
        lines.append(f"predicted one module at a time: {plan.sequential_ms:.2f} ms")
        lines.append(f"predicted speed-up: {plan.predicted_speedup:.2f}×")
    lines.append(f"found by {plan.search.method} in {plan.search.seconds:.2f} s")
    if note := note_of_others(plan.foreign_cpu_share, plan.device):
        lines.append(f"while its modules were measured, {note}")
    return "\n".join(lines)


def profile_table(profile: Profile) -> Table:
    """Returns the measurements: medians and quartiles by module and quota, memory, load of the machine."""
    has_degrees = any(sample.degree > 1 for sample in profile.samples)
    numbers = ["slots", "forward ms\n(quartiles)", "backward ms\n(quartiles)", "peak", "keeps"]
    columns = [("module", False), *((heading, True) for heading in ["degree"] * has_degrees + numbers)]
    title = f"Profile, measured: {profile.device.name}, {profile.device.num_slots} slots"
    table = empty_table(title, _profile_caption(profile), columns)
    resident_bytes = {entry.module: entry.resident_bytes + entry.activation_bytes for entry in profile.memory}
    for name in profile.graph.names:
        samples = {(s.degree, s.quota, s.phase): s for s in profile.samples if s.module == name}
        keys = sorted({(degree, quota) for degree, quota, _ in samples})
        for degree, quota in keys:
            is_first, is_last = (degree, quota) == keys[0], (degree, quota) == keys[-1]
            pair = [samples.get((degree, quota, phase)) for phase in (Phase.FORWARD, Phase.BACKWARD)]
            peak = max((sample.peak_bytes for sample in pair if sample), default=0)
            cells = [name if is_first else "", *([str(degree)] * has_degrees), str(quota)]
            cells += [*map(_times, pair), _bytes(peak), _bytes(resident_bytes.get(name, 0)) if is_first else ""]
            table.add_row(*plain(cells), end_section=is_last)
    return table


def _times(sample: Sample | None) -> str:
    if sample is None:
        return "-"
    if sample.infeasible:
        return "cannot run"
    # Three digits are precise enough for a median of a few runs, and fit 80 columns.
    digits = 1 if sample.median_ms >= 10 else 2
    first, third = (f"{time_ms:.{digits}f}" for time_ms in sample.quartiles_ms)
    return f"{sample.median_ms:.{digits}f} ({first}-{third})"


def _profile_caption(profile: Profile) -> str:
    where = profile.environment
    lines = [
        f"{sample.module} at {sample.quota} slots, {sample.phase}: cannot run: {sample.infeasible}"
        for sample in profile.samples
        if sample.infeasible
    ]
    lines += [
        f"measured {where.created} with torch {where.torch_version}",
        note_of_others(where.foreign_cpu_share, profile.device)
        or f"other processes used {where.foreign_cpu_share:.1%} of the CPU",
    ]
    if profile.pairs:
        worst = max(profile.pairs, key=lambda pair: pair.slowdown)
        usual = statistics.median(pair.slowdown for pair in profile.pairs)
        lines.append(f"beside another module {usual:.2f}× as long (median)")
        lines.append(f"at most {worst.slowdown:.2f}× ({worst.module} beside {worst.beside}, {worst.phase})")
    return "\n".join(lines)


def graph_table(graph: ModuleGraph) -> Table:
    """Returns the modules in call order: size, inputs, and modules that may run beside them."""
    count, rows = len(graph.modules), []
    for node in graph.modules:
        beside = [other for other in graph.names if graph.independent(node.name, other)]
        is_free = count > 2 and len(beside) == count - 1
        rows.append(
            (
                node.name,
                _count(node.num_parameters),
                "yes" if node.trainable else "frozen" if node.num_parameters else "no parameters",
                ", ".join(graph.predecessors(node.name)) or "the batch",
                "all others" if is_free else ", ".join(beside) or "-",
            )
        )
    texts = ("trainable", "inputs from", "may run beside")
    columns = [("module", False), ("parameters", True), *((heading, False) for heading in texts)]
    caption = f"{len(graph.edges)} edges; graph {graph.fingerprint}"
    return make_table(f"Modules: {count}", columns, rows, caption=caption)


def comparison_table(compared: Sequence[Comparison]) -> Table:
    """Returns one row per planner, in order: predicted times, search times, proofs.

    A planner without a plan has its reason as a note.
    """
    rows = []
    for row in compared:
        search = f"{row.seconds:.2f}"
        if (plan := row.plan) is None:
            rows.append((row.method, "-", "-", "-", "-", search, f"{row.status}: {row.reason}"))
            continue
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
        counts = str(len(plan.stages)), str(len(plan.sliced))
        rows.append((row.method, f"{plan.predicted_ms:.2f}", ratio, *counts, search, _note(plan)))
    best = [index for index, row in enumerate(compared) if row.ratio is not None and row.ratio <= 1]
    numbers = ("predicted\nms", "× best", "stages", "sliced\nmodules", "search\ns")
    columns = [("planner", False), *((heading, True) for heading in numbers), ("note", False)]
    lines = ["nothing here was measured; modules only, without optimizer and loss"]
    if any(row.method.startswith("distmm") for row in compared):
        lines.append("distmm is a reconstruction: the best plan of whole devices, by our own search")
    if any(row.plan is not None and row.plan.sliced for row in compared):
        lines.append("slices are cut between equal operators; their number is assumed where not given")
    title = "Planners compared, predicted by one cost model"
    return make_table(title, columns, rows, caption="\n".join(lines), bold=best)


def _note(plan: Plan) -> str:
    if plan.search.status == "optimal":
        return "proven best of whole modules"
    if plan.search.bound_ms > 0 and plan.predicted_ms:
        return f"at most {plan.predicted_ms / plan.search.bound_ms - 1:.1%} above the best of whole modules"
    return "cannot be run: it slices modules" if plan.sliced else ""


def _count(number: int) -> str:
    """A count of parameters in three digits: ``1.23 M``."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def _bytes(number: int) -> str:
    """Bytes in three digits; ``-`` for 0, which means unknown in a profile."""
    if number <= 0:
        return "-"
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number} B"


def plan_bars(plan: Plan, width: int) -> Text:
    """Returns a plan's predicted step as bars: a row per slot, a column per piece of time.

    Bars are ``image━━━│`` in forward and ``image╌╌╌│`` in backward, which differ without colour; blank is
    idle. Above 16 rows, neighbouring slots that do the same share one.

    Args:
        plan: What to show.
        width: Columns to fill, at least 40.
    """
    from rich.text import Text

    layout = bars_of_plan(plan)
    colors = colors_of(placement.module for placement in plan.placements)
    rows = rows_of_slots(plan, layout.bars)
    margin = max((len(name) for name, _ in rows), default=0) + 1
    columns = max(width, 40) - margin - 1
    scale = columns / (layout.total_ms or 1.0)
    text = Text(no_wrap=True, overflow="crop")
    for name, bars in rows:
        text.append(f"{name:>{margin - 1}} ")
        at = 0
        for bar in bars:
            start, end = round(bar.start_ms * scale), round(bar.end_ms * scale)
            text.append(" " * (start - at))
            fill = "━" if bar.phase == "forward" else "╌"
            color = colors[bar.module] if bar.phase == "forward" else lighter(colors[bar.module])
            shown = bar.module[: max(1, end - start - 1)].ljust(end - start - 1, fill) + "│"
            text.append(shown[: end - start], style=f"{ink_on(color)} on {color}")
            at = max(at, end)
        text.append(" " * (columns - at) + "\n")
    end_of_axis = "no times predicted" if layout.nominal else f"{ms_text(layout.total_ms)} ms predicted"
    text.append(" " * margin + "0" + f"{end_of_axis:>{columns}}")
    return text
