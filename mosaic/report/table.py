"""Tables and bars for the terminal: graphs, measured profiles, predicted plans."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mosaic.graph import ModuleGraph
from mosaic.plan import Placement, Plan, Stage
from mosaic.profile import Phase, Profile, Sample, note_of_others
from mosaic.report.bars import bars_of_plan, ms_text, rows_of_slots, slots_text
from mosaic.report.frame import Column, empty_table, plain
from mosaic.report.palette import colors_of, ink_on, lighter

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

_NOTHING = "-"


def _table(title: str, caption: str, columns: Sequence[Column]) -> Table:
    return empty_table(title, caption, columns, least=[8] * len(columns))


def plan_table(plan: Plan, graph: ModuleGraph | None = None) -> Table:
    """Returns a table of a plan's placements with predicted times, stage by stage.

    Args:
        plan: The plan.
        graph: Adds each module's predecessors.
    """
    columns = [
        ("stage", True),
        ("module", False),
        ("devices", True),
        ("slots", True),
        ("quota", True),
        ("forward\nms", True),
        ("backward\nms", True),
    ]
    has_communication = plan.communication_ms > 0
    columns += [("route\nms", True), ("sum\nms", True)] if has_communication else []
    columns += [("waits for", False)] if graph else []
    many = f"{plan.num_devices} × " if plan.num_devices > 1 else ""
    title = f"Plan, predicted: {many}{plan.device.name}, {plan.device.num_slots} slots"
    table = _table(title, _plan_caption(plan), columns)
    for index, stage in enumerate(plan.stages):
        for row, placement in enumerate(stage.placements):
            cells = [
                str(index) if row == 0 else "",
                placement.module,
                slots_text(placement.devices),
                _slots_of(placement),
                f"{placement.quota}/{plan.device.num_slots} ({plan.device.fraction(placement.quota):.0%})",
                f"{placement.forward_ms:.2f}",
                f"{placement.backward_ms:.2f}",
            ]
            if has_communication:
                routing_ms = placement.route_forward_ms + placement.route_backward_ms
                cells += [f"{routing_ms:.2f}", f"{placement.reduce_ms:.2f}"]
            cells += [", ".join(graph.predecessors(placement.module)) or _NOTHING] if graph else []
            table.add_row(*plain(cells), end_section=len(stage.placements) == 1)
        if len(stage.placements) > 1:
            table.add_row(*plain(_maxima(stage), style="bold"), end_section=True)
    return table


def _slots_of(placement: Placement) -> str:
    """Returns the slots on each device, in the devices' order, or once where they are the same on all."""
    return " / ".join(slots_text(slots) for slots in placement.slots_by_device or (placement.slots,))


def _maxima(stage: Stage) -> list[str]:
    return ["", "slowest", "", "", "", f"{stage.forward_ms:.2f}", f"{stage.backward_ms:.2f}"]


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
    degrees = sorted({sample.degree for sample in profile.samples})
    columns = [
        ("module", False),
        ("slots", True),
        ("forward ms\n(quartiles)", True),
        ("backward ms\n(quartiles)", True),
        ("peak", True),
        ("keeps", True),
    ]
    if degrees != [1]:
        columns.insert(1, ("degree", True))
    title = f"Profile, measured: {profile.device.name}, {profile.device.num_slots} slots"
    table = _table(title, _profile_caption(profile), columns)
    resident_bytes = {entry.module: entry.resident_bytes + entry.activation_bytes for entry in profile.memory}
    for name in profile.graph.names:
        samples = {(s.degree, s.quota, s.phase): s for s in profile.samples if s.module == name}
        keys = sorted({(degree, quota) for degree, quota, _ in samples})
        for row, (degree, quota) in enumerate(keys):
            pair = [samples.get((degree, quota, phase)) for phase in (Phase.FORWARD, Phase.BACKWARD)]
            peak = max((sample.peak_bytes for sample in pair if sample), default=0)
            cells = [name if row == 0 else "", str(quota), *(_times(sample) for sample in pair), _bytes(peak)]
            cells.append(_bytes(resident_bytes.get(name, 0)) if row == 0 else "")
            if degrees != [1]:
                cells.insert(1, str(degree))
            table.add_row(*plain(cells), end_section=row == len(keys) - 1)
    return table


def _times(sample: Sample | None) -> str:
    if sample is None:
        return _NOTHING
    if sample.infeasible:
        return "cannot run"
    first, third = sample.quartiles_ms
    # Three digits are precise enough for a median of a few runs, and fit 80 columns.
    digits = 1 if sample.median_ms >= 10 else 2
    return f"{sample.median_ms:.{digits}f} ({first:.{digits}f}-{third:.{digits}f})"


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
    columns = [
        ("module", False),
        ("parameters", True),
        ("trainable", False),
        ("inputs from", False),
        ("may run beside", False),
    ]
    count = len(graph.modules)
    table = _table(f"Modules: {count}", f"{len(graph.edges)} edges; graph {graph.fingerprint}", columns)
    for node in graph.modules:
        beside = [other for other in graph.names if graph.independent(node.name, other)]
        everything = count > 2 and len(beside) == count - 1
        cells = (
            node.name,
            _count(node.num_parameters),
            "yes" if node.trainable else "frozen" if node.num_parameters else "no parameters",
            ", ".join(graph.predecessors(node.name)) or "the batch",
            "all others" if everything else ", ".join(beside) or _NOTHING,
        )
        table.add_row(*plain(cells))
    return table


def _count(number: int) -> str:
    """A count of parameters in three digits: ``1.23 M``."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def _bytes(number: int) -> str:
    """Bytes in three digits; ``-`` for 0, which means unknown in a profile."""
    if number <= 0:
        return _NOTHING
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
            name = bar.module[: max(1, end - start - 1)].ljust(end - start - 1, fill) + "│"
            text.append(name[: end - start], style=f"{ink_on(color)} on {color}")
            at = max(at, end)
        text.append(" " * (columns - at) + "\n")
    end_of_axis = "no times predicted" if layout.nominal else f"{ms_text(layout.total_ms)} ms predicted"
    text.append(" " * margin + "0" + f"{end_of_axis:>{columns}}")
    return text
