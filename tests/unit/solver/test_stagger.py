from mosaic.graph import Part
from mosaic.plan import Grid, Placement, Stage
from mosaic.solver.stagger import stagger


def stage(**placed):
    return Stage(
        placements=tuple(
            Placement(part=Part(module=name), slots=slots, grid=Grid(ranks=devices), forward_ms=ms)
            for name, (slots, devices, ms) in placed.items()
        )
    )


def slots_of(stages):
    return {placed.module: placed.slots for each in stages for placed in each.placements}


def test_a_later_stage_goes_where_the_one_before_ends_first():
    stages = [stage(long=((0,), (0,), 9.0), short=((1,), (0,), 2.0)), stage(next=((0,), (0,), 3.0))]
    found = slots_of(stagger(stages, num_devices=1, num_slots=2))
    assert found["next"] == found["short"]
    assert found["next"] != found["long"]


def test_partitions_of_a_stage_stay_disjoint_and_keep_their_quotas():
    stages = [
        stage(a=((0, 1), (0,), 5.0), b=((2,), (0,), 1.0)),
        stage(c=((0,), (0,), 1.0), d=((1, 2, 3), (0,), 2.0)),
    ]
    moved = stagger(stages, num_devices=1, num_slots=4)
    for before, after in zip(stages, moved, strict=True):
        taken = [slot for placed in after.placements for slot in placed.slots]
        assert len(taken) == len(set(taken))
        assert [p.quota for p in before.placements] == [p.quota for p in after.placements]
        assert before.names == after.names


def test_a_module_has_the_same_slots_on_all_its_devices():
    stages = [stage(a=((0,), (0,), 5.0)), stage(b=((0,), (0, 1), 1.0))]
    assert slots_of(stagger(stages, num_devices=2, num_slots=2))["b"] == (1,)


def test_a_stage_that_does_not_fit_in_order_of_size_keeps_its_slots():
    stages = [
        stage(pre=((1,), (0,), 1.0)),
        stage(wide=((0, 1), (0,), 1.0), left=((2,), (0, 1), 1.0), right=((0, 1), (1,), 1.0)),
    ]
    moved = stagger(stages, num_devices=2, num_slots=3)
    by_device = {}
    for placed in moved[1].placements:
        for device in placed.devices:
            for slot in placed.slots:
                assert (device, slot) not in by_device
                by_device[device, slot] = placed.module
