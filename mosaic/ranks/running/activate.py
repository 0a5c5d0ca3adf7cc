"""Making a plan's modules run on their ranks: what moves, what reduces, and who holds which parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress

import torch

from mosaic.backends.base import Lanes
from mosaic.engine.calls.obstacles import Obstacle
from mosaic.engine.calls.structure import flatten
from mosaic.engine.placing import PlacedPlan
from mosaic.engine.session import warm_up
from mosaic.plan import Plan
from mosaic.profiler import Subject
from mosaic.ranks.calls.executor import RankExecutor
from mosaic.ranks.calls.host import HostRankExecutor
from mosaic.ranks.calls.routed import RoutedModule
from mosaic.ranks.calls.streams import StreamRankExecutor
from mosaic.ranks.parameters.elsewhere import Home, give_up
from mosaic.ranks.parameters.gradients import GradientReducer, sparse_in
from mosaic.ranks.parameters.tied import Holdings, Members, even_out, holdings_of
from mosaic.ranks.rows.sampler import Feed
from mosaic.ranks.running.handle import RankSession
from mosaic.ranks.running.prepare import Prepared
from mosaic.ranks.world.progress import THE_LOOP, Waiting
from mosaic.ranks.world.world import World
from mosaic.take_turns import TrialReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The part of a plan that this rank opens alone."""

    runs: RankExecutor
    """Its lanes."""
    slots: Mapping[str, tuple[int, ...]]
    """Those of each module here; where it does not run, those that it has on the ranks where it does."""

    @property
    def on_streams(self) -> bool:
        return self.runs.lanes.streams is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Activated:
    """A plan that is ready to run on all ranks."""

    placed: PlacedPlan
    """This rank's part of it."""
    holdings: Holdings
    """The ranks that hold each tensor of the model."""
    notes: tuple[str, ...]
    """Lines for ``describe()``."""
    feeds: tuple[Feed, ...]
    """Bytes of modules' rows."""


def open_runs(on: Prepared, plan: Plan, *, is_warm: bool = False) -> Opened:
    """Opens this rank's lanes, which may fail on one rank alone; asks no other rank for anything."""
    rank, finding = on.world.rank, on.finding
    torch.clear_autocast_cache()  # it refers to the parameters that are given up
    slots = {
        placed.module: placed.slots_on(rank) if rank in placed.devices else placed.slots for placed in plan.placements
    }
    lanes = on.backend.open_lanes([*slots.values(), *(placed.slots for placed in plan.placements)])
    try:
        if lanes.streams is not None and not is_warm:
            members = {placed.module: placed.devices for placed in plan.placements}
            own = [subject for subject in finding.subjects if rank in members[subject.name]]
            warm_up(on.model, own, lanes.streams.api)
        return Opened(runs=_executor_on(lanes, on), slots=slots)
    except BaseException:
        lanes.close()
        raise


def _executor_on(lanes: Lanes, on: Prepared) -> RankExecutor:
    if lanes.streams is None:
        return HostRankExecutor(lanes, on.world.progress)
    return StreamRankExecutor(lanes.streams, on.world.progress, in_order=on.finding.in_order)


def place(on: Prepared, plan: Plan, opened: Opened, *, gives_up: bool = True) -> Activated:
    """Gives the modules to their ranks; all ranks call it alike."""
    finding, world = on.finding, on.world
    rank, runs = world.rank, opened.runs
    members = {placed.module: tuple(sorted(placed.devices)) for placed in plan.placements}
    holdings = holdings_of(on.model, finding.subjects, members, finding.users, world.size)
    notes = _notes(holdings, on_streams=opened.on_streams)
    if is_data_parallel(plan):
        _begin_alike(on, runs)
        feeds: tuple[Feed, ...] = ()
        notes.append("all modules run on all ranks: nothing is routed")
    else:
        routed = _routed_modules(on, runs, holdings, members, opened.slots, gives_up=gives_up)
        hooks = [
            even_out(parameter, holders, members)
            for holders, parameters in holdings.tied.items()
            if rank in holders
            for parameter in parameters
        ]
        waiting = partial(runs.progress.waiting, THE_LOOP)
        runs.begin(routed, _shared_reducers(holdings, world, waiting, sparse_in(on.model)), hooks)
        feeds = tuple(_feed(subject, routed[subject.name]) for subject in finding.subjects)
    return Activated(placed=PlacedPlan(plan, finding, runs), holdings=holdings, notes=tuple(notes), feeds=feeds)


def activate(session: RankSession, on: Prepared, plan: Plan, report: TrialReport) -> None:
    """Lets a session run a plan from now on, chosen as the report says; all ranks call it alike."""
    opened = open_runs(on, plan, is_warm=report.has_steps)
    with on.world.groups.lending() as session.loan:
        activated = place(on, plan, opened)
    on.world.groups.destroy_spare()
    session.finding, session.plans, session.report = on.finding, (plan,), report
    session.placed, session.holdings, session.feeds = activated.placed, activated.holdings, activated.feeds
    session.notes = (*report.sentences, *activated.notes, *on.backend.notes)


def is_data_parallel(plan: Plan) -> bool:
    """Returns whether all modules run on all devices, each with these to itself: then no rows have to move."""
    return all(
        len(placed.devices) == plan.num_devices and plan.is_alone(placed.module, num_slots=plan.device.num_slots)
        for placed in plan.placements
    )


def _begin_alike(on: Prepared, runs: RankExecutor) -> None:
    """Has every rank run all modules on its own rows, and sums up the gradients of the whole model."""
    world = on.world
    trained = [parameter for parameter in on.model.parameters() if parameter.requires_grad]
    waiting = partial(runs.progress.waiting, THE_LOOP)
    reducer = GradientReducer(trained, world.group(range(world.size)), waiting=waiting, sparse=sparse_in(on.model))
    reduced = {
        subject.name: sum(p.nbytes for p in subject.module.parameters() if p.requires_grad and world.size > 1)
        for subject in on.finding.subjects
    }
    runs.begin_alike(reducer, reduced)


def _routed_modules(
    on: Prepared,
    runs: RankExecutor,
    holdings: Holdings,
    members: Mapping[str, Members],
    slots: Mapping[str, tuple[int, ...]],
    *,
    gives_up: bool,
) -> dict[str, RoutedModule]:
    """Returns the modules with their communicators, and gives up what this rank does not run."""
    world = on.world
    rank, everyone = world.rank, range(world.size)
    held = holdings.held_by(rank)
    tied = {id(parameter) for group in holdings.tied.values() for parameter in group}
    sparse = sparse_in(on.model)
    routed: dict[str, RoutedModule] = {}
    for subject in on.finding.subjects:
        ranks = members[subject.name]
        group, own = world.group(everyone), world.group(ranks)
        waiting = partial(runs.progress.waiting, subject.name)
        template, learned = on.learned[subject.name]
        if learned.obstacle is None and any(id(p) in tied for p in subject.module.parameters()):
            tied_to_others = Obstacle("it has parameters in common with others, which add to one gradient")
            learned = replace(learned, obstacle=tied_to_others)
        trained = [p for p in subject.module.parameters() if p.requires_grad and id(p) not in tied]
        routed[subject.name] = RoutedModule(
            name=subject.name,
            module=subject.module,
            members=ranks,
            group=group,
            sample=(subject.args, subject.kwargs),
            template=template,
            learned=learned,
            awaited=on.finding.in_order.get(subject.name),
            compute=runs.compute(subject.name, slots[subject.name]),
            reducer=(
                GradientReducer(trained, own, waiting=waiting, place=runs.place(slots[subject.name]), sparse=sparse)
                if rank in ranks and trained
                else None
            ),
            traffic=runs.traffic,
            waiting=waiting,
            control=world.agreements if runs.lanes.streams is not None else group,
            batched=on.batched[subject.name],
        )
        if rank not in ranks and gives_up:
            give_up(subject.module, Home(subject.name, ranks), keep=held)
    return routed


def _feed(subject: Subject, routed: RoutedModule) -> Feed:
    """Returns what a module's rows weigh that travel; those that take a gradient go both ways."""
    leaves = flatten((subject.args, subject.kwargs))[0]
    argument_bytes = sum(leaf.nbytes * (1 + leaf.requires_grad) for leaf in compress(leaves, routed.batched))
    template = routed.template
    result_bytes = sum(
        leaf.nbytes * (1 + trains)
        for leaf, trains in zip(template.leaves, template.differentiable, strict=True)
        if isinstance(leaf, torch.Tensor)
    )
    return Feed(members=routed.members, step_bytes=float(argument_bytes + result_bytes))


def _shared_reducers(
    holdings: Holdings, world: World, waiting: Waiting, sparse: frozenset[int]
) -> list[GradientReducer]:
    """Returns what reduces this rank's part of all that is not one module's own, in the same order on all ranks."""
    reduce = partial(GradientReducer, overlaps=False, waiting=waiting, sparse=sparse)
    reducers = []
    if holdings.loose:
        reducers.append(reduce(holdings.loose, world.group(range(world.size))))
    for holders, parameters in holdings.tied.items():
        group = world.group(holders)
        if world.rank in holders:
            # A part of a gradient is there when the first of its users is through; all are at the end.
            reducers.append(reduce(parameters, group))
    return reducers


def _notes(holdings: Holdings, *, on_streams: bool) -> list[str]:
    notes = []
    if on_streams:
        notes.append(
            "GPUs over several ranks were tested on a stand-in for CUDA, with gloo for NCCL; this has not run on "
            "several GPUs"
        )
    if holdings.names_of_tied:
        notes.append(
            f"{', '.join(holdings.names_of_tied)}: used by more than one module, or between modules too; on every "
            "rank that runs a user, and reduced at the end of each backward"
        )
    return notes
