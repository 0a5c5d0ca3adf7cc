"""The plans that take part in a trial, and the race that they run; some join it once others were measured."""

from __future__ import annotations

import logging

from mosaic.engine.trial.plans import measured_of, plan_shape, solve_again
from mosaic.engine.trial.race import Decision, Race, Turn
from mosaic.engine.trial.setup import TrialSetup, TriedPlan
from mosaic.errors import MosaicError
from mosaic.graph import ModuleGraph

_LOG = logging.getLogger("mosaic")
_LAUNCH_BOUND = 0.3
_ROUNDS_BEFORE_CAPTURE = 2


class Lineup:
    """Plans of a trial; in its race plan i has number i + 1, behind the plain loop.

    Args:
        setup: What to try, and how.

    Attributes:
        race: The race that they run now.
        plans: Those that take part.
    """

    def __init__(self, setup: TrialSetup) -> None:
        self.race = Race(setup.settings)
        self.plans = [TriedPlan(plan, graphs, setup.cost) for plan in setup.plans for graphs in setup.graphs]
        self._setup = setup
        self._num_first = len(self.plans)
        self._replans_left = 0
        self._replanned_from: TriedPlan | None = None
        if setup.opens_ahead:
            try:
                for one in self.plans:
                    one.placed = setup.open(one, False)
            except BaseException:
                self.close()
                raise

    def plan_of(self, number: int) -> TriedPlan | None:
        """Returns a plan by its number in the race; None for the plain loop."""
        return self.plans[number - 1] if number else None

    def begin_race(self) -> None:
        """Lets all take part in a new race."""
        self.race = Race(self._setup.settings)
        self._replans_left = self._setup.settings.max_replans if self._setup.cost is not None else 0
        self._replanned_from = None
        for one in self.plans:
            one.errors = 0
            self.race.add(one.name)

    def next_turn(self, graph: ModuleGraph) -> Turn | Decision:
        """Says whose turn is next, or how it was decided; takes in those that are worth it by now."""
        race = self.race
        while True:
            if race.is_round_over and race.num_rounds >= _ROUNDS_BEFORE_CAPTURE:
                self._add_captured()
                self._add_targeted()
            if race.is_round_over and self._replans_left and not race.is_over_budget:
                self._replan(graph)
            found = race.next_turn()
            if isinstance(found, Turn) or not (self._add_captured() or self._add_targeted()):
                return found

    def close(self, *, but: TriedPlan | None = None) -> None:
        """Ends the lanes of all plans, or of all but one."""
        for one in self.plans:
            if one is not but:
                one.close()

    def reset(self, winner: TriedPlan | None) -> None:
        """Goes back to the first plans and the one that won; opened anew, for the shapes that the loop has then."""
        self.close()
        del self.plans[self._num_first :]
        if winner is not None and winner not in self.plans:
            self.plans.append(winner)

    def _best(self) -> TriedPlan | None:
        """Returns the plan whose measured steps were the shortest so far."""
        pairs = zip(self.race.contenders[1:], self.plans, strict=True)
        tried = [(found.median_ms, one) for found, one in pairs if found.samples and not found.is_counted_out]
        return min(tried, key=lambda pair: pair[0])[1] if tried else None

    def _add_captured(self) -> bool:
        """Lets the best plan take part as CUDA graphs, too, where launching takes long; returns whether it does now.

        One plan only, and once the others have had the turns that they need to win: capturing takes as long as some
        ten steps, of the few that a trial may lose.
        """
        best, share = self._best(), self._setup.launch_share()
        if best is None or share <= _LAUNCH_BOUND or any(one.graphs for one in self.plans):
            return False
        if not self.race.has_room:
            return False
        _LOG.info("launching takes %.2f of the modules' time on the device: CUDA graphs are tried, too", share)
        self._add(TriedPlan(best.plan, True, best.cost))
        return True

    def _add_targeted(self) -> bool:
        """Lets the best plan take part with an SM target, too, where that pays; returns whether it does now."""
        best = self._best()
        if best is None or not self._setup.sm_target or any(one.sm_target for one in self.plans):
            return False
        confined = any(placement.quota < best.plan.device.num_slots for placement in best.plan.placements)
        if not confined or not self.race.has_room:
            return False
        self._add(TriedPlan(best.plan, best.graphs, best.cost, sm_target=True))
        return True

    def _add(self, candidate: TriedPlan, remark: str = "") -> None:
        self.plans.append(candidate)
        self.race.add(f"{candidate.name}{remark}")

    def _replan(self, graph: ModuleGraph) -> None:
        """Puts what the best plan so far was measured to take into the cost model, and solves again."""
        self._replans_left -= 1
        best = self._best()
        if best is None or best is self._replanned_from or best.cost is None or best.placed is None:
            return
        if best.plan.search.seconds * 1e3 > self.race.budget_ms - self.race.lost_ms:  # it may take as long again
            return
        self._replanned_from = best
        executor = best.placed.executor
        measured = measured_of(executor.spans(executor.origin_ns))
        try:
            found = solve_again(best.plan, measured, graph, best.cost)
        except MosaicError as error:
            _LOG.info("the plan was not solved again with measured times: %s", error)
            return
        if found is None or plan_shape(found[0]) in {plan_shape(one.plan) for one in self.plans}:
            return
        replanned = TriedPlan(found[0], best.graphs, found[1], sm_target=best.sm_target)
        self._add(replanned, " (solved again with measured times)")
