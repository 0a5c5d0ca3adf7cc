"""``mosaic.colocate`` on several ranks: one plan for all, each rank with its part of the modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import nn

from mosaic.backends.base import Backend
from mosaic.engine.calls.attach import is_attached
from mosaic.engine.finding.find import Sample
from mosaic.engine.options import DEFAULT_OPTIONS, Options, RankSettings
from mosaic.engine.session import Request
from mosaic.plan import Plan
from mosaic.profiler import ProfileCache
from mosaic.ranks.choosing.plans import Candidates, plans_of_first, rank_plans_to_try
from mosaic.ranks.choosing.rank_trial import try_plans
from mosaic.ranks.running.handle import RankHandle
from mosaic.ranks.running.place import open_executor, place
from mosaic.ranks.session import RankSession
from mosaic.ranks.world.groups import backend_of, device_of
from mosaic.ranks.world.world import World
from mosaic.take_turns import TrialReport


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

    Each module runs on the ranks that the plan gives it, whatever these have in common with other modules'. Its inputs
    are routed there and its results back, and gradients the other way; a loss that each rank takes the mean of over
    its rows gives every parameter the gradient of data-parallel training. Parameters of a module are freed on ranks
    that do not run it. What belongs to no placed module runs on every rank, and its gradients are averaged.

    A parameter that modules on different ranks share, or that is used between modules too, lives on all ranks that
    use it. What reaches no rank's loss has gradients of zeros, where DistributedDataParallel leaves none.

    Random numbers, of dropout for one, are drawn on the rank that runs the module: they are others than in a plain
    loop, and the same in each run with the same seeds, plan and slices.

    Rank 0's weights become those of all ranks. Without a plan, rank 0 profiles and solves, and tells the others.

    A plan that Mosaic solved for is tried before it is kept, here, before the loop begins: it and the plan of every
    module on all ranks, which is data-parallel training on this engine, take turns at the sample's step, forward and
    backward. The slowest rank's time counts. The fastest runs, and
    data-parallel training if none beats it beyond the noise; without any trial where none is predicted to gain 2 %.
    No step of it trains: gradients, buffers and random numbers are as before. It ends when the steps that
    count have taken as long as 20 of data-parallel training; one step before each turn's, and making the communicators
    of each plan once, come on top of that. A plan that some rank cannot run loses, and ``describe()`` says why.
    """
    options.check_for_several_ranks()
    if any(map(is_attached, model.modules())):
        raise ValueError(
            f"this {type(model).__name__}, or a part of it, is colocated already; call handle.remove() of the first "
            "handle, on every rank, before"
        )
    settings = options.ranks or RankSettings()
    device = backend.torch_device if backend is not None else device_of(model)
    world = World.join(device, timeout_s=settings.timeout_s, watch=settings)
    with world.opening():
        here = world.run_on_all(lambda: options.with_sms(backend or backend_of(device)))
        request = Request(sample=sample, plan=plan, modules=modules, exclude=exclude, backend=here, options=options)
        prepare = partial(_prepare, model, world, ProfileCache())
        return RankHandle(prepare(request), prepare, world=world)


def _prepare(model: nn.Module, world: World, cache: ProfileCache, request: Request) -> RankSession:
    session = RankSession(model=model, request=request, world=world, cache=cache)
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
        world.max_ctas = plan.communication_sms or None
        executor = open_executor(session, plan, is_warm=session.report.has_steps)
        with world.lending() as session.loan:
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
    return rank_plans_to_try(plan, graph, trial, communication_slots=plan.communication_slots)
