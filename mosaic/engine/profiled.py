"""Measurements behind a plan, in words: when they were taken."""

from __future__ import annotations

import dataclasses
import logging

from mosaic.device import Device
from mosaic.graph import ModuleGraph
from mosaic.plan import Plan, SearchRecord, plan_from_quotas
from mosaic.profile import Profile, note_of_others
from mosaic.profiler import ProfileSettings

_LOG = logging.getLogger("mosaic")


def plan_in_turn(graph: ModuleGraph, device: Device) -> Plan:
    """Returns the plan of one module after the other on the whole device, of which nothing is predicted."""
    plan = plan_from_quotas(
        [{name: device.num_slots} for name in graph.topological_order()], graph=graph, device=device
    )
    return dataclasses.replace(plan, search=SearchRecord(method="sequential"))


def warn_of_no_profile(who_did_not: str, what_runs: str, error: Exception) -> str:
    """Logs a warning that nothing was profiled, and returns it for ``describe()``.

    Args:
        who_did_not: Who or what was not profiled; begins the sentence.
        what_runs: What runs in place of a plan that was solved.
        error: What was seen, and the ways out.
    """
    sentence = f"{who_did_not}, so {what_runs} until the next start: {error}"
    _LOG.warning("%s", sentence)
    return sentence


def load_of_others(profile: Profile, settings: ProfileSettings | None) -> str:
    """Returns what to know of a profile that other processes disturbed; empty where they did not, by its settings."""
    share, limit = profile.environment.foreign_cpu_share, (settings or ProfileSettings()).foreign_share
    return f"while the modules were profiled, {note_of_others(share, profile.device)}" if share > limit else ""


def source_of(profile: Profile) -> str:
    """Says when the samples of a profile were taken, and which of them were reused."""
    reused, total = profile.reused, len(profile.samples)
    if not reused:
        return f"planned from {total} samples measured {_minute(profile.environment.created)}"
    dates = sorted(sample.measured for sample in reused)
    first, last = _minute(dates[0]), _minute(dates[-1])
    when = first if first == last else f"{first} to {last}"
    if len(reused) == total:
        return f"planned from a profile of {when}, reused: nothing was measured again"
    return f"planned from {total} samples, of which {len(reused)} reused from {when} and {total - len(reused)} new"


def _minute(date: str) -> str:
    """A date of ISO 8601 to the minute, as people read it."""
    return f"{date[:16].replace('T', ' ')} UTC"
