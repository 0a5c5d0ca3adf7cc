"""Which options devices can hold at all beside what other modules keep, and the plan of one module after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mosaic.errors import InfeasibleError, UndecidedError
from mosaic.graph import ModuleGraph
from mosaic.solver.memory.holding import Stages, assign_alone
from mosaic.solver.options import DeploymentOption
from mosaic.solver.slots import lay_out
from mosaic.solver.stage import Machine, StageResult

Options = Mapping[str, Sequence[DeploymentOption]]

ALONE_NODES = 500_000
"""Places that are tried before it stays open whether there is any plan."""

STEP_NODES = 20_000
"""Places that are tried for one choice of degrees before the next is."""


def alone_within_memory(graph: ModuleGraph, options: Options, machine: Machine) -> Stages:
    """Puts every module into a stage of its own on devices that hold everything; quick, not the best of its kind.

    Raises:
        InfeasibleError: There is no plan, whatever the method.
        UndecidedError: None was found, and it is not proven that there is none.
    """
    fastest = {name: fastest_by_degree(own) for name, own in options.items()}
    now = {name: own[0] for name, own in fastest.items()}
    while True:
        if sum(map(on_all_devices, now.values())) <= machine.num_devices * machine.memory_bytes:
            single = {name: (option,) for name, option in now.items()}
            placed, _ = assign_alone(single, machine, max_nodes=STEP_NODES)
            if placed is not None:
                return tuple(_alone(name, *placed[name], machine) for name in graph.topological_order())
        step = _cheapest_step(now, fastest)
        if step is None:
            break
        now = {**now, step[0]: step[1]}
    chosen, is_complete = assign_alone(fastest, machine, max_nodes=ALONE_NODES)
    if chosen is None:
        raise _refusal(options, machine, is_proven=is_complete)
    return tuple(_alone(name, *chosen[name], machine) for name in graph.topological_order())


def fastest_by_degree(options: Sequence[DeploymentOption]) -> tuple[DeploymentOption, ...]:
    """Returns the fastest option of each degree, by rising time."""
    best: dict[int, DeploymentOption] = {}
    for option in sorted(options, key=lambda o: (o.latency_ns, o.area, o)):
        best.setdefault(option.degree, option)
    return tuple(best.values())


def _cheapest_step(now: Mapping[str, DeploymentOption], options: Options) -> tuple[str, DeploymentOption] | None:
    """The change to fewer bytes over all devices that costs least time for each byte."""
    steps = []
    for name, current in now.items():
        for option in options[name]:
            saved = current.degree * current.kept_bytes - option.degree * option.kept_bytes
            if saved > 0:
                steps.append(((option.latency_ns - current.latency_ns) / saved, name, option))
    if not steps:
        return None
    _, name, option = min(steps, key=lambda step: step[:2])
    return name, option


def _alone(name: str, option: DeploymentOption, devices: tuple[int, ...], machine: Machine) -> StageResult:
    choices = {name: (option, devices)}
    return StageResult(latency_ns=option.latency_ns, choices=choices, starts=lay_out(choices, machine.num_slots))


def _refusal(options: Options, machine: Machine, *, is_proven: bool) -> InfeasibleError | UndecidedError:
    total = machine.num_devices * machine.memory_bytes
    least = sum(min(o.degree * o.kept_bytes for o in own) for own in options.values())
    reason = (
        f"what the {len(options)} modules keep across stages (parameters, gradients, optimizer state, activations) "
        f"takes {least:,} bytes at the least; {machine.num_devices} devices of {machine.memory_bytes:,} have {total:,}"
    )
    if least <= total:
        reason += ", and no choice of degrees and devices fits it into each of them beside what a module works with"
    reason += ": use a smaller batch, more devices, a sharded optimizer or activation checkpointing"
    if not is_proven:
        return UndecidedError(
            f"no plan was found that devices of {machine.memory_bytes:,} bytes hold, and it is not proven that there "
            f"is none ({reason}); or search with hold_memory=False, which checks each stage's memory alone"
        )
    return InfeasibleError("no plan fits into the devices' memory", reasons=[reason])


def without_hopeless(options: Options, machine: Machine) -> Options:
    """Drops options that do not fit even where every other module keeps the least that it can.

    Two modules whose degrees together are more than there are devices share one, and must fit there together. Of
    options that differ in quota and times alone one is looked at: there may be a thousand for each.

    Raises:
        InfeasibleError: A module has none left.
    """
    kinds = {name: {_memory_of(option): option for option in own} for name, own in options.items()}
    while True:
        least = {name: min(map(on_all_devices, own.values())) for name, own in kinds.items()}
        room = machine.num_devices * machine.memory_bytes - sum(least.values())
        kept = {
            name: {
                memory: o
                for memory, o in own.items()
                if o.degree * o.memory_bytes - least[name] <= room and _has_partners(name, o, kinds, machine)
            }
            for name, own in kinds.items()
        }
        if not all(kept.values()):
            raise _refusal(options, machine, is_proven=True)
        if kept == kinds:
            return {name: tuple(o for o in own if _memory_of(o) in kept[name]) for name, own in options.items()}
        kinds = kept


_Memory = tuple[int, int, int]


def _memory_of(option: DeploymentOption) -> _Memory:
    return option.degree, option.kept_bytes, option.memory_bytes


def _has_partners(
    name: str, option: DeploymentOption, kinds: Mapping[str, Mapping[_Memory, DeploymentOption]], machine: Machine
) -> bool:
    """Whether every other module has an option that is either apart from this one or fits beside it."""
    return all(
        any(
            option.degree + other.degree <= machine.num_devices
            or option.kept_bytes + other.kept_bytes + max(option.working_bytes, other.working_bytes)
            <= machine.memory_bytes
            for other in own.values()
        )
        for beside, own in kinds.items()
        if beside != name
    )


def on_all_devices(option: DeploymentOption) -> int:
    """Returns the bytes that an option keeps on all of its devices together."""
    return option.degree * option.kept_bytes
