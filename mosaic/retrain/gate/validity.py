"""Validity of a challenger: finite, exported exactly, within its budgets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mosaic.retrain.gate.scores import Scores
from mosaic.retrain.gate.settings import GateSettings
from mosaic.retrain.records import Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Measurements of a challenger's export."""

    invalid_tensors: tuple[str, ...] = ()
    """Names of weights and buffers with values that are not finite."""
    export_difference: float | None = None
    """Largest difference between outputs of the model and of its reloaded export; None if it was not reloaded."""
    size_bytes: int
    """Size of the export."""
    latency_ms: float | None = None
    """Time for one row; None if it was not measured."""


def validity_findings(facts: ModelFacts, settings: GateSettings) -> tuple[Finding, ...]:
    """Checks the export by each rule."""
    return tuple(_findings(facts, settings))


def finite_finding(scores: Iterable[Scores]) -> Finding:
    """Checks that the challenger has a finite value on every row."""
    broken = [part for part in scores if part.num_invalid]
    if not broken:
        return Finding(name="scores", passed=True, sentence="Every row has a finite value.")
    counts = " and ".join(f"{part.num_invalid:,} of {len(part.value):,} {part.rows} rows" for part in broken)
    return Finding(
        name="scores",
        passed=False,
        sentence=f"Version {broken[0].version} has no finite value on {counts}; look at its loss in metrics.jsonl.",
    )


def _findings(facts: ModelFacts, settings: GateSettings) -> Iterator[Finding]:
    names = facts.invalid_tensors
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        sentence = f"{names[0]}{more} has values that are not finite; look at the loss in metrics.jsonl."
    else:
        sentence = "All weights and buffers are finite."
    yield Finding(name="finite", passed=not names, sentence=sentence)
    if facts.export_difference is not None:
        equal = facts.export_difference == 0  # NaN is not
        sentence = (
            "The export, read back, gives equal outputs."
            if equal
            else f"The export, read back, gives outputs that differ by {facts.export_difference:.3g}, and 0 is the "
            "rule; look for state that is neither a parameter nor a buffer."
        )
        yield Finding(name="export", passed=equal, sentence=sentence)
    for name, value, most, unit in (
        ("size", facts.size_bytes, settings.max_size_bytes, "bytes"),
        ("latency", facts.latency_ms, settings.max_latency_ms, "ms"),
    ):
        if most is not None and value is not None:
            yield _budget(name, value, most, unit)
        elif most is not None:
            setting = f"max_{name}_{unit}"
            yield Finding(
                name=name, passed=False, sentence=f"{setting} = {most:g} is set and {name} was not measured; unset it."
            )


def _budget(name: str, value: float, most: float, unit: str) -> Finding:
    passed = value <= most
    way_out = "" if passed else f"; make the model smaller or raise max_{name}_{unit}"
    return Finding(
        name=name,
        passed=passed,
        sentence=f"The export's {name} is {value:,.10g} {unit}, and {most:,.10g} is allowed{way_out}.",
    )
