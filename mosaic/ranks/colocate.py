"""``mosaic.colocate`` on several ranks: one plan for all, each rank with its part of the modules."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from mosaic.backends.base import Backend
from mosaic.engine.attachment import Attachment
from mosaic.engine.finding.find import Sample, runner_of
from mosaic.engine.options import DEFAULT_OPTIONS, Options
from mosaic.engine.session import Request
from mosaic.engine.trial import LoopClock, sample_step
from mosaic.errors import RankFailedError, said_by
from mosaic.find.restore import preserved
from mosaic.plan import Plan
from mosaic.ranks.plans import Candidates, plans_of_first, rank_plans_to_try
from mosaic.ranks.running.handle import RankHandle
from mosaic.ranks.session import RankPlan, RankSession, open_executor, place
from mosaic.ranks.world.failures import CancelToken
from mosaic.ranks.world.groups import backend_of, device_of
from mosaic.ranks.world.world import World
from mosaic.take_turns import TrialReport, TrialSettings, Turns, Visit

_LOG = logging.getLogger("mosaic")


def colocate_ranks(
    model: nn.Module,
    sample: Sample,
    *,
    plan: Plan | None = None,
    modules: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    backend: Backend | None = None,
    options: Options = DEFAULT_OPTIONS,
) -> RankHandle:
    """Colocates a model over all ranks that torchrun started; every rank calls it with its own batch.

    Each module runs on the ranks that the plan gives it. Its inputs are routed there and its results back, and
    gradients the other way; a loss that each rank takes the mean of over its rows gives every parameter the gradient of
    data-parallel training. Parameters of a module are freed on ranks that do not run it. What belongs to no placed
    module runs on every rank, and its gradients are averaged. A parameter that modules share, or that is used between
    modules too, lives on all ranks that use it. What reaches no rank's loss has gradients of zeros, where
    DistributedDataParallel leaves none.

    Random numbers, of dropout for one, are drawn on the rank that runs the module: they are others than in a plain
    loop, and the same in each run with the same seeds, plan and slices. Rank 0's weights become those of all ranks.

    Without a plan rank 0 profiles and solves. Its plan and data-parallel training on this engine take turns at the
    sample's step before the loop begins, unless a gain below 2 % is predicted; the slowest rank's time counts. The plan
    runs if it is faster beyond the noise. No step of the trial trains, and the steps that count take as long as 30 of
    data-parallel training at most. A plan that some rank cannot run loses, and ``describe()`` says why.
    """
    options.check_for_several_ranks()
    device = backend.torch_device if backend is not None else device_of(model)
    world = World.join(device, options.ranks)
    with world.opening():
        here = world.run_on_all(lambda: options.backend_of(backend or backend_of(device)))
        request = Request(sample=sample, plan=plan, modules=modules, exclude=exclude, backend=here, options=options)
        return RankHandle(_prepare(model, world, request), world=world)


def _prepare(model: nn.Module, world: World, request: Request) -> RankSession:
    session = RankSession(model=model, request=request, world=world)
    with session.timed("find"):
        session.find()
    with session.timed("solve"):
        candidates = _candidates(session)
    plan, trial = candidates.plans[0], session.trial_settings
    session.report = TrialReport(sentences=candidates.sentences)
    if trial is not None and len(candidates.plans) > 1:
        with session.timed("try"):
            plan, report = try_plans(session, candidates.plans, trial)
        session.report = replace(report, sentences=(*report.sentences, *candidates.sentences))
    with session.timed("open"):
        executor = open_executor(session, plan, is_warm=session.report.metrics.get("trial_steps", 0.0) > 0)
        session.placed = place(session, plan, executor)
        world.destroy_spare()
        session.plans = (plan,)
        session.notes = (*session.report.sentences, *session.placed.notes, *request.backend.notes)
    return session


def _candidates(session: RankSession) -> Candidates:
    """Returns the plans to try: rank 0 profiles and solves, unless the request has a plan."""
    world, request, trial = session.world, session.request, session.trial_settings
    plan, graph = request.plan, session.finding.graph
    if plan is None:
        return plans_of_first(session, trial)
    world.run_on_all(lambda: plan.check_matches(graph=graph, device=request.backend.device))
    world.check_same_plan(plan.fingerprint, plan.num_devices)
    if trial is None:
        return Candidates(plans=(plan,), sentences=("no plan is tried: the one that was given runs",))
    return rank_plans_to_try(plan, graph, trial)


def try_plans(session: RankSession, plans: Sequence[Plan], settings: TrialSettings) -> tuple[Plan, TrialReport]:
    """Tries plans on the sample's step, forward and backward of a made-up loss; returns the one to run and a report.

    ``Turns`` decides, as in one rank's trial, with data-parallel training in the place of the plain loop. Every rank
    holds turns of its own and gets the same times, the slowest rank's, so all know the next turn without a message. No
    step trains. The last plan that is left runs, tried or not: what fails in it fails in the loop.

    For a turn a plan is prepared as it would be to run, but every rank keeps all parameters. Its communicators stay for
    the next turn and for the plan that wins. A plan that cannot run on some rank, for want of memory or for any error,
    loses; that rank cancels the turn, so that no other one waits for it.
    """
    world = session.world
    turns = Turns(settings, [plan.search.method for plan in plans], train=False)
    numbers = itertools.count()
    with preserved(session.model, session.request.sample, alone=session.finding.subjects):
        while isinstance(visit := turns.next_visit(), Visit):
            failed = _visit(session, plans[visit.candidate], visit.num_steps, turns, next(numbers))
            if failed is not None:
                turns.candidates[visit.candidate].exclusion = f"could not run: {failed}"
    world.progress.calls = world.progress.step = 0
    world.progress.waits.clear()
    steps = f"{turns.num_steps} steps of the sample before the loop, {turns.took_ms:.1f} ms"
    head = f"trial: {visit.reason} ({steps}; forward and backward, without an optimizer)"
    _LOG.info("%s", head)
    turns.lost_ms = turns.took_ms  # no step trained
    return plans[world.broadcast(visit.winner)], turns.report(head, visit)


def _visit(session: RankSession, plan: Plan, num_steps: int, turns: Turns, number: int) -> str | None:
    """Prepares a plan and takes steps until its turn is over; returns why it cannot run, or None."""
    world = session.world
    executor, reason = None, None
    try:
        executor = open_executor(session, plan, is_warm=number > 0)
    except Exception as error:  # of any kind: all ranks have to hear of it
        reason = said_by(error)
    failed = _joined(world.all_gather(reason))
    if executor is None or failed is not None:
        if executor is not None:
            executor.close()
        return failed
    with world.lending() as loan:
        placed = place(session, plan, executor, gives_up=False)
    with world.cancel_token(f"trial/{number}", loan.groups) as token:
        failed = _steps(session, placed, num_steps, turns, token)
    (world.give_back if failed is None else world.destroy)(loan)
    return failed


def _steps(session: RankSession, placed: RankPlan, num_steps: int, turns: Turns, token: CancelToken) -> str | None:
    model, world, run = session.model, session.world, runner_of(session.model, session.request.sample)
    clock = LoopClock(session.request.backend.api)
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
                text = said_by(error)
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


def _joined(reasons: Sequence[str | None]) -> str | None:
    """Returns the reasons of all ranks that have one; None for none."""
    return "; ".join(f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None) or None
