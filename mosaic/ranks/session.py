"""A session on one of several ranks: what is found, and a plan's modules put on their ranks; all ranks do the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn

from mosaic.engine.calls.obstacles import Obstacle
from mosaic.engine.calls.signature import Arguments, Signature, learn
from mosaic.engine.finding.find import Finding, Sample, find_modules
from mosaic.engine.placing import PlacedPlan
from mosaic.engine.session import Session, refuse, refuse_graphs_of_compiler, warm_up
from mosaic.errors import UnsupportedModelError
from mosaic.find.restore import preserved
from mosaic.find.structure import flatten, map_tensors, version_of
from mosaic.plan import Placement, Plan
from mosaic.profiler import Subject
from mosaic.ranks.calls.executor import RankExecutor
from mosaic.ranks.calls.host import HostRankExecutor
from mosaic.ranks.calls.routed import RoutedModule, Template
from mosaic.ranks.calls.streams import StreamRankExecutor
from mosaic.ranks.parameters.elsewhere import Home, give_up
from mosaic.ranks.parameters.gradients import GradientReducer, refuse_sparse
from mosaic.ranks.parameters.tied import Holdings, Members, even_out, holdings_of
from mosaic.ranks.rows.batched import rows_of
from mosaic.ranks.world.progress import THE_LOOP
from mosaic.ranks.world.world import World, facts_of
from mosaic.take_turns import TrialReport, TrialSettings

RANK_TRIAL = TrialSettings(
    max_steps=60, max_lost_steps=30, steps_per_visit=2, warm_steps=1, rounds_to_win=5, max_plans=2
)
"""The default trial: short turns, and so many that one slow moment of the machine decides nothing."""


class RankPlan(PlacedPlan):
    """A plan that is ready to run on all ranks."""

    executor: RankExecutor
    holdings: Holdings
    notes: tuple[str, ...]
    """Lines for ``describe()``."""


@dataclass(slots=True, kw_only=True)
class RankSession(Session):
    """A session on one of several ranks."""

    world: World
    batched: Mapping[str, tuple[bool, ...]] = field(init=False)
    """For each module, which of its arguments have a row for each sample."""
    learned: Mapping[str, tuple[Template, Signature]] = field(init=False)
    """For each module its result, and what its call showed."""
    statistics: Sequence[str] = field(init=False)
    """Buffers outside of placed modules that the sample's step writes: after each backward they are rank 0's."""
    placed: RankPlan = field(init=False)
    report: TrialReport = field(init=False)
    """Of the plans that were tried."""

    def find(self) -> None:
        """Finds the modules and examines their calls, and gives all ranks rank 0's weights."""
        world, model = self.world, self.model
        world.run_on_all(self._find_here)
        world.check_alike(facts_of(self.request.backend.device, self.finding.graph))
        world.share_values((*model.parameters(), *model.buffers()))

    def _find_here(self) -> None:
        request, backend = self.request, self.request.backend
        refuse(self.model, backend)
        refuse_sparse(self.model)
        before = {name: version_of(buffer) for name, buffer in self.model.named_buffers()}
        self.finding, self.batched = find_with_rows(self.model, request.sample, request.modules, request.exclude)
        inside = {id(each) for subject in self.finding.subjects for each in subject.module.buffers()}
        outside = [(name, each) for name, each in self.model.named_buffers() if id(each) not in inside]
        self.statistics = [name for name, each in outside if version_of(each) != before.get(name)]
        refuse_graphs_of_compiler(self.finding, backend)
        self.learned = {subject.name: self._learn(subject) for subject in self.finding.subjects}

    def _learn(self, subject: Subject) -> tuple[Template, Signature]:
        """Calls a module as in the sample's step."""
        settings = subject.settings if subject.settings is not None else nullcontext
        with preserved(self.model, alone=(subject,)), torch.enable_grad(), settings():
            arguments = Arguments.take(subject.args, subject.kwargs)
            call = learn(lambda: subject.module(*subject.args, **subject.kwargs), arguments, subject.module)
        return Template.of(call[0]), call[2]

    @property
    def trial_settings(self) -> TrialSettings | None:
        """The bounds of the trial; None where the plan runs untried."""
        trial, options = self.request.options.trial, self.request.options
        if trial != "auto":
            return trial
        return RANK_TRIAL if self.request.plan is None and options.method == "auto" else None


def find_with_rows(
    model: nn.Module, sample: Sample, modules: Sequence[str] | None = None, exclude: Sequence[str] = ()
) -> tuple[Finding, dict[str, tuple[bool, ...]]]:
    """Returns the modules, which may share something, and which arguments of each have a row for each sample."""
    finding = find_modules(model, sample, include=modules, exclude=exclude, may_share=True)
    subjects, batched = [], {}
    for subject in finding.subjects:
        _refuse(subject, finding.local.get(subject.name))
        # Without the graph of the sample's step, which holds on to the parameters of others.
        args, kwargs = map_tensors(lambda t: t.detach().requires_grad_(t.requires_grad), (subject.args, subject.kwargs))
        subject = replace(subject, args=args, kwargs=kwargs)
        rows = batched[subject.name] = rows_of(subject)
        subjects.append(replace(subject, batch=len(flatten((args, kwargs))[0][rows.index(True)])))
    return replace(finding, subjects=tuple(subjects)), batched


def _refuse(subject: Subject, obstacle: Obstacle | None) -> None:
    if obstacle is not None:
        raise UnsupportedModelError(
            f"{subject.name!r} cannot run on another rank than the one that calls it: {obstacle}; {obstacle.remedy}. "
            f"colocate(..., exclude=[{subject.name!r}]) leaves it where it is called"
        )
    for path, part in subject.module.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.track_running_stats:
            raise UnsupportedModelError(
                f"{subject.name}{'.' if path else ''}{path} is a {type(part).__name__}: its statistics would be those "
                "of another batch than without Mosaic; use GroupNorm or LayerNorm, or leave the module where it is "
                f"called: colocate(..., exclude=[{subject.name!r}])"
            )


def open_executor(session: RankSession, plan: Plan, *, is_warm: bool = False) -> RankExecutor:
    """Opens this rank's lanes, which may fail on one rank alone; exchanges nothing with other ranks."""
    finding, progress = session.finding, session.world.progress
    torch.clear_autocast_cache()  # it refers to the parameters that are given up
    slots = [_slots_here(placed, session.world.rank) for placed in plan.placements]
    lanes = session.request.backend.open_lanes([*slots, *(placed.slots for placed in plan.placements)])
    try:
        if lanes.streams is None:
            return HostRankExecutor(lanes, progress)
        if not is_warm:
            here = {placed.module for placed in plan.placements if session.world.rank in placed.devices}
            here -= finding.in_place.keys()
            warm_up(session.model, [s for s in finding.subjects if s.name in here], lanes.streams.api)
        return StreamRankExecutor(lanes.streams, progress)
    except BaseException:
        lanes.close()
        raise


def place(session: RankSession, plan: Plan, executor: RankExecutor, *, gives_up: bool = True) -> RankPlan:
    """Gives the modules to their ranks; all ranks call it alike."""
    finding, world = session.finding, session.world
    members = {placed.module: tuple(sorted(placed.devices)) for placed in plan.placements}
    placed = RankPlan(plan, finding, executor)
    placed.holdings = holdings_of(session.model, finding.subjects, members, finding.users, world.size)
    executor.backward_ended = lambda: world.share_values(map(session.model.get_buffer, session.statistics))
    notes = []
    if executor.lanes.streams is not None:
        notes.append(
            "GPUs over several ranks were tested on a stand-in for CUDA, with gloo for NCCL; this has not run on "
            "several GPUs"
        )
    if placed.holdings.names_of_tied:
        notes.append(
            f"{', '.join(placed.holdings.names_of_tied)}: used by more than one module, or between modules too; on "
            "every rank that runs a user, and reduced at the end of each backward"
        )
    if is_data_parallel(plan):
        notes.append("all modules run on all ranks: nothing is routed")
        _begin_alike(session, executor)
    else:
        _begin_routed(session, plan, executor, placed.holdings, members, gives_up=gives_up)
    placed.notes = tuple(notes)
    return placed


def is_data_parallel(plan: Plan) -> bool:
    """Returns whether all modules run on all devices, each with these to itself: then no rows have to move."""
    return all(len(placed.devices) == plan.num_devices and plan.is_alone(placed.module) for placed in plan.placements)


def _slots_here(placed: Placement, rank: int) -> tuple[int, ...]:
    """Returns the slots of a module on a rank; where it does not run, those on the ranks where it does."""
    return placed.slots_on(rank) if rank in placed.devices else placed.slots


def _begin_alike(session: RankSession, executor: RankExecutor) -> None:
    """Has every rank run all modules on its own rows, and sums up the gradients of the whole model.

    DistributedDataParallel would sum them once a forward: where a loop calls the model twice and then runs two
    backwards, the second one's gradients stay this rank's own. This reducer sums after each backward.
    """
    world, model = session.world, session.model
    waiting = partial(executor.progress.waiting, THE_LOOP)
    reducer = GradientReducer(model.parameters(), world.group(range(world.size)), waiting=waiting)
    unrouted_bytes = {
        subject.name: sum(p.nbytes for p in subject.module.parameters() if p.requires_grad and world.size > 1)
        for subject in session.finding.subjects
    }
    executor.begin({}, [reducer], unrouted_bytes=unrouted_bytes)


def _begin_routed(
    session: RankSession,
    plan: Plan,
    executor: RankExecutor,
    holdings: Holdings,
    members: Mapping[str, Members],
    *,
    gives_up: bool,
) -> None:
    """Makes the modules with their communicators and reducers, and gives up what this rank does not run."""
    world, finding = session.world, session.finding
    rank, everyone = world.rank, range(world.size)
    slots = {placed.module: _slots_here(placed, rank) for placed in plan.placements}
    held = {key for key, holders in holdings.by_id.items() if rank in holders}
    tied = {id(parameter) for parameters in holdings.tied.values() for parameter in parameters}
    routed: dict[str, RoutedModule] = {}
    for subject in finding.subjects:
        name, ranks = subject.name, members[subject.name]
        group, own = world.group(everyone), world.group(ranks)
        template, learned = session.learned[name]
        if learned.obstacle is None and any(id(p) in tied for p in subject.module.parameters()):
            obstacle = Obstacle("it has parameters in common with others, which add to one gradient")
            learned = replace(learned, obstacle=obstacle)
        trained = [p for p in subject.module.parameters() if p.requires_grad and id(p) not in tied]
        reducer = None
        if rank in ranks and trained:
            waiting = partial(executor.progress.waiting, name)
            reducer = GradientReducer(trained, own, waiting=waiting, place=executor.place(slots[name]))
        routed[name] = RoutedModule(
            subject=subject,
            members=ranks,
            slots=slots[name],
            progress=executor.progress,
            sent_bytes=executor.sent_bytes,
            group=group,
            control=world.agreements if executor.lanes.streams is not None else group,
            batched=session.batched[name],
            template=template,
            learned=learned,
            reducer=reducer,
        )
        if rank not in ranks and gives_up:
            give_up(subject.module, Home(name, ranks), keep=held)
    reduce = partial(GradientReducer, overlaps=False, waiting=partial(executor.progress.waiting, THE_LOOP))
    reducers, hooks = [reduce(holdings.loose, world.group(everyone))] if holdings.loose else [], []
    for holders, parameters in holdings.tied.items():  # in the same order on all ranks
        group = world.group(holders)
        if rank in holders:
            hooks += [even_out(parameter, holders, members) for parameter in parameters]
            # A part of a gradient is there when the first of its users is through; all are at the end.
            reducers.append(reduce(parameters, group))
    executor.begin(routed, reducers, hooks)
