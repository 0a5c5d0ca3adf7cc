"""``mosaic plan``: what to plan from, and what to show of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
    from mosaic.cost.analytic_cost import AnalyticCost
    from mosaic.cost.communication.ranked import ModuleTraffic
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
    from mosaic.solver import SearchOptions
    from mosaic.solver.exact.search import SearchLimits
    from mosaic.solver.reserve import Reserved
    from mosaic.solver.runnable import plan_to_run

    basis = find_basis(given)
    search = SearchOptions(limits=SearchLimits(seconds=given.time_limit))
    console = Console(stderr=given.json is not None and str(given.json) == "-")
    plan = plan_to_run(
        given.method,
        basis.graph,
        basis.cost,
        basis.device,
        num_devices=basis.num_devices,
        search=search,
        communication_slots=given.communication_slots,
    )
    save(plan, given.output)
    console.print(plan_table(plan, basis.graph))
    console.print(plan_bars(plan, console.width))
    for note in (proof_of(plan), *basis.notes):
        console.print(note, highlight=False, markup=False)
    if given.compare or given.explain:  # for what is left beside what is reserved
        left = Reserved.of(basis.device, given.communication_slots).left_of(basis.device)
        basis = replace(basis, device=left)
    if given.compare:
        _compare(basis, search, console)
    if given.explain:
        of_modules = replace(plan, device=basis.device, communication_slots=0, communication_sms=0)
        _explain(of_modules, basis, search, console)
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
    from mosaic.cli.profile import Request, measure

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
    from mosaic.cli.counting import count_with_traffic
    from mosaic.cost.analytic_cost import AnalyticCost
    from mosaic.hardware import find_cluster

    cluster = find_cluster(device, gpus)
    degrees = [2**power for power in range(gpus.bit_length()) if 2**power <= gpus]
    graph, counts, traffic, unknown = count_with_traffic(model, degrees, kind=cluster.hardware.kind)
    cost = AnalyticCost(counts, cluster)
    described = cluster.hardware
    fit = load_fit(given.fit, given.interference, described.device(), described=described.name)
    outside: tuple[str, ...] = ()
    if fit is not None:
        cost.interference, outside = apply_fit(fit, graph, cost)
    notes = [f"predicted from counted operators for {described.name} ({described.source}); nothing was measured"]
    if cost.uncounted:
        notes.append(f"operators without a known count of work: {', '.join(sorted(cost.uncounted))}")
    basis = Basis(graph, cost, cluster.hardware.device(), cluster.num_devices, (*notes, *outside))
    return _with_ranks(basis, cost, traffic, unknown, given) if given.communication and gpus > 1 else basis


def _with_ranks(
    basis: Basis,
    cost: AnalyticCost,
    traffic: Mapping[str, ModuleTraffic],
    unknown: Sequence[str],
    given: options.PlanCommand,
) -> Basis:
    """Puts what GPUs tell each other into the times, in place of a sum of gradients that nothing hides."""
    from mosaic.cost.communication.ranked import CollectiveSms, RankedCost, links_of
    from mosaic.solver.reserve import Reserved

    reserved = Reserved.of(basis.device, given.communication_slots)
    ctas = min(given.nccl_ctas, reserved.sms) if reserved.sms else given.nccl_ctas  # held to what is reserved
    sms = CollectiveSms(ctas=ctas, num_sms=cost.hardware.num_sms, reserved_sms=reserved.sms)
    ranked = RankedCost(
        cost, traffic, links_of(cost.cluster), basis.num_devices, included_ms=cost.communication_ms, sms=sms
    )
    notes = [*basis.notes]
    if unknown:
        notes.append(f"no routing is predicted for {', '.join(unknown)}: no leading dimension is the batch")
    if ctas > reserved.sms:
        notes.append(f"a collective is taken to hold {ctas} SMs while it runs; this was not measured")
    return replace(basis, cost=ranked, notes=tuple(notes))


def _compare(basis: Basis, search: SearchOptions, console: Console) -> None:
    from mosaic.report.comparison import comparison_table
    from mosaic.solver.compare import compare

    rows = compare(basis.graph, basis.cost, basis.device, num_devices=basis.num_devices, search=search)
    console.print(comparison_table(rows))


def _explain(plan: Plan, basis: Basis, search: SearchOptions, console: Console) -> None:
    from mosaic.report.explanation import explanation_table
    from mosaic.solver.explain import explain

    console.print(explanation_table(explain(plan, basis.graph, basis.cost, search=search)))
