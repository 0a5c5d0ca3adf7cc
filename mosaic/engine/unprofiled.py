"""What becomes of a loop that starts on a machine too busy to profile on: it runs as it was written, and says so."""

from __future__ import annotations

import dataclasses
import logging
from typing import Literal

from mosaic.device import Device
from mosaic.errors import UnstableMeasurementError
from mosaic.graph import ModuleGraph
from mosaic.plan import Plan, SearchRecord, plan_from_quotas

IfBusy = Literal["plain", "raise"]
"""What to do where the machine is too busy to profile: run the model as it was written, or raise."""

_LOG = logging.getLogger("mosaic")


def falls_back(if_busy: IfBusy, method: str) -> bool:
    """Whether a busy machine leaves the model as it was: where it is left to Mosaic what runs.

    A planner that is named was asked for, so that it is an error to run anything else.

    Raises:
        ValueError: There is no such choice.
    """
    if if_busy not in ("plain", "raise"):
        raise ValueError(f'if_busy={if_busy!r}; use "plain" or "raise"')
    return if_busy == "plain" and method == "auto"


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
