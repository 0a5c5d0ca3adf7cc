"""StageEval: the shortest time in which the modules of one stage can run side by side (paper section 3.4, Eq. 4).

The latency of a module is its forward plus backward, as in the paper, plus the slowdown by the modules on its devices
(Eq. 7). The latency of a stage is that of its slowest module.

The target is bisected over the distinct latencies of the options. Without interference the optimum is one of them. With
interference it lies between two of them, and bisection continues there until the gap is within ``tolerance``. The
returned placement always reaches the returned latency.
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
"""A target that every option meets: thirteen days."""


class StageEvaluator:
    """Evaluates stages of one graph on one machine. A result depends only on the set of modules.

    Attributes:
        countdown: Remaining effort.
        num_unresolved: Placements that CP-SAT abandoned at its limit. Their targets count as unmet, so the latency of
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
            tolerance: Relative gap to the optimum if modules disturb each other.
            countdown: Remaining effort; at 0 a stage gets the best allocation so far.
        """
        self.options = options
        self._machine = machine
        self._tolerance = tolerance
        self.countdown = countdown or Countdown(SearchLimits(effort=math.inf))
        self._extras = None if cost.interference.is_zero else PairwiseExtras(options, cost)
        self.num_unresolved = 0

    def evaluate(self, names: Sequence[str]) -> StageResult | None:
        """Returns the best allocation of a stage, or None if its modules do not fit side by side."""
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
        """Returns False only if no placement of a stage meets a target: a quick, safe bound.

        Every module needs an option that meets the target alone and leaves the others their least slots and memory.
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
        effort = self.countdown.left
        if effort <= 0:
            return None
        extras = self._extras
        candidates = {
            name: extras.candidates(name, target_ns, names) if extras else least_options(self.options[name], target_ns)
            for name in names
        }
        answer = find_placement(candidates, self._machine, target_ns, extras=extras, effort=min(MAX_EFFORT, effort))
        self.countdown.spend(answer.effort)
        self.num_unresolved += not answer.is_resolved and self.countdown.left > 0
        return None if answer.choices is None else self._result({name: answer.choices[name] for name in names})

    def _result(self, choices: Mapping[str, Choice]) -> StageResult:
        """Returns the stage of these choices; the device with the worst neighbours decides (Eq. 7)."""
        result = StageResult(latency_ns=max(option.latency_ns for option, _ in choices.values()), choices=choices)
        if self._extras is None:
            return result
        latencies = [
            option.latency_ns + sum(self._extras.ns(name, option, *other) for other in result.beside(name, device))
            for name, (option, devices) in choices.items()
            for device in devices
        ]
        return replace(result, latency_ns=max(latencies))
