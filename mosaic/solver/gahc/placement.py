"""One CP-SAT question of StageEval: can every module of a stage meet a target, all of them placed at once?

Variables are ``on[m, o, g]``: module m uses option o and has one of its replicas on device g.

* one option a module, on exactly as many devices as its degree;
* on each device, quotas sum to at most the slots (paper Eq. 5) and memory to at most what the device has;
* *interference* (paper Eq. 7). A pairwise form is linear once it is asked from the side of one option and one
  device, because ``on`` names both at the same time: ``on[m, o, g]`` implies that the sum over neighbours
  ``extra[m, o; n, p] * on[n, p, g]`` is at most the target less the latency of o alone. No product of
  booleans is needed and nothing is approximated. The maximum over devices in Eq. 7 is the conjunction
  over g. Any other form (Eq. 8 has a product) is checked after the fact: what CP-SAT proposes is timed by
  the cost model, a group of neighbours on a device that misses the target is forbidden, exactly as it is,
  on every device, and the question is asked again. Both ways are exact.
* which slots a module gets does not matter here: what fits by number can always be laid out (``slots.py``).

Devices are alike, so their loads are ordered; that takes the symmetric answers away. One worker, a fixed seed and a
limit in deterministic time (not seconds) make every answer repeatable.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mosaic.solver.gahc.extras import PairwiseExtras
from mosaic.solver.options import DeploymentOption
from mosaic.solver.slots import Choice, Starts, lay_out
from mosaic.solver.stage import Machine

Group = tuple[tuple[str, DeploymentOption], ...]
"""Modules that share a device, each at an option."""

QUESTION_EFFORT = 1.0
"""Most effort for one question, in CP-SAT's deterministic time (about seconds)."""
_VARIABLE_EFFORT = 1.5e-5
"""Of making a model, for each of its variables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SatQuestion:
    """A question for CP-SAT."""

    options: Mapping[str, Sequence[DeploymentOption]]
    """For each module of the stage, the options that meet the target alone."""
    machine: Machine
    target_ns: int
    """Latency that every module has to meet, in nanoseconds."""
    extras: PairwiseExtras | None = None
    """A pairwise interference; None where there is none or where it is not pairwise."""
    forbidden: Sequence[Group] = ()
    """Groups that must not share a device exactly so."""
    deterministic_limit: float = QUESTION_EFFORT
    """Effort after which the question is given up, in CP-SAT's deterministic time (about seconds)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SatAnswer:
    """The answer of CP-SAT."""

    is_resolved: bool
    """False where the limit came before an answer."""
    effort: float
    """Effort of the answer: CP-SAT's deterministic time, and that of the model."""
    choices: dict[str, Choice] | None = None
    """Option and devices of each module; None where there are none."""
    starts: dict[str, Starts] = field(default_factory=dict)
    """First slots of each module."""


def ask(question: SatQuestion) -> SatAnswer:
    """Finds options and devices for all modules of a stage, or proves that there are none."""
    from ortools.sat.python import cp_model  # 0.3 s to import; only searches need it

    model = cp_model.CpModel()
    on = _add_selection(model, question)
    _add_capacity(model, question, on)
    if question.extras is not None:
        _add_interference(model, question, on, question.extras)
    _add_forbidden(model, question, on)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = question.deterministic_limit
    solver.parameters.catch_sigint_signal = False  # or it leaves the process without Python's own handler
    status = solver.solve(model)
    effort = solver.response_proto.deterministic_time + _VARIABLE_EFFORT * len(on)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return SatAnswer(is_resolved=status == cp_model.INFEASIBLE, effort=effort)
    devices: dict[tuple[str, DeploymentOption], tuple[int, ...]] = {}
    for (name, option, device), variable in on.items():
        if solver.boolean_value(variable):
            devices[name, option] = (*devices.get((name, option), ()), device)
    choices = {name: (option, at) for (name, option), at in devices.items()}
    return SatAnswer(
        is_resolved=True, effort=effort, choices=choices, starts=lay_out(choices, question.machine.num_slots)
    )


_On = dict[tuple[str, DeploymentOption, int], Any]


def _add_selection(model: Any, question: SatQuestion) -> _On:
    """One option for each module, on as many devices as its degree."""
    on: _On = {}
    devices = range(question.machine.num_devices)
    for index, (name, options) in enumerate(question.options.items()):
        selected = []
        for number, option in enumerate(options):
            select = model.new_bool_var(f"select_{index}_{number}")
            selected.append(select)
            for device in devices:
                on[name, option, device] = model.new_bool_var(f"on_{index}_{number}_{device}")
            model.add(sum(on[name, option, device] for device in devices) == option.degree * select)
        model.add_exactly_one(selected)
    return on


def _add_capacity(model: Any, question: SatQuestion, on: _On) -> None:
    """Slots (paper Eq. 5) and memory of each device; devices in falling order of load."""
    machine = question.machine
    loads = []
    for device in range(machine.num_devices):
        here = [(option, variable) for (_, option, at), variable in on.items() if at == device]
        load = sum(option.quota * variable for option, variable in here)
        model.add(load <= machine.num_slots)
        if machine.memory_bytes:
            model.add(sum(option.memory_bytes * variable for option, variable in here) <= machine.memory_bytes)
        loads.append(load)
    for heavier, lighter in itertools.pairwise(loads):
        model.add(heavier >= lighter)


def _add_interference(model: Any, question: SatQuestion, on: _On, extras: PairwiseExtras) -> None:
    """Paper Eq. 7, one implied linear constraint for each module, option and device.

    Options of a neighbour that disturb everybody alike share one variable, so a constraint stays short.
    """
    alike: dict[tuple[str, int], list[DeploymentOption]] = {}
    for name, options in question.options.items():
        for option in options:
            alike.setdefault((name, extras.as_neighbour(name, option.quota)), []).append(option)
    devices = range(question.machine.num_devices)
    near: dict[tuple[str, int, int], Any] = {}
    for number, ((name, quota), members) in enumerate(alike.items()):
        for device in devices:
            near[name, quota, device] = model.new_bool_var(f"near_{number}_{device}")
            model.add(sum(on[name, option, device] for option in members) == near[name, quota, device])
    for name, options in question.options.items():
        for option in options:
            slack = question.target_ns - option.latency_ns
            if extras.worst_ns(name, option, tuple(question.options)) <= slack:
                continue
            costs = {key: extras.ns(name, option, *key) for key in alike if key[0] != name}
            for device in devices:
                total = sum(extra * near[*key, device] for key, extra in costs.items())
                model.add(total <= slack).only_enforce_if(on[name, option, device])


def _add_forbidden(model: Any, question: SatQuestion, on: _On) -> None:
    """No device holds a forbidden group with nobody else beside it."""
    for group in question.forbidden:
        if not all((name, option, 0) in on for name, option in group):
            continue
        names = {name for name, _ in group}
        for device in range(question.machine.num_devices):
            inside = sum(on[name, option, device] for name, option in group)
            others = sum(variable for (name, _, at), variable in on.items() if at == device and name not in names)
            model.add(inside - others <= len(group) - 1)
