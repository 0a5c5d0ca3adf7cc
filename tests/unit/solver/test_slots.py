"""Slots of later stages: the ones that are free first."""

from mosaic.graph import Part
from mosaic.plan import Grid, Placement, Stage
from mosaic.solver.slots import start_early


def make_stage(**modules):
    return Stage(
        placements=tuple(
            Placement(part=Part(module=name), slots=slots, grid=Grid(ranks=devices), forward_ms=ms)
            for name, (slots, devices, ms) in modules.items()
        )
    )


def slots_of(stages):
    return {placement.module: placement.slots for stage in stages for placement in stage.placements}


def test_a_later_stage_goes_where_the_one_before_ends_first():
    stages = [make_stage(long=((0,), (0,), 9.0), short=((1,), (0,), 2.0)), make_stage(next=((0,), (0,), 3.0))]
    assert slots_of(start_early(stages, num_devices=1, num_slots=2)) == {"long": (0,), "short": (1,), "next": (1,)}


def test_a_stage_whose_runs_do_not_fit_in_order_of_size_keeps_its_slots():
    stages = [
        make_stage(before=((1,), (0,), 1.0)),
        make_stage(wide=((0, 1), (0,), 1.0), left=((2,), (0, 1), 1.0), right=((0, 1), (1,), 1.0)),
    ]
    moved = start_early(stages, num_devices=2, num_slots=3)
    taken = [(device, slot) for p in moved[1].placements for device in p.devices for slot in p.slots_on(device)]
    assert len(taken) == len(set(taken))
    assert [p.quota for p in moved[1].placements] == [2, 1, 2]
