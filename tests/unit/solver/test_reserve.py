"""SMs that are left to communication: no module gets them, the plan says so, and communicators are held to them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from planning_cases import linear, profile_of

from mosaic.artifact import parse, to_json
from mosaic.cost import CostModel
from mosaic.device import Device
from mosaic.errors import InvalidPlanError
from mosaic.plan import Plan
from mosaic.ranks.world.groups import group_options
from mosaic.solver.methods import METHODS
from mosaic.solver.runnable import plan_to_run

HOPPER = Device(name="H", kind="cuda", num_slots=16, sms_per_slot=8, remainder_sms=4)
PROFILE = profile_of({"a": linear(20), "b": linear(10)}, num_slots=16, degrees=(1, 2))


def planned(method: str, slots: object, num_devices: int = 1) -> Plan:
    cost = CostModel.from_profile(PROFILE)
    return plan_to_run(method, PROFILE.graph, cost, HOPPER, num_devices=num_devices, communication_slots=slots)


@pytest.mark.parametrize("method", sorted(set(METHODS) - {"auto"}))
def test_no_method_gives_a_reserved_slot_to_a_module(method: str):
    plan = planned(method, 1, num_devices=2)
    assert max(slot for placed in plan.placements for _, slot in placed.cells) <= 14
    assert (plan.device, plan.communication_slots, plan.communication_sms) == (HOPPER, 1, 12)
    assert parse(Plan, to_json(plan), source="test") == plan


def test_a_plan_whose_module_holds_a_reserved_slot_is_refused():
    with pytest.raises(InvalidPlanError, match="the last 1 of 16 are reserved for communication"):
        replace(planned("sequential", 0), communication_slots=1)


def test_only_communicators_that_run_on_sms_are_bounded(monkeypatch: pytest.MonkeyPatch):
    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(min_ctas=0, max_ctas=0)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    assert group_options("gloo", 4) is None
    assert group_options("nccl", None) is None
    options = group_options("nccl", 4)
    assert (options.config.min_ctas, options.config.max_ctas) == (1, 4)
