"""Reasons of a plan, for the terminal: ``mosaic plan --explain``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mosaic.report.frame import empty_table, plain
from mosaic.solver.explain import Change, Explanation, ModuleReason

if TYPE_CHECKING:
    from rich.table import Table

_LIMITS = {
    "all slots": "it has the largest quota there is",
    "no gain": "more slots would not make it faster",
    "slots": "the others of its stage hold the slots",
    "memory": "it would be faster on another number of devices; its memory does not fit there beside the others",
    "neighbours": "there is room, but neighbours would lose what it gains",
}


def explanation_table(explanation: Explanation) -> Table:
    """Returns one row for each module: what binds it, and why it has no more."""
    columns = (("stage", True), ("module", False), ("slots", True), ("why not more", False))
    table = empty_table("Why each module has its quota", changes_text(explanation), columns)
    for reason in explanation.modules:
        cells = (str(reason.stage), reason.module, str(reason.quota), reason_text(reason))
        table.add_row(*plain(cells, "bold" if reason.decides else ""))
    return table


def reason_text(reason: ModuleReason) -> str:
    """Returns what binds a module, as a sentence."""
    if reason.decides:
        first = f"slowest of its stage in {' and '.join(phase.value for phase in reason.decides)}"
        parts = [first, _LIMITS[reason.limit]]
    else:
        parts = [f"not the slowest: {reason.slack_ms:.3g} ms to spare"]
    if reason.waits_for:
        parts.append(f"no earlier, since it waits for {', '.join(reason.waits_for)}")
    return "; ".join(parts)


def changes_text(explanation: Explanation) -> str:
    """Returns what more hardware would bring and what the next-best plan costs, a line each; all predicted."""
    now = explanation.plan.predicted_ms
    lines = [f"this plan: {now:.2f} ms predicted, {_proof_text(explanation)}"]
    lines += [_change_text(change, now) for change in (*explanation.changes, explanation.next_best)]
    return "\n".join(lines)


def _proof_text(explanation: Explanation) -> str:
    gap = explanation.plan.gap
    if gap is None:
        return "no bound known"
    return "proven best of its kind" if gap == 0 else f"at most {gap:.1%} above the best"


def _change_text(change: Change, now_ms: float) -> str:
    note = f" ({change.note})" if change.note else ""
    if change.predicted_ms is None:
        return f"{change.what}: unknown{note}"
    share = abs(change.saves_ms) / now_ms if now_ms > 0 else 0.0
    if share < 5e-5:
        return f"{change.what}: {change.predicted_ms:.2f} ms, no difference{note}"
    word = "less" if change.saves_ms > 0 else "more"
    return f"{change.what}: {change.predicted_ms:.2f} ms, {share:.1%} {word}{note}"
