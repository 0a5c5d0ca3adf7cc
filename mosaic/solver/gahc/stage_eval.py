"""StageEval: the shortest time in which the modules of one stage can run side by side (paper section 3.4, Eq. 4).

The latency of a module is its forward and backward together, as in the paper, plus what it loses to
the modules on its devices (Eq. 7). A stage takes as long as its slowest module.

The target is bisected over the distinct latencies of the options. Without interference the optimum is one
of them. With interference it lies between two of them, and bisection goes on there until the gap is
within ``tolerance``; the latency that is returned is always one that the returned placement reaches.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mosaic.cost import Cost
from mosaic.solver.gahc.extras import PairwiseExtras
from mosaic.solver.gahc.placement import MAX_EFFORT, find_placement
from mosaic.solver.limits import Countdown, SearchLimits
from mosaic.solver.options import DeploymentOption, least_options
from mosaic.solver.stage import Choice, Machine, StageResult

_UNLIMITED_NS = 2**50
"""A target that everything meets: thirteen days."""


class StageEvaluator:
    """Evaluates stages of one graph on one machine; a result depends on nothing but the set of modules.

    Attributes:
        countdown: Effort that is left.
        num_unresolved: Placements that CP-SAT gave up at its limit. Their targets count as unmet, so the latency of
            their stage may be above the optimum.
    """

    def __init__(
        self,
        options: Mapping[str, Sequence[DeploymentOption]],
        *,
        cost: Cost,
        machine: Machine,
        tolerance: float = 1e-3,
        countdown: Countdown | None = None,
    ) -> None:
        """Stores the problem of all stages.

        Args:
            options: Deployment options of every module; not empty.
            cost: Source of interference.
            machine: Devices to place on.
            tolerance: Share of a latency within which the optimum is found where modules disturb each other.
            countdown: Effort left; at 0 the best allocation so far is a stage's.
        """
        self.options = options
        self._machine = machine
        self._tolerance = tolerance
        self.countdown = countdown or Countdown(SearchLimits(effort=math.inf))
        self._extras = None if cost.interference.is_zero else PairwiseExtras(options, cost)
        self.num_unresolved = 0

    def evaluate(self, names: Sequence[str]) -> StageResult | None:
        """Returns the best allocation of a stage, or None where its modules do not fit side by side."""
        fastest = max(min(o.latency_ns for o in self.options[name]) for name in names)
        grid = sorted({o.latency_ns for name in names for o in self.options[name] if o.latency_ns >= fastest})
        best = self._probe(names, _UNLIMITED_NS)
        if best is None:
            return None
        low, high = 0, bisect_left(grid, best.latency_ns)
        while low < high:
            middle = (low + high) // 2
            result = self._probe(names, grid[middle])
            if result is None:
                low = middle + 1
            else:
                best, high = result, min(middle, bisect_left(grid, result.latency_ns))
        if self._extras is not None:
            best = self._close_gap(names, grid[low - 1] if low else fastest - 1, best)
        return best

    def can_meet(self, names: Sequence[str], target_ns: int) -> bool:
        """Returns False only where no placement of a stage meets a target: a bound, quick and never wrong.

        Every module must keep an option that meets the target alone, and that leaves the others the least slots and
        memory with which they can.
        """
        slots = memory = 0
        for name in names:
            meeting = [option for option in self.options[name] if option.latency_ns <= target_ns]
            if not meeting:
                return False
            slots += min(option.area for option in meeting)
            memory += min(option.memory_bytes * option.degree for option in meeting)
        machine = self._machine
        fits_memory = not machine.memory_bytes or memory <= machine.memory_bytes * machine.num_devices
        return slots <= machine.num_slots * machine.num_devices and fits_memory

    def _close_gap(self, names: Sequence[str], unmet_ns: int, best: StageResult) -> StageResult:
        """Bisects between a target that cannot be met and the latency of a placement."""
        while best.latency_ns - unmet_ns > max(1, self._tolerance * best.latency_ns):
            target = (unmet_ns + best.latency_ns) // 2
            result = self._probe(names, target)
            if result is None:
                unmet_ns = target
            else:
                best = result
        return best

    def _probe(self, names: Sequence[str], target_ns: int) -> StageResult | None:
        if not self.can_meet(names, target_ns):
            return None
        left = self.countdown.left
        if left <= 0:
            return None
        extras = self._extras
        candidates = {
            name: extras.candidates(name, target_ns, names) if extras else least_options(self.options[name], target_ns)
            for name in names
        }
        answer = find_placement(candidates, self._machine, target_ns, extras=extras, effort=min(MAX_EFFORT, left))
        self.countdown.spend(answer.effort)
        self.num_unresolved += not answer.is_resolved and self.countdown.left > 0
        return None if answer.choices is None else self._result({name: answer.choices[name] for name in names})

    def _result(self, choices: Mapping[str, Choice]) -> StageResult:
        """The stage of these choices; of a module's devices the one with the worst neighbours decides (Eq. 7)."""
        result = StageResult(latency_ns=max(option.latency_ns for option, _ in choices.values()), choices=choices)
        if self._extras is None:
            return result
        latencies = [
            option.latency_ns + sum(self._extras.ns(name, option, *other) for other in result.beside(name, device))
            for name, (option, devices) in choices.items()
            for device in devices
        ]
        return replace(result, latency_ns=max(latencies))
