"""CP-SAT's part of StageEval: a placement in which every module of a stage meets a target.

Variables are ``on[m, o, g]``: module m uses option o and has one of its replicas on device g.

* one option per module, on as many devices as its degree;
* on each device, quotas sum to at most its slots (paper Eq. 5) and memory to at most its memory;
* *interference* (paper Eq. 7). It is linear for one option and one device: ``on[m, o, g]`` implies that the sum over
  neighbours ``extra[m, o; n, p] * on[n, p, g]`` is at most the target less the latency of o alone. The maximum over
  devices in Eq. 7 is the conjunction over g.
* slots are not assigned here (``stage.py``).

Devices are equal, so their loads are ordered to remove symmetric solutions.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mosaic.solver.gahc.extras import PairwiseExtras
from mosaic.solver.limits import repeatable_solver
from mosaic.solver.options import DeploymentOption
from mosaic.solver.stage import Choice, Machine

MAX_EFFORT = 1.0
"""Maximum effort of one placement, in CP-SAT's deterministic time (about seconds)."""
_VARIABLE_EFFORT = 1.5e-5
"""Effort per variable of building a model."""


class StagePlacement(NamedTuple):
    """The answer of CP-SAT."""

    is_resolved: bool
    """False if the limit ended the search."""
    effort: float
    """Effort of solving (CP-SAT's deterministic time) and of building the model."""
    choices: dict[str, Choice] | None = None
    """Option and devices of each module; None if there is no placement."""


def find_placement(
    options: Mapping[str, Sequence[DeploymentOption]],
    machine: Machine,
    target_ns: int,
    *,
    extras: PairwiseExtras | None = None,
    effort: float = MAX_EFFORT,
) -> StagePlacement:
    """Finds options and devices for all modules of a stage, or proves that there are none.

    Args:
        options: For each module of the stage, the options that meet the target alone.
        machine: Devices to place on.
        target_ns: Latency that every module must meet, in nanoseconds.
        extras: The interference, or None.
        effort: Effort limit.
    """
    from ortools.sat.python import cp_model  # 0.3 s to import

    model, devices = cp_model.CpModel(), range(machine.num_devices)
    on: dict[tuple[str, DeploymentOption, int], Any] = {}
    for name, own in options.items():  # one option per module, on as many devices as its degree
        selected = [model.new_bool_var("") for _ in own]
        model.add_exactly_one(selected)
        for option, select in zip(own, selected, strict=True):
            on |= {(name, option, device): model.new_bool_var("") for device in devices}
            model.add(sum(on[name, option, device] for device in devices) == option.degree * select)
    loads = []
    for device in devices:  # slots (paper Eq. 5) and memory
        on_device = [(option, variable) for (_, option, at), variable in on.items() if at == device]
        loads.append(sum(option.quota * variable for option, variable in on_device))
        model.add(loads[-1] <= machine.num_slots)
        if machine.memory_bytes:
            model.add(sum(option.memory_bytes * variable for option, variable in on_device) <= machine.memory_bytes)
    for heavier, lighter in itertools.pairwise(loads):
        model.add(heavier >= lighter)
    if extras is not None:
        _add_interference(model, options, on, extras, target_ns, devices)
    solver = repeatable_solver(effort)
    status = solver.solve(model)
    spent = solver.response_proto.deterministic_time + _VARIABLE_EFFORT * len(on)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return StagePlacement(status == cp_model.INFEASIBLE, spent)
    choices: dict[str, Choice] = {}
    for (name, option, device), variable in on.items():
        if solver.boolean_value(variable):
            choices[name] = option, (*choices.get(name, (option, ()))[1], device)
    return StagePlacement(True, spent, choices)


def _add_interference(
    model: Any,
    options: Mapping[str, Sequence[DeploymentOption]],
    on: Mapping[tuple[str, DeploymentOption, int], Any],
    extras: PairwiseExtras,
    target_ns: int,
    devices: Sequence[int],
) -> None:
    """Adds paper Eq. 7: one implied linear constraint per module, option and device.

    Options of a neighbour that disturb all others equally share one variable, which keeps constraints short.
    """
    alike: dict[tuple[str, int], list[DeploymentOption]] = {}
    for name, own in options.items():
        for option in own:
            alike.setdefault((name, extras.as_neighbour(name, option.quota)), []).append(option)
    near: dict[tuple[str, int, int], Any] = {}
    for (name, quota), members in alike.items():
        for device in devices:
            near[name, quota, device] = model.new_bool_var("")
            model.add(sum(on[name, option, device] for option in members) == near[name, quota, device])
    for name, own in options.items():
        for option in own:
            slack = target_ns - option.latency_ns
            if extras.worst_ns(name, option, tuple(options)) <= slack:
                continue
            costs = {key: extras.ns(name, option, *key) for key in alike if key[0] != name}
            for device in devices:
                total = sum(extra * near[*key, device] for key, extra in costs.items())
                model.add(total <= slack).only_enforce_if(on[name, option, device])
