"""``mosaic.colocate`` on several ranks: one plan for all of them, each with its part of the modules."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from mosaic.backends.base import Backend
from mosaic.backends.host.backend import HostBackend, available_cores
from mosaic.engine.calls.structure import map_tensors
from mosaic.engine.finding.find import Finding, Sample, find_modules
from mosaic.engine.profiled import IfBusy, falls_back
from mosaic.engine.trial.settings import TrialSettings
from mosaic.errors import InvalidPlanError, UnsupportedModelError
from mosaic.plan import Plan
from mosaic.profile import Profile
from mosaic.profiler import ProfileSettings, Subject
from mosaic.ranks.choosing.candidates import RANK_TRIAL, Candidates, plans_to_try
from mosaic.ranks.choosing.planning import PlanRequest, plans_of_first
from mosaic.ranks.choosing.rank_trial import TrialSubject, try_plans
from mosaic.ranks.meeting.devices import check_place, device_of, own_gpu
from mosaic.ranks.meeting.progress import OUTSIDE
from mosaic.ranks.meeting.watch import WatchSettings
from mosaic.ranks.meeting.world import TIMEOUT_S, RankFacts, World
from mosaic.ranks.rows.batched import with_batch
from mosaic.ranks.running.activate import Examined, activate, examine
from mosaic.ranks.running.handle import RankHandle
from mosaic.ranks.running.tried import Tried
from mosaic.solver.reserve import CommunicationSlots
from mosaic.solver.runnable import check_method


def colocate_ranks(
    model: nn.Module,
    *,
    sample: Sample,
    modules: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    plan: Plan | None = None,
    method: str = "auto",
    profile: Profile | None = None,
    settings: ProfileSettings | None = None,
    if_busy: IfBusy = "plain",
    backend: Backend | None = None,
    timeout_s: float = TIMEOUT_S,
    watch: WatchSettings | None = None,
    communication_slots: CommunicationSlots = 0,
    direct: bool = True,
    trial: TrialSettings | Literal["auto"] | None = "auto",
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

    Args:
        model: The same model on every rank.
        sample: One batch as a rank gets it, of the same shapes on every rank.
        modules: Names or patterns of the modules to place; found by default.
        exclude: Names or patterns of modules to leave where they are.
        plan: A plan for as many devices as there are ranks: device i is rank i.
        method: Who plans where no plan is given: a solver, or a planner that Mosaic is compared with (``RUNNABLE``).
        profile: Measurements for rank 0 to plan from, of the batch of all ranks together. The links between ranks are
            measured in any case; sums of gradients take as long as it says. It knows no optimizer: a plan leaves room
            for AdamW's two moments in 32 bits, 8 bytes for each parameter that trains, on each of a module's ranks.
        settings: How carefully rank 0 profiles.
        if_busy: What to do where rank 0's machine is too busy to profile on: ``plain`` logs a warning there and trains
            data-parallel on all ranks, with the reason in ``describe()`` on each; ``raise`` raises on all. A method
            that is named raises in any case.
        backend: Where this rank runs; by default the GPU that is this rank's (``LOCAL_RANK``) where the model is on
            one, which is made the current one, and else its share of the host's cores.
        timeout_s: How long a rank waits for the others in a step, and for them to come at the start.
        watch: How ranks watch each other for one that is killed, fails or leaves.
        communication_slots: Where no plan is given: slots of each device that no module gets, so that collectives do
            not take theirs, or ``remainder``: the SMs that are no slot's. NCCL is held to as many CTAs; a plan that is
            given says itself what it reserves.
        direct: Let a result that goes into another module as it is, and nowhere else in the sample's step, go straight
            to that module's ranks where this sends less. A loop that uses it otherwise later on gets an error. On GPUs
            all results go home so far, and ``describe()`` says which could go straight.
        trial: How to try plans; ``auto`` is ``RANK_TRIAL`` where Mosaic solves the plan, and None, for no trial, where
            it is given or made by a method that is named. With settings those are tried, too.

    Raises:
        BackendUnavailableError: The ranks differ in device, versions or model; names them. Or a rank's model is not
            where that rank runs.
        InvalidPlanError: The ranks have different plans, or one for another number of ranks.
        ValueError: A plan and a method were given, or there is no such method.
        UnsupportedModelError: A module cannot be split over ranks; says why and what to do.
        UnstableMeasurementError: Rank 0 is too busy to profile, and ``if_busy`` or a named method forbids to go on
            without; on other ranks a MosaicError that names it.
        RankFailedError: Another rank has failed; names it.
    """
    check_method(method, plan)
    may_fall_back = falls_back(if_busy, method)
    device = backend.torch_device if backend is not None else device_of(model)
    world = World.join(device, timeout_s=timeout_s, watch=watch or WatchSettings())
    with world.opening():
        backend, error = _backend_of(model, backend, device)
        world.all_or_none(error)
        assert backend is not None
        finding, error = found_for_ranks(model, sample, modules, exclude)
        world.all_or_none(error)
        assert finding is not None
        examined, error = examined_for_ranks(model, finding, sample)
        world.all_or_none(error)
        assert examined is not None
        world.check_alike(RankFacts.of(backend.device, finding.graph.fingerprint))
        for tensor in (*model.parameters(), *model.buffers()):
            with world.progress.waiting(OUTSIDE, "agreement"):
                dist.broadcast(tensor.detach(), src=0, group=world.carrier_of(tensor))
        settled = _settled(trial, solves=plan is None and method == "auto")
        if plan is None:
            request = PlanRequest(
                method=method,
                profile=profile,
                settings=settings,
                communication_slots=communication_slots,
                trial=settled,
                direct=direct,
                may_fall_back=may_fall_back,
            )
            candidates = plans_of_first(world, model, finding, examined, backend, request)
        else:
            error = _mismatch(plan, finding, backend)
            world.all_or_none(error)
            world.check_same_plan(plan.fingerprint, plan.num_devices)
            candidates = _with_given(plan, finding, settled)
        plan, tried = candidates.plans[0], Tried(candidates.sentences)
        if settled is not None and len(candidates.plans) > 1:
            subject = TrialSubject(model=model, sample=sample, finding=finding, examined=examined, direct=direct)
            plan, measured = try_plans(subject, candidates.plans, settled, world, backend)
            tried = replace(measured, sentences=(*measured.sentences, *candidates.sentences))
        world.check_same_plan(plan.fingerprint, plan.num_devices)
        world.max_ctas = plan.communication_sms or None
        return activate(model, finding, plan, world, backend, examined, direct=direct, tried=tried)


def _settled(trial: TrialSettings | Literal["auto"] | None, *, solves: bool) -> TrialSettings | None:
    if isinstance(trial, TrialSettings):
        return trial
    return RANK_TRIAL if trial == "auto" and solves else None


def _with_given(plan: Plan, finding: Finding, trial: TrialSettings | None) -> Candidates:
    """Returns what is tried of a plan that was given: on every rank the same."""
    if trial is None:
        return Candidates(plans=(plan,), sentences=("no plan is tried: the one that was given runs",))
    slots: CommunicationSlots = plan.communication_slots or ("remainder" if plan.communication_sms else 0)
    return plans_to_try(plan, finding.graph, trial, communication_slots=slots)


def cores_of_rank() -> tuple[int, ...]:
    """Returns this rank's share of the cores of its machine: at least one, which ranks may then have in common."""
    cores = available_cores()
    rank, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    each = max(1, len(cores) // ranks)
    start = (rank * each) % len(cores)
    return cores[start : start + each]


def found_for_ranks(
    model: nn.Module, sample: Sample, modules: Sequence[str] | None = None, exclude: Sequence[str] = ()
) -> tuple[Finding | None, BaseException | None]:
    """Finds modules; what they share with others is no obstacle here."""
    try:
        finding = find_modules(model, sample, include=modules, exclude=exclude, may_share=True)
        finding = replace(finding, subjects=tuple(map(_cut, finding.subjects)))
        for subject in finding.subjects:
            _refuse(subject)
        finding = replace(finding, subjects=tuple(with_batch(model, subject) for subject in finding.subjects))
    except Exception as error:  # of any kind, from the user's model: all ranks have to hear of it
        return None, error
    return finding, None


def _backend_of(
    model: nn.Module, backend: Backend | None, device: torch.device
) -> tuple[Backend | None, BaseException | None]:
    """Returns where this rank runs, once its model is seen to be there; or why it cannot, for all ranks to hear."""
    try:
        if backend is None and device.type == "cuda":
            from mosaic.backends.cuda.driver import CudaBackend

            backend = CudaBackend(own_gpu())
            torch.cuda.set_device(backend.torch_device)
        backend = backend or HostBackend(cores=cores_of_rank())
        check_place(model, backend.torch_device)
    except Exception as error:  # of any kind: all ranks have to hear of it
        return None, error
    return backend, None


def examined_for_ranks(
    model: nn.Module, finding: Finding, sample: Sample
) -> tuple[Examined | None, BaseException | None]:
    """Returns what ``examine`` does, or its error, for all ranks to hear of it."""
    try:
        return examine(model, finding, sample), None
    except Exception as error:  # as above
        return None, error


def _cut(subject: Subject) -> Subject:
    """Cuts a module's inputs from the graph of the sample's step, which holds on to the parameters of others."""

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().requires_grad_(tensor.requires_grad)

    return replace(subject, args=map_tensors(cut, subject.args), kwargs=map_tensors(cut, subject.kwargs))


def _refuse(subject: Subject) -> None:
    for path, part in subject.module.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.track_running_stats:
            raise UnsupportedModelError(
                f"{subject.name}{'.' if path else ''}{path} is a {type(part).__name__}: its statistics would be those "
                "of another batch than without Mosaic; use GroupNorm or LayerNorm, or leave the module where it is "
                f"called: colocate(..., exclude=[{subject.name!r}])"
            )


def _mismatch(plan: Plan, finding: Finding, backend: Backend) -> InvalidPlanError | None:
    try:
        plan.check_matches(graph=finding.graph, device=backend.device)
    except InvalidPlanError as error:
        return error
    return None
