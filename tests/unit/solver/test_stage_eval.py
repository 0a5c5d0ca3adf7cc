"""StageEval: the shortest time of one stage, against enumeration and by hand."""

from __future__ import annotations

from planning_cases import flat, profile_of

from mosaic.cost import CostModel
from mosaic.cost.interference import Neighbours
from mosaic.profile import Phase, Profile
from mosaic.solver import DeploymentOption, StageEvaluator
from mosaic.solver.options import all_options
from mosaic.solver.slots import lay_out
from mosaic.solver.stage import Machine

MS = 1_000_000


def option(degree: int, quota: int, latency_ns: int = 10, memory_bytes: int = 0) -> DeploymentOption:
    return DeploymentOption(degree=degree, quota=quota, forward_ns=latency_ns, backward_ns=0, memory_bytes=memory_bytes)


def evaluator_of(profile: Profile, num_devices: int = 1, cost: CostModel | None = None) -> StageEvaluator:
    cost = cost or CostModel.from_profile(profile)
    options = all_options(profile.graph, cost=cost, device=profile.device, num_devices=num_devices)
    return StageEvaluator(options, cost=cost, machine=machine_of(profile, num_devices), tolerance=1e-6)


def machine_of(profile: Profile, num_devices: int = 1) -> Machine:
    device = profile.device
    return Machine(num_devices=num_devices, num_slots=device.num_slots, memory_bytes=device.memory_bytes)


class Crowd:
    """A form under which a crowd disturbs less than a pair, as the product of shares below one does in Eq. 8."""

    is_zero = False
    is_pairwise = False

    def extra_ms(self, module: str, phase: Phase, *, quota: int, alone_ms: float, beside: Neighbours) -> float:
        return 5.0 if len(beside) == 1 else 0.0


def test_forbidding_a_pair_does_not_forbid_a_larger_group_that_meets_the_target() -> None:
    profile = profile_of(dict.fromkeys("abc", flat(1)), num_slots=3)
    cost = CostModel.from_profile(profile)
    cost.interference = Crowd()
    result = evaluator_of(profile, 2, cost).evaluate(["a", "b", "c"])
    assert result.latency_ns == 2 * MS
    assert {devices for _, devices in result.choices.values()} == {(0,)}


def test_three_pairs_of_three_devices_get_other_slots_on_each_where_only_that_fits() -> None:
    ring = {"ab": (option(2, 1), (0, 1)), "bc": (option(2, 1), (1, 2)), "ac": (option(2, 1), (0, 2))}
    starts = lay_out(ring, 2)
    held = {(device, start) for name, (_, at) in ring.items() for device, start in zip(at, starts[name], strict=True)}
    assert held == {(device, slot) for device in range(3) for slot in range(2)}
