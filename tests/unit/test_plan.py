from dataclasses import replace

import pytest

from mosaic.device import Device
from mosaic.errors import InvalidPlanError
from mosaic.graph import Edge, ModuleGraph, ModuleNode, Part
from mosaic.plan import Placement, Plan, SearchRecord, TemporalStage, plan_from_quotas

DEVICE = Device(name="four cores", kind="host", num_slots=4)
GRAPH = ModuleGraph(
    modules=tuple(ModuleNode(name=name) for name in ("image", "text", "head")),
    edges=(Edge(source="image", target="head"), Edge(source="text", target="head")),
)


def plan(*stages, num_devices=1, **placement):
    return Plan(
        device=DEVICE,
        num_devices=num_devices,
        stages=tuple(
            TemporalStage(
                placements=tuple(
                    Placement(part=Part(module=name), slots=slots, **placement) for name, slots in s.items()
                )
            )
            for s in stages
        ),
        graph=GRAPH.fingerprint,
        search=SearchRecord(method="manual"),
    )


def by_hand(stage):
    return plan_from_quotas([stage, {"head": 1}], graph=GRAPH, device=DEVICE)


def test_quotas_become_disjoint_slots():
    built = plan_from_quotas([{"image": 1, "text": 3}, {"head": 4}], graph=GRAPH, device=DEVICE)
    assert [placed.slots for placed in built.placements] == [(0,), (1, 2, 3), (0, 1, 2, 3)]
    assert built.is_colocated
    assert built.placement("text").quota == 3


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda: by_hand({"image": 1, "text": 0}), "'text' asks for a quota of 0 slots; four cores has 4: use 1 to 4"),
        (lambda: by_hand({"image": 3, "text": 3}), "stage .* asks for a quota of 6 slots; four cores has 4"),
        (lambda: plan({"image": (3, 4)}), "slots 0 to 3"),
        (lambda: plan({"image": (0, 1), "text": (1, 2)}), "'image' and 'text' of one stage both hold slot 1"),
        (lambda: plan({"image": (0,)}, {"image": (1,)}), "'image' is placed as image in stage 0, as image in"),
        (lambda: plan({"image": (0,), "text": (1,)}).check_covers(GRAPH), r"leaves out \['head'\]"),
        (lambda: plan({"audio": (2,)}).check_covers(GRAPH), r"places \['audio'\]"),
        (
            lambda: plan({"image": (0,), "head": (1,)}, {"text": (0,)}).check_covers(GRAPH),
            r"'head' \(stage 0\) depends on 'image' \(stage 0\)",
        ),
        (
            lambda: plan({"image": (0,)}).check_matches(graph=GRAPH, device=replace(DEVICE, num_slots=2)),
            "four cores with 4 slots",
        ),
    ],
)
def test_a_plan_that_breaks_a_rule_is_refused_by_its_name(broken, message):
    with pytest.raises(InvalidPlanError, match=message):
        broken()


def test_predicted_time_takes_each_phase_of_a_stage_by_its_slowest_and_utilisation_is_modelled_from_it():
    times = {"image": (1.0, 5.0), "text": (2.0, 3.0), "head": (0.5, 0.5)}
    stages = (
        TemporalStage(
            placements=tuple(
                Placement(part=Part(module=name), slots=slots, forward_ms=times[name][0], backward_ms=times[name][1])
                for name, slots in stage.items()
            )
        )
        for stage in ({"image": (0,), "text": (1,)}, {"head": (0, 1)})
    )
    built = replace(plan({"image": (0,)}), stages=tuple(stages), sequential_ms=12.0)
    assert built.predicted_ms == pytest.approx(8.0)
    assert built.predicted_speedup == pytest.approx(1.5)
    assert built.utilisation == pytest.approx((6 + 5 + 2 * 1) / (8 * 4))
    assert plan({"image": (0,)}).utilisation == 0
