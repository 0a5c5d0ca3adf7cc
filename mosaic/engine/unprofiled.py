"""What becomes of a loop that starts on a machine too busy to profile on: it runs as it was written, and says so."""

from __future__ import annotations

import dataclasses
import logging

from mosaic.device import Device
from mosaic.errors import UnstableMeasurementError
from mosaic.graph import ModuleGraph
from mosaic.plan import Plan, SearchRecord, plan_from_quotas

_LOG = logging.getLogger("mosaic")


def plan_in_turn(graph: ModuleGraph, device: Device) -> Plan:
    """Returns the plan of one module after the other on the whole device, of which nothing is predicted."""
    plan = plan_from_quotas(
        [{name: device.num_slots} for name in graph.topological_order()], graph=graph, device=device
    )
    return dataclasses.replace(plan, search=SearchRecord(method="sequential"))


def warn_of_busy(who_did_not: str, what_runs: str, error: UnstableMeasurementError) -> str:
    """Logs a warning that nothing was profiled, and returns it for ``describe()``.

    Args:
        who_did_not: Who or what was not profiled; begins the sentence.
        what_runs: What runs in place of a plan that was solved.
        error: What was seen, and the ways out.
    """
    sentence = f"{who_did_not}, so {what_runs} until the next start: {error}"
    _LOG.warning("%s", sentence)
    return sentence
