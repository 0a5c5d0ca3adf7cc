"""``mosaic.colocate``: on one rank, or on several with one plan for all, each with its part of the modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch import nn

from mosaic.backends.base import Backend
from mosaic.backends.table import open_backend
from mosaic.engine.calls.attach import is_attached
from mosaic.engine.colocate import colocate_one
from mosaic.engine.finding.find import Sample
from mosaic.engine.handle import Handle
from mosaic.engine.options import DEFAULT_OPTIONS, Options, RankSettings
from mosaic.engine.ready import Asked, Laps, names_of
from mosaic.engine.trial.report import TrialReport
from mosaic.engine.trial.settings import TrialSettings
from mosaic.files import load_as
from mosaic.plan import Plan
from mosaic.profiler import ProfileCache
from mosaic.ranks.choosing.candidates import RANK_TRIAL, Candidates, rank_plans_to_try
from mosaic.ranks.choosing.planning import plans_of_first
from mosaic.ranks.choosing.rank_trial import try_plans
from mosaic.ranks.running.activate import activate
from mosaic.ranks.running.handle import RankHandle, RankReady
from mosaic.ranks.running.prepare import Prepared, backend_for, prepare
from mosaic.ranks.world.devices import device_of
from mosaic.ranks.world.progress import THE_LOOP
from mosaic.ranks.world.world import RankFacts, World


def colocate(
    model: nn.Module,
    sample: Sample,
    *,
    plan: Plan | str | Path | None = None,
    modules: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] = (),
    backend: Backend | str | None = None,
    options: Options = DEFAULT_OPTIONS,
) -> Handle:
    """Makes a model's own training loop run its modules side by side; changes nothing else about it.

    Finds the modules that can be placed by one run on ``sample``, profiles them unless measurements are given, solves
    for stages and quotas unless ``plan`` is given, and opens the lanes. Afterwards ``model(...)`` and
    ``loss.backward()`` compute what they computed before: on the host backend bit for bit at equal thread counts.
    A plan that Mosaic solved for is tried before it is kept. Where torchrun started several ranks, every rank calls it
    with its own batch: see ``colocate_ranks``, and ``mosaic.engine.colocate.colocate_one`` for one rank.

    Args:
        model: Any module tree, on the backend's device, in the mode in which it will train. It is changed in place:
            the classes of placed modules are swapped, as FSDP2 does; parameters, keys and references stay.
        sample: One batch as it will be trained on (by this rank): a dict of keywords, a sequence of positions, a
            tensor, or a function that runs the model once.
        plan: A plan, or the path of its file, to run instead of solving for one; on several ranks its device i is
            rank i.
        modules: Names or patterns of the modules to place, or one of them, such as ``"trunks.*"``; found by default.
        exclude: Names or patterns of modules to leave where they are, or one of them.
        backend: Where to run: a backend or its name (``"cuda"``, ``"cuda:1"``, ``"host"``). By default the GPU that
            holds the model's parameters, or the host (of several ranks, this rank's share of its cores).
        options: How to plan, measure and run.

    Raises:
        UnsupportedModelError: No module can be placed, or the model is wrapped in something that cannot be colocated;
            on several ranks, a module cannot be split over them.
        InvalidPlanError: The plan is for another model, device or number of ranks, or not the same on all of them.
        InvalidProfileError: The profile is of another model or device.
        UnstableMeasurementError: Other processes used the CPU while modules were profiled, and ``options.profiling`` is
            strict; on other ranks than the first a MosaicError that names it.
        BackendUnavailableError: The model is on a device that the backend does not run, or ranks differ in device,
            versions or model; names them.
        RankFailedError: Another rank has failed; names it.
        ValueError: A plan and a method were given, there is no such method, an option cannot be had here, or the model
            is colocated already.
        TypeError: An argument has a type that it does not accept.
    """
    place = colocate_ranks if World.is_there() else colocate_one
    return place(
        model,
        sample,
        plan=load_as(Plan, plan),
        modules=names_of(modules),
        exclude=names_of(exclude) or (),
        backend=open_backend(backend) if isinstance(backend, str) else backend,
        options=options,
    )


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
    backward, and a third plan if there is time for it. The slowest rank's time counts. The fastest runs, and
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
    given, device = backend, backend.torch_device if backend is not None else device_of(model)
    world = World.join(device, timeout_s=settings.timeout_s, watch=settings)
    with world.opening():
        backend = world.run_on_all(lambda: options.with_sms(backend_for(model, given, device)))
        asked = Asked(sample=sample, plan=plan, modules=modules, exclude=exclude, backend=backend, options=options)
        make = partial(_ready, model, world, ProfileCache())
        return RankHandle(model, make(asked), world=world, asked=asked, make=make)


def _ready(model: nn.Module, world: World, kept: ProfileCache, asked: Asked) -> RankReady:
    """Finds modules, evens out weights, plans, tries, and gives the modules to their ranks; all ranks call it alike."""
    options, laps = asked.options, Laps()
    with laps("find"):
        backend = world.run_on_all(lambda: options.with_sms(backend_for(model, asked.backend, world.device)))
        on = prepare(world, model, asked.sample, backend, modules=asked.modules, exclude=asked.exclude)
        world.check_alike(RankFacts.of(backend.device, on.finding.graph))
        for tensor in (*model.parameters(), *model.buffers()):
            with world.progress.waiting(THE_LOOP, "agreement"):
                dist.broadcast(tensor.detach(), src=0, group=world.carrier_of(tensor))
    with laps("solve"):
        trial = _trial_of(options, is_given=asked.plan is not None)
        candidates = plans_of_first(on, options, trial, kept) if asked.plan is None else _given(asked.plan, on, trial)
    plan, report = candidates.plans[0], TrialReport(sentences=candidates.sentences)
    if trial is not None and len(candidates.plans) > 1:
        with laps("try"):
            plan, measured = try_plans(on, candidates.plans, trial)
        report = replace(measured, sentences=(*measured.sentences, *candidates.sentences))
    with laps("open"):
        world.max_ctas = plan.communication_sms or None
        ready = activate(on, plan, report)
        on.finding.forget_run()
    return replace(ready, setup_ms=laps.ms)


def _trial_of(options: Options, *, is_given: bool) -> TrialSettings | None:
    if isinstance(options.trial, TrialSettings):
        return options.trial
    return RANK_TRIAL if options.trial == "auto" and options.method == "auto" and not is_given else None


def _given(plan: Plan, on: Prepared, trial: TrialSettings | None) -> Candidates:
    """Returns what is tried of a plan that was given: on every rank the same."""
    world, graph = on.world, on.finding.graph
    world.run_on_all(lambda: plan.check_matches(graph=graph, device=on.backend.device))
    world.check_same_plan(plan.fingerprint, plan.num_devices)
    if trial is None:
        return Candidates(plans=(plan,), sentences=("no plan is tried: the one that was given runs",))
    return rank_plans_to_try(plan, graph, trial, communication_slots=plan.communication_slots)
