"""The dependencies of one step: inputs, gradients, the loss, and the order of a schedule.

A part's forward waits for the forwards that feed it, and its backward for its own forward and the backwards of what it
feeds. A loss needs every output: the backward of a part that feeds nothing waits for the forwards of all such parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from mosaic.graph import Edge, ModuleGraph, Part
from mosaic.plan import Plan
from mosaic.profile import Phase
from mosaic.schedule import Action, ActionKind, Schedule, bad_cell

_PHASES = {ActionKind.FORWARD: Phase.FORWARD, ActionKind.BACKWARD: Phase.BACKWARD}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One part's forward or backward of one microbatch, which all of its ranks do together."""

    kind: ActionKind
    """Forward or backward."""
    part: Part
    """Of which part."""
    microbatch: int = 0
    """Index in the step."""

    @property
    def phase(self) -> Phase:
        """Half of the step."""
        return _PHASES[self.kind]

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}:{self.part}"


Waits = Mapping[Work, Mapping[Work, Edge | None]]
"""For each work those that it waits for, each with the edge whose data it waits for; None for any other reason."""


def waits_of(plan: Plan, graph: ModuleGraph, num_microbatches: int = 1) -> Waits:
    """Returns what each work of a step waits for, by what it needs alone."""
    fed_by = _inputs(plan, graph)
    feeds: dict[Part, dict[Part, Edge | None]] = {part: {} for part in fed_by}
    for part, inputs in fed_by.items():
        for source, edge in inputs.items():
            feeds[source][part] = edge
    ends = [part for part, targets in feeds.items() if not targets]
    waits: dict[Work, dict[Work, Edge | None]] = {}
    for microbatch in range(num_microbatches):
        forward, backward = (
            {part: Work(kind=kind, part=part, microbatch=microbatch) for part in fed_by} for kind in _PHASES
        )
        for part, inputs in fed_by.items():
            waits[forward[part]] = {forward[source]: edge for source, edge in inputs.items()}
            gradients = {backward[target]: edge for target, edge in feeds[part].items()}
            loss = {} if gradients else {forward[end]: None for end in ends}
            waits[backward[part]] = {forward[part]: None, **loss, **gradients}
    return waits


def _inputs(plan: Plan, graph: ModuleGraph) -> dict[Part, dict[Part, Edge | None]]:
    """For each part those that feed it: the one before it of its module, or the last ones of the modules before."""
    parts: dict[str, list[Part]] = {}
    for placement in plan.placements:
        parts.setdefault(placement.module, []).append(placement.part)
    found: dict[Part, dict[Part, Edge | None]] = {p: {} for own in parts.values() for p in own}
    for own in parts.values():
        for before, after in pairwise(own):
            found[after][before] = None
    for edge in graph.edges:
        found[parts[edge.target][0]][parts[edge.source][-1]] = edge
    return found


def staged_order(plan: Plan, num_microbatches: int = 1) -> tuple[Work, ...]:
    """Returns the works of a step stage after stage: every forward, then every backward in reverse."""
    forward = [
        Work(kind=ActionKind.FORWARD, part=placement.part, microbatch=microbatch)
        for microbatch in range(num_microbatches)
        for placement in plan.placements
    ]
    backward = [Work(kind=ActionKind.BACKWARD, part=work.part, microbatch=work.microbatch) for work in forward]
    return (*forward, *reversed(backward))


def staged_schedule(plan: Plan, num_microbatches: int = 1) -> Schedule:
    """Returns the schedule of a plan's stages: ``staged_order`` on each rank."""
    ranks = {placement.part: placement.devices for placement in plan.placements}
    actions = [
        Action(rank=rank, kind=work.kind, part=work.part, microbatch=work.microbatch)
        for work in staged_order(plan, num_microbatches)
        for rank in ranks[work.part]
    ]
    return Schedule.of(actions, plan=plan.fingerprint, num_ranks=plan.num_devices, num_microbatches=num_microbatches)


def check_schedule(schedule: Schedule, plan: Plan, graph: ModuleGraph) -> tuple[Work, ...]:
    """Checks that a schedule runs a plan to its end; returns all works in an order that every rank keeps.

    Each microbatch runs forward and backward once through every part, on all of the part's ranks, after what it waits
    for; and ranks that wait for each other get there: the orders of all ranks and the waits together have no cycle.

    Raises:
        InvalidScheduleError: It is of another plan, an action is not its rank's, is there twice, missing, or waits for
            what never comes; has the cell at fault.
        InvalidPlanError: The plan does not cover the graph.
    """
    plan.check_covers(graph)
    rows = _rows(schedule, plan)
    waits = waits_of(plan, graph, schedule.num_microbatches)
    ranks = {placement.part: placement.devices for placement in plan.placements}
    at = [0] * len(rows)
    done: dict[Work, None] = {}

    def is_next(work: Work, rank: int) -> bool:
        return at[rank] < len(rows[rank]) and rows[rank][at[rank]] == work

    def is_ready(work: Work) -> bool:
        return all(is_next(work, rank) for rank in ranks[work.part]) and all(other in done for other in waits[work])

    has_moved = True
    while has_moved:
        has_moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row) and is_ready(row[at[rank]]):
                work = row[at[rank]]
                done[work] = None
                has_moved = True
                for other in ranks[work.part]:
                    at[other] += 1
    stuck = next((rank for rank, row in enumerate(rows) if at[rank] < len(row)), None)
    if stuck is not None:
        work = rows[stuck][at[stuck]]
        missing = next((other for other in waits[work] if other not in done), work)
        where = next(rank for rank in ranks[missing.part] if not (missing is work and is_next(work, rank)))
        now = rows[where][at[where]] if at[where] < len(rows[where]) else "its end"
        problem = f"waits for {missing} of rank {where}, which stands at {now}: both wait for ever; change an order"
        raise bad_cell(schedule, stuck, at[stuck], problem)
    return tuple(done)


def _rows(schedule: Schedule, plan: Plan) -> Sequence[Sequence[Work]]:
    """Every rank's works, each of them its own, and all of them there once."""
    if schedule.plan != plan.fingerprint or len(schedule.rows) != plan.num_devices:
        raise bad_cell(
            schedule,
            0,
            0,
            f"the schedule is of plan {schedule.plan} on {len(schedule.rows)} ranks; this one is {plan.fingerprint} "
            f"on {plan.num_devices}: make the schedule again",
        )
    own = [[p.part for p in plan.placements if rank in p.devices] for rank in range(plan.num_devices)]
    rows = []
    for rank in range(plan.num_devices):
        row: dict[Work, None] = {}
        for place, action in enumerate(schedule.actions(rank)):
            work = Work(kind=action.kind, part=action.part, microbatch=action.microbatch)
            if action.kind not in _PHASES:
                kinds = " or ".join(kind.value for kind in _PHASES)
                raise bad_cell(schedule, rank, place, f"a plan's schedule has weights within B; write {kinds}")
            if work.part not in own[rank]:
                raise bad_cell(schedule, rank, place, f"the plan does not have {work.part} on this rank")
            if work.microbatch >= schedule.num_microbatches:
                raise bad_cell(schedule, rank, place, f"there are {schedule.num_microbatches} microbatches, from 0")
            if work in row:
                raise bad_cell(schedule, rank, place, "it is there twice; run it once")
            row[work] = None
        for microbatch in range(schedule.num_microbatches):
            for kind in _PHASES:
                for part in own[rank]:
                    work = Work(kind=kind, part=part, microbatch=microbatch)
                    if work not in row:
                        raise bad_cell(schedule, rank, len(row), f"{work} is missing; run it once")
        rows.append(tuple(row))
    return rows
