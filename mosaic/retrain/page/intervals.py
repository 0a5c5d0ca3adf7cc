"""Challenger against champion: a line for each comparison, its interval drawn beside the limit it has to stay above."""

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
"""Findings of a kind that are shown."""
MAX_FINDING = 300
"""Bytes of each one's sentence."""
MAX_OPEN_ROWS = 6
"""Slices that passed and are shown without being asked for; more are folded."""
_MAX_MARGINS = 12.0
"""Margins that the picture reaches to either side; an interval beyond ends in an arrow."""
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
        judged = [one for one in gate.comparisons if one.counts] or list(gate.comparisons)
        ends = [end for one in judged for end in (one.low, one.high, one.limit) if math.isfinite(end)]
        low, high = min((-margin, *ends)), max((margin, *ends))
        low, high = max(low, -_MAX_MARGINS * margin), min(high, _MAX_MARGINS * margin)
        room = 0.06 * (high - low)
        return cls(low - room, high + room)

    def place(self, value: float) -> str:
        """Where a difference is, as a share of the width, and at an end if it is beyond."""
        share = (value - self.low) / (self.high - self.low)
        return f"{100 * min(1.0, max(0.0, share)):.4g}%"

    def holds(self, value: float) -> bool:
        """Whether a difference is within the picture."""
        return self.low <= value <= self.high


def comparisons(gate: GateResult | None, scores: Mapping[str, float]) -> Markup:
    """The section with all comparisons, and with what else the gate looked at."""
    if gate is None:
        return Markup("")
    sets = [one for name in _SETS for one in gate.comparisons if one.name == name]
    slices = [one for one in gate.comparisons if one.name not in _SETS]
    slices.sort(key=lambda one: (one.passed or not one.counts, not one.counts, one.name))
    failed = [one for one in slices if one.counts and not one.passed]
    rest = slices[len(failed) :] if len(slices) - len(failed) > MAX_OPEN_ROWS else []
    opened = [*sets, *slices[: min(MAX_ROWS, len(slices) - len(rest))]]
    rest = rest[: max(0, MAX_ROWS - len(failed))]
    left_out = len(gate.comparisons) - len(opened) - len(rest)
    scale = Scale.of(gate)
    return section(
        "comparison",
        "Challenger and champion",
        _legend(gate) if opened else element("p", "There was no other version to compare with.", class_="faint"),
        None if opened else facts((f"Score on {name} rows", figure(value)) for name, value in scores.items()),
        _rows("Comparisons of the challenger", opened, scale, gate.margin) if opened else None,
        folded(_summary(rest), _rows("More slices", rest, scale, gate.margin)) if rest else None,
        element("p", f"{count(left_out, 'slice')} more in report.json.", class_="faint") if left_out else None,
        findings(gate.findings),
    )


def findings(found: Sequence[Finding]) -> Markup | None:
    """What was checked besides: what failed, and behind its names what passed."""
    failed, passed = [one for one in found if not one.passed], [one for one in found if one.passed]
    left_out = max(0, len(failed) - MAX_FINDINGS) + max(0, len(passed) - MAX_FINDINGS)
    names = ", ".join(shorten(one.name) for one in passed[:MAX_FINDINGS])
    return join(
        (
            element("ul", *(_finding(one, "✕ ") for one in failed[:MAX_FINDINGS]), class_="findings")
            if failed
            else None,
            folded(
                f"✓ As it has to be: {names}",
                element("ul", *(_finding(one, "") for one in passed[:MAX_FINDINGS]), class_="plain"),
            )
            if passed
            else None,
            element("p", f"{count(left_out, 'finding')} more in report.json.", class_="faint") if left_out else None,
        )
    )


def _finding(one: Finding, sign: str) -> Markup:
    name = element("strong" if sign else "span", sign, shorten(one.name))
    return element("li", name, ": ", shorten(one.sentence, MAX_FINDING), class_="bad" if sign else None)


def _legend(gate: GateResult) -> Markup:
    said = (
        "Right of the thin line the challenger is better. Each interval "
        f"({100 * gate.confidence:.4g} % sure) has to lie right of its limit, the thick bar; "
        f"the margin is {number(gate.margin, decimals_for(gate.margin))}."
    )
    frozen = next((one for one in gate.comparisons if one.name == "frozen"), None)
    if frozen is not None and frozen.power is not None:
        rows = f"{frozen.num_rows:,} rows in {count(frozen.num_clusters, 'cluster')}"
        said += f" An equal model passes the frozen set ({rows}) with a chance of {100 * frozen.power:.0f} %."
    return element("p", said, class_="faint")


def _summary(slices: Sequence[Comparison]) -> str:
    judged = sum(one.counts for one in slices)
    small = len(slices) - judged
    parts = [f"{count(judged, 'more slice')} passed"] if judged else []
    parts += [f"{small} with too few rows to count"] if small else []
    return ", ".join(parts)


def _rows(caption: str, shown: Sequence[Comparison], scale: Scale, margin: float) -> Markup:
    decimals = decimals_for(margin)
    headings = ("Rows", "Difference and limit", "Scores", "Difference", "Result")
    lines = [
        row(
            with_note(shorten(one.name), f"against {brief(one.against)}, {count(one.num_rows, 'row')}"),
            cell(_picture(one, scale), class_="plot"),
            cell(f"{number(one.old, decimals)} → {number(one.new, decimals)}", class_="number"),
            cell(
                with_note(
                    signed(one.difference, decimals), f"{signed(one.low, decimals)} to {signed(one.high, decimals)}"
                ),
                class_="number",
            ),
            cell(with_note(_result(one), f"limit {signed(one.limit, decimals)}"), class_="result"),
            class_=_state(one),
        )
        for one in shown
    ]
    return table(caption, headings, lines, class_="forest")


def _state(one: Comparison) -> str:
    return "aside" if not one.counts else "passed" if one.passed else "failed"


def _result(one: Comparison) -> str:
    return "○ shown only" if not one.counts else "✓ passes" if one.passed else "✕ fails"


def _picture(one: Comparison, scale: Scale) -> Markup:
    """The interval in one line; the numbers beside it say the same, so readers of the page's text skip it."""
    limit, zero = scale.place(one.limit), scale.place(0.0)
    drawn: list[Markup] = [
        element("rect", width=limit, height="100%"),
        element("line", x1=zero, x2=zero, y2="100%", class_="zero"),
        element("line", x1=limit, x2=limit, y1=4, y2=24, class_="limit"),
    ]
    if all(map(math.isfinite, (one.low, one.high, one.difference))):
        drawn.append(element("line", x1=scale.place(one.low), x2=scale.place(one.high), y1=14, y2=14, class_="range"))
        drawn += [_arrow(scale, end) for end in (one.low, one.high) if not scale.holds(end)]
        if scale.holds(one.difference):
            drawn.append(element("circle", cx=scale.place(one.difference), cy=14, r=4.5))
    return element("svg", *drawn, height=28, aria_hidden="true")


def _arrow(scale: Scale, end: float) -> Markup:
    leftwards = end < scale.low
    head = element("path", d="M7 8L1 14L7 20" if leftwards else "M-7 8L-1 14L-7 20", class_="range")
    return element("svg", head, x="0" if leftwards else "100%", overflow="visible")
