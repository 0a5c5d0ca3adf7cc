"""Making a plan's modules run on their ranks: what moves, what reduces, and who holds which parameters."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from mosaic.backends.base import Backend
from mosaic.backends.streams.lanes import StreamLanes
from mosaic.engine.calls.signature import Arguments, Signature, learn
from mosaic.engine.calls.structure import flatten
from mosaic.engine.finding.find import Finding, Sample
from mosaic.engine.finding.handovers import Handover
from mosaic.engine.finding.users import users_of
from mosaic.engine.placing import PlacedPlan
from mosaic.engine.streams.first_calls import warm_up
from mosaic.plan import Plan
from mosaic.profiler import Subject, preserved
from mosaic.ranks.calls.handing import hand_over, handed_straight, stops_of
from mosaic.ranks.calls.ranked import Ranked, Template
from mosaic.ranks.calls.run import RankedRuns
from mosaic.ranks.meeting.progress import OUTSIDE, Waiting
from mosaic.ranks.meeting.world import World
from mosaic.ranks.parameters.ownership import GivenUp, give_up
from mosaic.ranks.parameters.reduce import GradientReducer
from mosaic.ranks.parameters.tied import Holdings, Members, even_out, holdings_of, marked
from mosaic.ranks.rows.batched import rows_of
from mosaic.ranks.rows.sampler import Feed
from mosaic.ranks.rows.ways import Ways
from mosaic.ranks.running.handle import RankHandle
from mosaic.ranks.running.tried import Tried


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """What a model's own runs on the sample showed, beyond its modules."""

    users: Mapping[int, frozenset[str | None]]
    """Who uses which parameter or buffer."""
    batched: Mapping[str, tuple[bool, ...]]
    """For each module, which of its arguments have a row for each sample."""
    learned: Mapping[str, tuple[Template, Signature]]
    """What each module returns, and what its call showed of it."""


def examine(model: nn.Module, finding: Finding, sample: Sample) -> Examined:
    """Runs the model and its modules on the sample.

    Raises:
        UnsupportedModelError: A module cannot be split over ranks.
    """
    return Examined(
        users=users_of(model, finding.subjects, sample),
        batched={subject.name: rows_of(model, subject) for subject in finding.subjects},
        learned={subject.name: _learned(model, subject) for subject in finding.subjects},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """What a plan needs of this rank alone."""

    runs: RankedRuns
    """Its lanes."""
    slots: Mapping[str, tuple[int, ...]]
    """Those of each module here; where it does not run, those that it has on the ranks where it does."""

    @property
    def on_streams(self) -> bool:
        """Whether its lanes are a GPU's."""
        return isinstance(self.runs.lanes, StreamLanes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Activated:
    """A plan that is ready to run on all ranks."""

    placed: PlacedPlan
    """This rank's part of it."""
    holdings: Holdings
    """Which ranks hold which tensors of the model."""
    notes: tuple[str, ...]
    """What ``describe()`` says of it."""
    feeds: tuple[Feed, ...]
    """What modules' rows weigh."""


def open_runs(
    model: nn.Module, finding: Finding, plan: Plan, world: World, backend: Backend, *, is_warm: bool = False
) -> Opened:
    """Opens this rank's lanes, which may fail on one rank alone; asks no other rank for anything.

    Args:
        model: The model.
        finding: Its modules.
        plan: Where they run.
        world: The ranks.
        backend: Where this rank runs.
        is_warm: Whether the modules have run on this rank's lanes before.
    """
    torch.clear_autocast_cache()  # it refers to the parameters that are given up
    slots = {
        placed.module: placed.slots_on(world.rank) if world.rank in placed.devices else placed.slots
        for placed in plan.placements
    }
    lanes = backend.open_lanes([*slots.values(), *(placed.slots for placed in plan.placements)])
    try:
        if isinstance(lanes, StreamLanes) and not is_warm:
            members = {placed.module: placed.devices for placed in plan.placements}
            warm_up(model, [subject for subject in finding.subjects if world.rank in members[subject.name]], lanes)
        return Opened(runs=RankedRuns(lanes, world.progress, in_order=finding.in_order), slots=slots)
    except BaseException:
        lanes.close()
        raise


def place(
    model: nn.Module,
    finding: Finding,
    plan: Plan,
    world: World,
    examined: Examined,
    opened: Opened,
    *,
    direct: bool = True,
    gives_up: bool = True,
) -> Activated:
    """Gives the modules to their ranks; all ranks call it alike.

    Args:
        model: The model.
        finding: Its modules.
        plan: Where they run.
        world: The ranks.
        examined: What the sample showed beyond the modules.
        opened: This rank's lanes for the plan.
        direct: Whether results may go from one module's ranks straight to another's; on streams none do so far.
        gives_up: Whether to free what this rank does not need; not where the plan is only tried.
    """
    rank, runs = world.rank, opened.runs
    members = {placed.module: tuple(sorted(placed.devices)) for placed in plan.placements}
    holdings = holdings_of(model, finding.subjects, members, examined.users, world.size)
    notes = _notes(holdings, on_streams=opened.on_streams)
    if is_data_parallel(plan):
        _begin_alike(model, finding, world, runs)
        feeds: tuple[Feed, ...] = ()
        notes.append("all modules run on all ranks: nothing is routed")
    else:
        ranked = _ranked_modules(finding, world, runs, examined, holdings, members, opened.slots, gives_up=gives_up)
        is_straight = direct and not opened.on_streams
        handed, ways = _handed(finding, members, examined, world) if is_straight else ((), Ways({}))
        hand_over(ranked, handed, ways)
        hooks = [
            even_out(parameter, holders, members)
            for holders, parameters in holdings.tied.items()
            if rank in holders
            for parameter in parameters
        ]
        runs.begin(ranked, _shared_reducers(holdings, world, partial(runs.progress.waiting, OUTSIDE)), hooks)
        feeds = tuple(_feed(subject, ranked[subject.name], examined) for subject in finding.subjects)
        straight = (f"results of {one.source} go straight to the ranks of {one.target}, not home" for one in handed)
        notes += dict.fromkeys(straight)
        notes += _homeward(finding) if direct and opened.on_streams else ()
    return Activated(placed=PlacedPlan(plan, finding, runs), holdings=holdings, notes=tuple(notes), feeds=feeds)


def activate(
    model: nn.Module,
    finding: Finding,
    plan: Plan,
    world: World,
    backend: Backend,
    examined: Examined,
    *,
    direct: bool = True,
    tried: Tried,
) -> RankHandle:
    """Runs a model under a plan from now on; all ranks call it alike. See ``place``.

    Args:
        model: The model.
        finding: Its modules.
        plan: Where they run.
        world: The ranks.
        backend: Where this rank runs.
        examined: What the sample showed beyond the modules.
        direct: Whether results may go straight.
        tried: What was tried before this plan was chosen.
    """
    opened = open_runs(model, finding, plan, world, backend, is_warm=tried.ran)
    found = place(model, finding, plan, world, examined, opened, direct=direct)
    world.groups.destroy_spare()
    return RankHandle(
        model,
        finding,
        plan,
        profile=None,
        notes=(*found.notes, *backend.notes),
        placed=found.placed,
        world=world,
        holdings=found.holdings,
        feeds=found.feeds,
        tried=tried,
    )


def is_data_parallel(plan: Plan) -> bool:
    """Whether all modules run on all devices, each with these to itself: then no rows have to move."""
    return all(
        len(placed.devices) == plan.num_devices and plan.is_alone(placed.module, num_slots=plan.device.num_slots)
        for placed in plan.placements
    )


def _begin_alike(model: nn.Module, finding: Finding, world: World, runs: RankedRuns) -> None:
    """Has every rank run all modules on its own rows, and sums up the gradients of the whole model."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    waiting = partial(runs.progress.waiting, OUTSIDE)
    reducer = GradientReducer(trained, world.group(range(world.size)), waiting=waiting)
    reduced = {
        subject.name: sum(p.nbytes for p in subject.module.parameters() if p.requires_grad and world.size > 1)
        for subject in finding.subjects
    }
    runs.begin_alike(reducer, reduced)


def _ranked_modules(
    finding: Finding,
    world: World,
    runs: RankedRuns,
    examined: Examined,
    holdings: Holdings,
    members: Mapping[str, Members],
    slots: Mapping[str, tuple[int, ...]],
    *,
    gives_up: bool,
) -> dict[str, Ranked]:
    """Returns the modules with their communicators, and gives up what this rank does not run."""
    rank, everyone = world.rank, range(world.size)
    held = holdings.held_by(rank)
    tied = {id(parameter) for group in holdings.tied.values() for parameter in group}
    ranked: dict[str, Ranked] = {}
    for subject in finding.subjects:
        ranks = members[subject.name]
        group, own = world.group(everyone), world.group(ranks)
        waiting = partial(runs.progress.waiting, subject.name)
        template, learned = examined.learned[subject.name]
        if learned.obstacle is None and any(id(p) in tied for p in subject.module.parameters()):
            learned = replace(learned, obstacle="it has parameters in common with others, which add to one gradient")
        trained = [p for p in subject.module.parameters() if p.requires_grad and id(p) not in tied]
        ranked[subject.name] = Ranked(
            subject.name,
            subject.module,
            members=ranks,
            group=group,
            sample=(subject.args, subject.kwargs),
            template=template,
            learned=learned,
            compute=marked(subject.name, runs.compute(subject.name, slots[subject.name])),
            reducer=(
                GradientReducer(trained, own, waiting=waiting, place=runs.place(slots[subject.name]))
                if rank in ranks and trained
                else None
            ),
            traffic=runs.traffic,
            waiting=waiting,
            control=world.agreements if isinstance(runs.lanes, StreamLanes) else None,
            batched=examined.batched[subject.name],
        )
        if rank not in ranks and gives_up:
            give_up(subject.module, keep=held, told=GivenUp(subject.name, ranks))
    return ranked


def _handed(
    finding: Finding, members: Mapping[str, Members], examined: Examined, world: World
) -> tuple[tuple[Handover, ...], Ways]:
    """Returns which results go straight on, and the ways of all rows then."""
    templates = {name: template for name, (template, _) in examined.learned.items()}
    known = (finding.subjects, members, examined.batched, templates)
    handed = handed_straight(finding.handovers, *known, world)
    return handed, Ways(stops_of(handed, *known))


def _feed(subject: Subject, ranked: Ranked, examined: Examined) -> Feed:
    """Returns what a module's rows weigh that come from home or go there; those that take a gradient go both ways."""
    leaves = flatten((subject.args, subject.kwargs))[0]
    given = sum(
        leaf.nbytes * (1 + leaf.requires_grad)
        for index, (leaf, cut) in enumerate(zip(leaves, examined.batched[subject.name], strict=True))
        if cut and index not in ranked.taken
    )
    template = examined.learned[subject.name][0]
    made = sum(
        leaf.nbytes * (1 + trains)
        for index, (leaf, trains) in enumerate(zip(template.leaves, template.differentiable, strict=True))
        if isinstance(leaf, torch.Tensor) and index not in ranked.given
    )
    return Feed(members=ranked.members, step_bytes=float(given + made))


def _shared_reducers(holdings: Holdings, world: World, waiting: Waiting) -> list[GradientReducer]:
    """Returns what reduces this rank's part of all that is not one module's own, in the same order on all ranks."""
    reducers = []
    if holdings.loose:
        reducers.append(
            GradientReducer(holdings.loose, world.group(range(world.size)), overlaps=False, waiting=waiting)
        )
    for holders, parameters in holdings.tied.items():
        group = world.group(holders)
        if world.rank in holders:
            # A part of a gradient is there when the first of its users is through; all are at the end.
            reducers.append(GradientReducer(parameters, group, overlaps=False, waiting=waiting))
    return reducers


def _homeward(finding: Finding) -> tuple[str, ...]:
    """Says what ``direct`` does not do on GPUs."""
    pairs = dict.fromkeys(f"{one.source} to {one.target}" for one in finding.handovers)
    why = "on GPUs results go home between modules so far, although they could go straight"
    return (f"{why} ({', '.join(pairs)})",) if pairs else ()


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


def _learned(model: nn.Module, subject: Subject) -> tuple[Template, Signature]:
    """Calls a module as in the sample's step; returns what it returns and what the call showed of it."""
    settings = subject.settings if subject.settings is not None else nullcontext
    with preserved(model), torch.enable_grad(), settings():
        arguments = Arguments.take(subject.args, subject.kwargs)
        result, _, signature = learn(lambda: subject.module(*subject.args, **subject.kwargs), arguments, subject.module)
    return Template.of(result), signature
