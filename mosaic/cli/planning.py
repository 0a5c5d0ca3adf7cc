"""``mosaic plan``: what to plan from, and what to show of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from mosaic.artifact import load, save
from mosaic.cli.fitting import apply_fit, form_of, load_fit
from mosaic.cost import Cost, CostModel
from mosaic.device import Device
from mosaic.errors import MosaicError
from mosaic.graph import ModuleGraph
from mosaic.plan import Plan
from mosaic.profile import Profile
from mosaic.report import draw_plan, plan_bars, plan_table

if TYPE_CHECKING:
    from mosaic.cli import main as options
    from mosaic.solver import SearchOptions


@dataclass(frozen=True, slots=True)
class Basis:
    """What a plan is made from."""

    graph: ModuleGraph
    """The modules."""
    cost: Cost
    """Their times."""
    device: Device
    """One of the devices."""
    num_devices: int
    """How many of them."""
    notes: tuple[str, ...]
    """What to know about the times, one sentence each."""


def find_basis(given: options.PlanCommand) -> Basis:
    """Reads a profile, takes one, or counts operators for a described device.

    Raises:
        MosaicError: Neither a profile nor a model was given, or both; or --gpus goes with neither a profile of that
            degree nor a described device.
    """
    if (given.profile is None) == (given.model is None):
        raise MosaicError("give either --profile FILE or --model FILE:FACTORY")
    if given.gpus < 1:
        raise ValueError(f"gpus={given.gpus}; a plan needs at least one device")
    if given.model is not None and not given.device.isdecimal():
        return _counted(given)
    measured = _measured(given)
    if given.model is None and not given.device.isdecimal():
        raise MosaicError(
            f"--device {given.device} describes a device for a model whose operators are counted; a profile has its "
            "device in it: give --model instead of --profile, or leave --device out"
        )
    fit = load_fit(given.fit, given.interference, measured.device)
    cost = CostModel.from_profile(
        measured, interference=form_of(given.interference), fit=fit, optimizer_bytes=given.optimizer_bytes
    )
    return Basis(measured.graph, cost, measured.device, given.gpus, tuple(cost.findings))


def make_plan(given: options.PlanCommand) -> Plan:
    """Plans, writes the plan and prints it; returns it."""
    from mosaic.solver import SearchOptions, solve
    from mosaic.solver.exact import SearchLimits

    basis = find_basis(given)
    search = SearchOptions(limits=SearchLimits(seconds=given.time_limit))
    console = Console(stderr=given.json is not None and str(given.json) == "-")
    plan = solve(
        basis.graph, basis.cost, basis.device, num_devices=basis.num_devices, method=given.method, search=search
    )
    save(plan, given.output)
    console.print(plan_table(plan, basis.graph))
    console.print(plan_bars(plan, console.width))
    for note in (proof_of(plan), *basis.notes):
        console.print(note, highlight=False, markup=False)
    if given.compare:
        _compare(basis, search, console)
    if given.explain:
        _explain(plan, basis, search, console)
    if given.picture is not None:
        draw_plan(plan, given.picture)
    console.print(f"wrote {given.output}")
    return plan


def proof_of(plan: Plan) -> str:
    """Says how good a plan surely is."""
    found = plan.search
    if found.status == "optimal":
        return f"proven: no plan of whole modules is predicted faster ({found.method}, {found.seconds:.3f} s)"
    if found.bound_ms > 0:
        return f"no plan is predicted faster than {found.bound_ms:.2f} ms ({found.method}, {found.seconds:.3f} s)"
    return f"found by {found.method} in {found.seconds:.3f} s, without a proof"


def _measured(given: options.PlanCommand) -> Profile:
    if given.profile is not None:
        return load(Profile, given.profile)
    from mosaic.cli.profiling import Request, measure

    assert given.model is not None
    return measure(
        Request(
            model=given.model,
            backend=given.backend,
            device=int(given.device),
            max_foreign_share=given.max_foreign_share,
        )
    ).profile


def _counted(given: options.PlanCommand) -> Basis:
    """Counts a model's operators on tensors without data and predicts their times on a described device."""
    assert given.model is not None
    model, device, gpus = given.model, given.device, given.gpus
    from mosaic.cli.counting import count_workload
    from mosaic.cost.analytic_cost import AnalyticCost
    from mosaic.hardware import find_cluster

    cluster = find_cluster(device, gpus)
    degrees = [2**power for power in range(gpus.bit_length()) if 2**power <= gpus]
    graph, counts = count_workload(model, degrees, kind=cluster.hardware.kind)
    cost = AnalyticCost(counts, cluster)
    described = cluster.hardware
    fit = load_fit(given.fit, given.interference, described.device(), described=described.name)
    outside: tuple[str, ...] = ()
    if fit is not None:
        cost.interference, outside = apply_fit(fit, graph, cost)
    notes = [f"predicted from counted operators for {described.name} ({described.source}); nothing was measured"]
    if cost.uncounted:
        notes.append(f"operators without a known count of work: {', '.join(sorted(cost.uncounted))}")
    return Basis(graph, cost, cluster.hardware.device(), cluster.num_devices, (*notes, *outside))


def _compare(basis: Basis, search: SearchOptions, console: Console) -> None:
    from mosaic.report.comparison import comparison_table
    from mosaic.solver.compare import compare

    rows = compare(basis.graph, basis.cost, basis.device, num_devices=basis.num_devices, search=search)
    console.print(comparison_table(rows))


def _explain(plan: Plan, basis: Basis, search: SearchOptions, console: Console) -> None:
    from mosaic.report.explanation import explanation_table
    from mosaic.solver.explain import explain

    console.print(explanation_table(explain(plan, basis.graph, basis.cost, search=search)))
