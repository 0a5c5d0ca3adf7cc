"""Trying plans on all ranks before the loop begins, on the sample's step: forward, and backward of a made-up loss.

``Turns`` decides, as in one rank's trial, with data-parallel training in the place of the plain loop. Every rank holds
turns of its own and gets the same times, so that all know the next turn without a message. No step trains, so all
timed steps are time lost. The last plan that is left runs, tried or not: what fails in it fails in the loop.

For a turn a plan is prepared as it would be to run, but every rank keeps all parameters. Its communicators stay for the
next turn and for the plan that wins. Gradients, buffers and random numbers are restored afterwards.

A step's time is that of the slowest rank, from when all were ready. A plan that cannot run on some rank, for want of
memory or for any error, loses; that rank cancels the turn, so that no other one waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from mosaic.engine.attachment import Attachment
from mosaic.engine.finding.find import runner_of
from mosaic.engine.session import clock_of
from mosaic.engine.trial import sample_step
from mosaic.errors import RankFailedError
from mosaic.find.restore import preserved
from mosaic.plan import Plan
from mosaic.ranks.running.activate import Activated, open_runs, place
from mosaic.ranks.running.prepare import Prepared
from mosaic.ranks.world.cancel import CancelToken
from mosaic.take_turns import Decision, StepClock, TrialReport, TrialSettings, Turns, Visit

_LOG = logging.getLogger("mosaic")


def try_plans(on: Prepared, plans: Sequence[Plan], settings: TrialSettings) -> tuple[Plan, TrialReport]:
    """Returns the plan to run, and what was measured; every rank calls it with the same plans and gets the same.

    Raises:
        RankFailedError: Another rank has failed; names it.
    """
    world = on.world
    turns = Turns(settings, [plan.search.method for plan in plans], trains=False)
    with preserved(on.model, on.sample, alone=on.finding.subjects, elsewhere=True):
        trying = _Trying(on, plans, settings.clock or clock_of(on.backend))
        while isinstance(visit := turns.next_visit(), Visit):
            trying.take(visit, turns)
    world.progress.calls = world.progress.step = 0
    world.progress.clear_waits()
    return plans[world.broadcast(visit.winner)], _report(turns, visit)


class _Trying:
    """One trial: gives plans their turns."""

    def __init__(self, on: Prepared, plans: Sequence[Plan], clock: StepClock) -> None:
        self._on = on
        self._plans = plans
        self._clock = clock
        self._run = runner_of(on.model, on.sample)
        self._num_turns = 0

    def take(self, visit: Visit, turns: Turns) -> None:
        world, plan = self._on.world, self._plans[visit.candidate]
        self._num_turns += 1
        opened, error = None, None
        try:
            opened = open_runs(self._on, plan, is_warm=self._num_turns > len(self._plans))
        except Exception as failure:  # of any kind: all ranks have to hear of it
            error = failure
        failed = _said(world.all_gather(None if error is None else _text_of(error)))
        if failed is not None:
            if opened is not None:
                opened.runs.close()
            turns.exclude(visit.candidate, f"could not run: {failed}")
            return
        assert opened is not None
        world.max_ctas = plan.communication_sms or None
        with world.groups.lending() as loan:
            activated = place(self._on, plan, opened, gives_up=False)
        with world.cancel_token(f"trial/{self._num_turns}", loan.groups) as token:
            failed = self._steps(activated, visit.num_steps, turns, token)
        if failed is None:
            world.groups.give_back(loan)
        else:
            world.groups.destroy(loan)
            turns.exclude(visit.candidate, f"could not run: {failed}")

    def _steps(self, activated: Activated, num_steps: int, turns: Turns, token: CancelToken) -> str | None:
        """Takes steps until the turn is over; returns why the plan cannot run, or None."""
        model, world = self._on.model, self._on.world
        attachment = Attachment(model, self._on.finding, before_call=lambda: None)
        attachment.begin(activated.placed, None)
        try:
            world.all_gather(None)  # so that the first step, too, begins with all ranks ready
            for _ in range(num_steps):
                took_ms, why = 0.0, None
                try:
                    took_ms = self._step(activated)
                except RankFailedError:
                    raise
                except Exception as failure:  # of any kind: the plan loses, and all ranks have to hear of it
                    text = _text_of(failure)
                    why = text if token.cancel(text) else None  # else this one failed since another did
                for parameter in model.parameters():
                    parameter.grad = None
                told = world.all_gather((took_ms, why))
                failed = _said([text for _, text in told])
                if failed is not None:
                    token.abort()  # of what this rank may still be waiting for
                    return failed
                turns.note(max(ms for ms, _ in told))
                if turns.is_cut:
                    break
            return None
        finally:
            attachment.end()

    def _step(self, activated: Activated) -> float:
        start = self._clock.mark()
        sample_step(self._run)
        activated.placed.executor.settle()
        end = self._clock.mark()
        self._clock.settle()
        return self._clock.ms_between(start, end)


def _text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _said(told: Sequence[str | None]) -> str | None:
    """Returns what ranks said that went wrong, by rank; None if nothing did."""
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(told) if text is not None) or None


def _report(turns: Turns, decision: Decision) -> TrialReport:
    steps = f"{turns.num_steps} steps of the sample before the loop, {turns.took_ms:.1f} ms"
    head = f"trial: {decision.reason} ({steps}; forward and backward, without an optimizer)"
    _LOG.info("%s", head)
    turns.lost_ms = turns.took_ms  # no step trained
    return turns.report(head, decision)
