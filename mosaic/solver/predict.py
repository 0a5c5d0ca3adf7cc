"""What a cost model predicts for an allocation: stages with their placements and times."""

from __future__ import annotations

from mosaic.cost import Cost
from mosaic.plan import Placement, Stage
from mosaic.profile import Phase
from mosaic.solver.stage_eval import StageResult


def build_stage(result: StageResult, cost: Cost) -> Stage:
    """Turns an allocation into placements with the times predicted beside their neighbours."""
    placements = []
    for name, (option, devices) in result.choices.items():
        runs = tuple(tuple(range(start, start + option.quota)) for start in result.starts[name])
        # Eq. 7: the device with the worst neighbours decides; many have the same ones, or none that matter.
        alone = cost.interference.is_zero
        groups: set[tuple[tuple[str, int], ...]] = (
            {()} if alone else {tuple(result.beside(name, device)) for device in devices}
        )
        forward_ms, backward_ms = (
            max(cost.placed_ms(name, phase, option.degree, option.quota, beside=beside) for beside in groups)
            for phase in Phase
        )
        placements.append(
            Placement(
                module=name,
                slots=runs[0],
                devices=devices,
                slots_by_device=runs if len(set(runs)) > 1 else (),
                forward_ms=forward_ms,
                backward_ms=backward_ms,
            )
        )
    return Stage(placements=tuple(placements))
