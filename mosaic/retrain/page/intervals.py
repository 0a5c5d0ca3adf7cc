"""Challenger against champion: a line per comparison, with its interval and its limit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mosaic.retrain.page.markup import (
    Markup,
    brief,
    cell,
    element,
    facts,
    folded,
    join,
    row,
    section,
    shorten,
    table,
    with_note,
)
from mosaic.retrain.page.wording import count, decimals_for, figure, number, signed
from mosaic.retrain.records import Comparison, Finding, GateResult

MAX_ROWS = 40
"""Slices on the page; ``report.json`` has all."""
MAX_FINDINGS = 10
"""Most findings of a kind on the page."""
MAX_FINDING = 300
"""Most bytes of a finding's sentence."""
MAX_OPEN_ROWS = 6
"""Passed slices shown unfolded."""
_MAX_MARGINS = 12.0
"""Margins that the picture spans to either side; a longer interval ends in an arrow."""
_SETS = ("frozen", "anchor", "fresh")


@dataclass(frozen=True, slots=True)
class Scale:
    """The picture's axis, the same in each line."""

    low: float
    """Difference at its left end."""
    high: float
    """Difference at its right end."""

    @classmethod
    def of(cls, gate: GateResult) -> Scale:
        """Holds zero, the limits and the intervals, as far as ``_MAX_MARGINS`` allow."""
        margin = abs(gate.margin) or 0.01
        judged = [each for each in gate.comparisons if each.counts] or list(gate.comparisons)
        ends = [end for each in judged for end in (each.low, each.high, each.limit) if math.isfinite(end)]
        low, high = min((-margin, *ends)), max((margin, *ends))
        low, high = max(low, -_MAX_MARGINS * margin), min(high, _MAX_MARGINS * margin)
        room = 0.06 * (high - low)
        return cls(low - room, high + room)

    def place(self, value: float) -> str:
        """Position of a difference, as a share of the width, clamped to the picture."""
        share = (value - self.low) / (self.high - self.low)
        return f"{100 * min(1.0, max(0.0, share)):.4g}%"

    def holds(self, value: float) -> bool:
        """Returns True if a difference is within the picture."""
        return self.low <= value <= self.high


def comparisons(gate: GateResult | None, scores: Mapping[str, float]) -> Markup:
    """The section with all comparisons and findings."""
    if gate is None:
        return Markup("")
    sets = [each for name in _SETS for each in gate.comparisons if each.name == name]
    slices = [each for each in gate.comparisons if each.name not in _SETS]
    slices.sort(key=lambda each: (each.passed or not each.counts, not each.counts, each.name))
    failed = [each for each in slices if each.counts and not each.passed]
    folded_slices = slices[len(failed) :] if len(slices) - len(failed) > MAX_OPEN_ROWS else []
    opened = [*sets, *slices[: min(MAX_ROWS, len(slices) - len(folded_slices))]]
    folded_slices = folded_slices[: max(0, MAX_ROWS - len(failed))]
    left_out = len(gate.comparisons) - len(opened) - len(folded_slices)
    scale = Scale.of(gate)
    return section(
        "comparison",
        "Challenger and champion",
        _legend(gate) if opened else element("p", "There was no other version to compare with.", class_="faint"),
        None if opened else facts((f"Score on {name} rows", figure(value)) for name, value in scores.items()),
        _rows("Comparisons of the challenger", opened, scale, gate.margin) if opened else None,
        folded(_summary(folded_slices), _rows("More slices", folded_slices, scale, gate.margin))
        if folded_slices
        else None,
        element("p", f"{count(left_out, 'slice')} more in report.json.", class_="faint") if left_out else None,
        findings(gate.findings),
    )


def findings(all_findings: Sequence[Finding]) -> Markup | None:
    """Findings: failed ones, then passed ones folded behind their names."""
    failed = [each for each in all_findings if not each.passed]
    passed = [each for each in all_findings if each.passed]
    left_out = max(0, len(failed) - MAX_FINDINGS) + max(0, len(passed) - MAX_FINDINGS)
    names = ", ".join(shorten(each.name) for each in passed[:MAX_FINDINGS])
    return join(
        (
            element("ul", *(_finding(each, "✕ ") for each in failed[:MAX_FINDINGS]), class_="findings")
            if failed
            else None,
            folded(
                f"✓ As it has to be: {names}",
                element("ul", *(_finding(each, "") for each in passed[:MAX_FINDINGS]), class_="plain"),
            )
            if passed
            else None,
            element("p", f"{count(left_out, 'finding')} more in report.json.", class_="faint") if left_out else None,
        )
    )


def _finding(finding: Finding, sign: str) -> Markup:
    name = element("strong" if sign else "span", sign, shorten(finding.name))
    return element("li", name, ": ", shorten(finding.sentence, MAX_FINDING), class_="bad" if sign else None)


def _legend(gate: GateResult) -> Markup:
    text = (
        "Right of the thin line the challenger is better. Each interval "
        f"({100 * gate.confidence:.4g} % sure) has to lie right of its limit, the thick bar; "
        f"the margin is {number(gate.margin, decimals_for(gate.margin))}."
    )
    frozen = next((comparison for comparison in gate.comparisons if comparison.name == "frozen"), None)
    if frozen is not None and frozen.power is not None:
        rows = f"{frozen.num_rows:,} rows in {count(frozen.num_clusters, 'cluster')}"
        text += f" An equal model passes the frozen set ({rows}) with a chance of {100 * frozen.power:.0f} %."
    return element("p", text, class_="faint")


def _summary(slices: Sequence[Comparison]) -> str:
    judged = sum(comparison.counts for comparison in slices)
    small = len(slices) - judged
    parts = [f"{count(judged, 'more slice')} passed"] if judged else []
    parts += [f"{small} with too few rows to count"] if small else []
    return ", ".join(parts)


def _rows(caption: str, shown: Sequence[Comparison], scale: Scale, margin: float) -> Markup:
    decimals = decimals_for(margin)
    headings = ("Rows", "Difference and limit", "Scores", "Difference", "Result")
    lines = [
        row(
            with_note(shorten(each.name), f"against {brief(each.against)}, {count(each.num_rows, 'row')}"),
            cell(_picture(each, scale), class_="plot"),
            cell(f"{number(each.old, decimals)} → {number(each.new, decimals)}", class_="number"),
            cell(
                with_note(
                    signed(each.difference, decimals),
                    f"{signed(each.low, decimals)} to {signed(each.high, decimals)}",
                ),
                class_="number",
            ),
            cell(with_note(_result(each), f"limit {signed(each.limit, decimals)}"), class_="result"),
            class_=_state(each),
        )
        for each in shown
    ]
    return table(caption, headings, lines, class_="forest")


def _state(comparison: Comparison) -> str:
    return "aside" if not comparison.counts else "passed" if comparison.passed else "failed"


def _result(comparison: Comparison) -> str:
    return "○ shown only" if not comparison.counts else "✓ passes" if comparison.passed else "✕ fails"


def _picture(comparison: Comparison, scale: Scale) -> Markup:
    """The interval as a picture; hidden from screen readers, since the numbers beside it say the same."""
    limit, zero = scale.place(comparison.limit), scale.place(0.0)
    marks: list[Markup] = [
        element("rect", width=limit, height="100%"),
        element("line", x1=zero, x2=zero, y2="100%", class_="zero"),
        element("line", x1=limit, x2=limit, y1=4, y2=24, class_="limit"),
    ]
    if all(map(math.isfinite, (comparison.low, comparison.high, comparison.difference))):
        marks.append(
            element(
                "line", x1=scale.place(comparison.low), x2=scale.place(comparison.high), y1=14, y2=14, class_="range"
            )
        )
        marks += [_arrow(scale, end) for end in (comparison.low, comparison.high) if not scale.holds(end)]
        if scale.holds(comparison.difference):
            marks.append(element("circle", cx=scale.place(comparison.difference), cy=14, r=4.5))
    return element("svg", *marks, height=28, aria_hidden="true")


def _arrow(scale: Scale, end: float) -> Markup:
    leftwards = end < scale.low
    head = element("path", d="M7 8L1 14L7 20" if leftwards else "M-7 8L-1 14L-7 20", class_="range")
    return element("svg", head, x="0" if leftwards else "100%", overflow="visible")
