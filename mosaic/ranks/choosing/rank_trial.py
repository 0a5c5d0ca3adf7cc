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
from mosaic.engine.trial import clock_of, sample_step
from mosaic.errors import RankFailedError
from mosaic.find.restore import preserved
from mosaic.plan import Plan
from mosaic.ranks.running.place import open_executor, place
from mosaic.ranks.session import RankPlan, RankSession
from mosaic.ranks.world.failures import CancelToken
from mosaic.take_turns import StepClock, TrialReport, TrialSettings, Turns, Visit

_LOG = logging.getLogger("mosaic")


def try_plans(session: RankSession, plans: Sequence[Plan], settings: TrialSettings) -> tuple[Plan, TrialReport]:
    """Returns the plan to run, and what was measured; every rank calls it with the same plans and gets the same.

    Raises:
        RankFailedError: Another rank has failed; names it.
    """
    world, clock = session.world, settings.clock or clock_of(session.request.backend)
    turns = Turns(settings, [plan.search.method for plan in plans], trains=False)
    number = 0
    with preserved(session.model, session.request.sample, alone=session.finding.subjects, elsewhere=True):
        while isinstance(visit := turns.next_visit(), Visit):
            failed = _visit(
                session, plans[visit.candidate], visit.num_steps, turns, clock, number, is_warm=number >= len(plans)
            )
            if failed is not None:
                turns.exclude(visit.candidate, f"could not run: {failed}")
            number += 1
    world.progress.calls = world.progress.step = 0
    world.progress.waits.clear()
    steps = f"{turns.num_steps} steps of the sample before the loop, {turns.took_ms:.1f} ms"
    head = f"trial: {visit.reason} ({steps}; forward and backward, without an optimizer)"
    _LOG.info("%s", head)
    turns.lost_ms = turns.took_ms  # no step trained
    return plans[world.broadcast(visit.winner)], turns.report(head, visit)


def _visit(
    session: RankSession, plan: Plan, num_steps: int, turns: Turns, clock: StepClock, number: int, *, is_warm: bool
) -> str | None:
    """Prepares a plan and takes steps until its turn is over; returns why it cannot run, or None."""
    world = session.world
    executor, reason = None, None
    try:
        executor = open_executor(session, plan, is_warm=is_warm)
    except Exception as error:  # of any kind: all ranks have to hear of it
        reason = _text_of(error)
    failed = _joined(world.all_gather(reason))
    if executor is None or failed is not None:
        if executor is not None:
            executor.close()
        return failed
    world.max_ctas = plan.communication_sms or None
    with world.lending() as loan:
        placed = place(session, plan, executor, gives_up=False)
    with world.cancel_token(f"trial/{number}", loan.groups) as token:
        failed = _steps(session, placed, num_steps, turns, clock, token)
    (world.give_back if failed is None else world.destroy)(loan)
    return failed


def _steps(
    session: RankSession, placed: RankPlan, num_steps: int, turns: Turns, clock: StepClock, token: CancelToken
) -> str | None:
    model, world, run = session.model, session.world, runner_of(session.model, session.request.sample)
    attachment = Attachment(model, session.finding, before_call=lambda: None)
    attachment.begin(placed, None)
    try:
        world.all_gather(None)  # so that the first step, too, begins with all ranks ready
        for _ in range(num_steps):
            took_ms, reason = 0.0, None
            try:
                start = clock.mark()
                sample_step(run)
                placed.executor.settle()
                end = clock.mark()
                clock.settle()
                took_ms = clock.ms_between(start, end)
            except RankFailedError:
                raise
            except Exception as error:  # of any kind: the plan loses, and all ranks have to hear of it
                text = _text_of(error)
                reason = text if token.cancel(text) else None  # else this one failed since another did
            for parameter in model.parameters():
                parameter.grad = None
            by_rank = world.all_gather((took_ms, reason))
            failed = _joined([reason for _, reason in by_rank])
            if failed is not None:
                token.abort()  # of what this rank may still be waiting for
                return failed
            turns.note(max(ms for ms, _ in by_rank))
            if turns.is_cut:
                break
        return None
    finally:
        attachment.end()


def _text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _joined(reasons: Sequence[str | None]) -> str | None:
    """Returns the reasons of all ranks that have one; None for none."""
    return "; ".join(f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None) or None
