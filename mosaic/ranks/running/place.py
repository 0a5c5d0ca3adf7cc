"""Putting a plan's modules on their ranks: what moves, what reduces, and who holds which parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import compress

import torch

from mosaic.engine.calls.obstacles import Obstacle
from mosaic.engine.session import warm_up
from mosaic.find.structure import flatten
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
from mosaic.ranks.session import RankPlan, RankSession
from mosaic.ranks.world.progress import THE_LOOP


def open_executor(session: RankSession, plan: Plan, *, is_warm: bool = False) -> RankExecutor:
    """Opens this rank's lanes, which may fail on one rank alone; exchanges nothing with other ranks."""
    finding, progress = session.finding, session.world.progress
    torch.clear_autocast_cache()  # it refers to the parameters that are given up
    slots = _slots_here(plan, session.world.rank).values()
    lanes = session.request.backend.open_lanes([*slots, *(placed.slots for placed in plan.placements)])
    try:
        if lanes.streams is None:
            return HostRankExecutor(lanes, progress)
        if not is_warm:
            here = {placed.module for placed in plan.placements if session.world.rank in placed.devices}
            warm_up(session.model, [s for s in finding.subjects if s.name in here], lanes.streams.api)
        return StreamRankExecutor(lanes.streams, progress, in_order=finding.in_order)
    except BaseException:
        lanes.close()
        raise


def place(session: RankSession, plan: Plan, executor: RankExecutor, *, gives_up: bool = True) -> RankPlan:
    """Gives the modules to their ranks; all ranks call it alike."""
    finding, world = session.finding, session.world
    members = {placed.module: tuple(sorted(placed.devices)) for placed in plan.placements}
    placed = RankPlan(plan, finding, executor)
    placed.holdings = holdings_of(session.model, finding.subjects, members, finding.users, world.size)
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
        placed.feeds = ()
        _begin_alike(session, executor)
    else:
        placed.feeds = _begin_routed(session, plan, executor, placed.holdings, members, gives_up=gives_up)
    placed.notes = tuple(notes)
    return placed


def is_data_parallel(plan: Plan) -> bool:
    """Returns whether all modules run on all devices, each with these to itself: then no rows have to move."""
    return all(
        len(placed.devices) == plan.num_devices and plan.is_alone(placed.module, num_slots=plan.device.num_slots)
        for placed in plan.placements
    )


def _slots_here(plan: Plan, rank: int) -> dict[str, tuple[int, ...]]:
    """Returns the slots of each module on a rank; where it does not run, those on the ranks where it does."""
    return {
        placed.module: placed.slots_on(rank) if rank in placed.devices else placed.slots for placed in plan.placements
    }


def _begin_alike(session: RankSession, executor: RankExecutor) -> None:
    """Has every rank run all modules on its own rows, and sums up the gradients of the whole model.

    DistributedDataParallel would sum them once a forward: where a loop calls the model twice and then runs two
    backwards, the second one's gradients stay this rank's own. This reducer sums after each backward.
    """
    world, model = session.world, session.model
    waiting = partial(executor.progress.waiting, THE_LOOP)
    reducer = GradientReducer(
        model.parameters(), world.group(range(world.size)), waiting=waiting, sparse=sparse_in(model)
    )
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
) -> tuple[Feed, ...]:
    """Makes the modules with their communicators and reducers, and gives up what this rank does not run."""
    world, finding, sparse = session.world, session.finding, sparse_in(session.model)
    rank, everyone = world.rank, range(world.size)
    slots = _slots_here(plan, rank)
    held = {key for key, holders in holdings.by_id.items() if rank in holders}
    tied = {id(parameter) for parameters in holdings.tied.values() for parameter in parameters}
    routed: dict[str, RoutedModule] = {}
    for subject in finding.subjects:
        name, ranks = subject.name, members[subject.name]
        group, own = world.group(everyone), world.group(ranks)
        template, learned = session.learned[name]
        if learned.obstacle is None and any(id(p) in tied for p in subject.module.parameters()):
            tied_to_others = Obstacle("it has parameters in common with others, which add to one gradient")
            learned = replace(learned, obstacle=tied_to_others)
        trained = [p for p in subject.module.parameters() if p.requires_grad and id(p) not in tied]
        reducer = None
        if rank in ranks and trained:
            waiting = partial(executor.progress.waiting, name)
            reducer = GradientReducer(trained, own, waiting=waiting, place=executor.place(slots[name]), sparse=sparse)
        routed[name] = RoutedModule(
            name=name,
            module=subject.module,
            members=ranks,
            slots=slots[name],
            progress=executor.progress,
            traffic=executor.traffic,
            group=group,
            control=world.agreements if executor.lanes.streams is not None else group,
            sample=(subject.args, subject.kwargs),
            batched=session.batched[name],
            template=template,
            learned=learned,
            awaited=finding.in_order.get(name),
            reducer=reducer,
        )
        if rank not in ranks and gives_up:
            give_up(subject.module, Home(name, ranks), keep=held)
    hooks = [
        even_out(parameter, holders, members)
        for holders, parameters in holdings.tied.items()
        if rank in holders
        for parameter in parameters
    ]
    reduce = partial(
        GradientReducer, overlaps=False, waiting=partial(executor.progress.waiting, THE_LOOP), sparse=sparse
    )
    reducers = [reduce(holdings.loose, world.group(everyone))] if holdings.loose else []
    for holders, parameters in holdings.tied.items():  # in the same order on all ranks
        group = world.group(holders)
        if rank in holders:
            # A part of a gradient is there when the first of its users is through; all are at the end.
            reducers.append(reduce(parameters, group))
    executor.begin(routed, reducers, hooks)
    return tuple(_feed(subject, routed[subject.name]) for subject in finding.subjects)


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
