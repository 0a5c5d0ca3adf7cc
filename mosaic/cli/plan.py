"""``mosaic plan``: from a profile, an instance or a model's operators to a plan."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console
from tyro.conf import arg

from mosaic.artifact import load, save
from mosaic.cli.options import (
    BackendName,
    DtypeName,
    Json,
    Method,
    OptionalModel,
    Strict,
    console_beside,
    write_json,
)
from mosaic.cli.stopping import first_interrupt
from mosaic.cost import Cost, CostModel
from mosaic.device import Device
from mosaic.graph import ModuleGraph
from mosaic.plan import Plan, SearchRecord
from mosaic.profile import Profile
from mosaic.report.plan_picture import draw_plan
from mosaic.report.table import plan_bars, plan_table
from mosaic.solver.methods import method_of

if TYPE_CHECKING:
    from rich.table import Table

    from mosaic.cli.counting import Counted
    from mosaic.cost.analytic_cost import AnalyticCost
    from mosaic.solver import SearchOptions
MAX_BARS = 120
"""Columns of a plan's bars."""
INTERRUPTED = 130
"""Exit code."""
CHOSEN_BY_STEP = "chosen among several for a simulated step of {:.2f} ms, in which modules share the network"
"""Where a plan was."""


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """Solve for temporal stages and slot quotas, from a file, a model profiled now, or a model's operators alone.

    FILE is a profile that `mosaic profile` wrote, or an instance: a machine and modules with their option tables, made
    by hand (the format is in docs/planning.md). Neither torch nor a GPU is loaded for it. With --model and --device
    h100-80g (or a100-80g, h200, h800, a40, host, or a .json file) the operators of the model are counted and nothing is
    run: no GPU is needed, and --gpus may be any number. With --pipeline RANKS a step of a pipeline is planned instead;
    `mosaic plan --pipeline 4 --help` has its options; with --context RANKS one sequence is shared out over ranks.
    """

    file: Annotated[tyro.conf.Positional[Path | None], arg(metavar="FILE")] = None
    """A profile or an instance."""
    model: OptionalModel = None
    device: str | None = None
    """With --model: a described device to plan for, by name or file. The model is profiled here without."""
    gpus: int | None = None
    """Devices to plan for: 1 by default, or what the instance says. A profile plans for several where it was taken at
    those degrees."""
    dtype: DtypeName = None
    contention: Literal["assumed", "none"] = "assumed"
    """With --device: whether modules side by side wait for each other at the device's memory, by what each draws by its
    counts (assumed, not measured), or none disturbs another."""
    backend: BackendName = None
    strict: Strict = False
    method: Method = "auto"
    time_limit: float = 10.0
    """Seconds of an idle core after which exact, gahc and auto take the best plan so far; exact and auto with a bound
    on what is possible. They are counted by what is searched, so the plan is the same however busy the machine is; ten
    times as many seconds of the clock end a search in any case, and the first Ctrl-C at once, with exit code 130."""
    communication_slots: int = 0
    """Slots of each GPU that no module gets, left to collectives, with the SMs that are no slot's (4 of 132)."""
    check: Annotated[Path | None, arg(metavar="PLAN")] = None
    """Solve nothing: check this plan against FILE. Exits with 1 if it breaks a rule."""
    compare: bool = False
    """Also show what Megatron, DistMM, Spindle and others would plan, under the same predictions."""
    output: Path = Path("plan.json")
    """Where to write the plan."""
    picture: Annotated[Path | None, arg(metavar="FILE")] = None
    """Also draw the plan, as .png or .svg."""
    json: Json = None

    def execute(self) -> int:
        """Plans or checks, writes the plan and prints it; returns the exit code."""
        method_of(self.method)
        basis = find_basis(self)
        if self.check is not None:
            load(Plan, self.check).check_matches(graph=basis.graph, device=basis.device)
            console_beside(self.json).print(f"{self.check}: the plan keeps every rule", highlight=False)
            return 0
        self._check_targets()
        with first_interrupt() if method_of(self.method).can_be_stopped else nullcontext() as stop:
            plan, search = self._solve(basis, stop.is_set if stop is not None else None)
            save(plan, self.output)
        is_stopped = search.limits.is_stopped
        self._show(plan, basis, search, is_stopped=is_stopped)
        write_json(plan, self.json)
        return INTERRUPTED if is_stopped else 0

    def _solve(self, basis: Basis, should_stop: Callable[[], bool] | None) -> tuple[Plan, SearchOptions]:
        from mosaic.solver import SearchOptions
        from mosaic.solver.limits import SearchLimits
        from mosaic.solver.runnable import plan_to_run

        search = SearchOptions(
            limits=SearchLimits(effort=self.time_limit, seconds=10 * self.time_limit, should_stop=should_stop)
        )
        plan = plan_to_run(
            self.method,
            basis.graph,
            basis.cost,
            basis.device,
            num_devices=basis.num_devices,
            search=search,
            communication_slots=self.communication_slots,
        )
        return replace(plan, foreign_cpu_share=basis.foreign_cpu_share), search

    def _show(self, plan: Plan, basis: Basis, search: SearchOptions, *, is_stopped: bool) -> None:
        console = console_beside(self.json)
        console.print(basis.titled(plan_table(plan, basis.graph)))
        console.print(plan_bars(plan, min(console.width, MAX_BARS)))
        for note in (proof_of(plan), *basis.notes):
            console.print(note, highlight=False, markup=False)
        if is_stopped:
            Console(stderr=True).print(f"mosaic: stopped; {self.output} has the best plan so far", style="red")
            return
        if self.compare:
            from mosaic.solver.runnable import without_reserved

            left = without_reserved(basis.device, self.communication_slots)
            _compare(replace(basis, device=left), search, console)
        if self.picture is not None:
            draw_plan(plan, self.picture)
        console.print(f"wrote {self.output}")

    def _check_targets(self) -> None:
        """Before a search that may take long."""
        for target in (self.output, self.json):
            if target is None or not target.exists():
                continue
            if target.is_dir():
                raise ValueError(f"cannot write {target}: it is a folder; name a file in it")
            if self.file is not None and self.file.exists() and target.samefile(self.file):
                raise ValueError(f"{target} is the file that is planned from; name another file for the plan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """Modules, times and machine of a plan that is to be made."""

    graph: ModuleGraph
    """The modules."""
    cost: Cost
    """Their times."""
    device: Device
    """One of the devices."""
    num_devices: int
    """How many of them."""
    notes: tuple[str, ...] = ()
    """Remarks about the times, one sentence each."""
    foreign_cpu_share: float = 0.0
    """As in the profile."""
    dtype: str = ""
    """Number format that was counted in; empty where nothing was counted."""

    def titled(self, table: Table) -> Table:
        """Adds the number format to the title of a table of predicted times."""
        if self.dtype:
            table.title = f"{table.title}, in {self.dtype}"
        return table


def find_basis(given: PlanCommand) -> Basis:
    """Reads a profile or an instance, takes a profile, or counts operators for a described device.

    Raises:
        ValueError: Neither a file nor a model was given, or both; ``--device`` or ``--dtype`` without a model;
            ``gpus`` is below 1, or is not what the instance says.
    """
    if (given.file is None) == (given.model is None):
        raise ValueError("give either FILE, a profile or an instance, or --model FILE:FACTORY")
    if given.gpus is not None and given.gpus < 1:
        raise ValueError(f"gpus={given.gpus}; a plan needs at least one device")
    if given.model is not None and given.device is not None:
        return _counted(given.model, given.device, given)
    if given.dtype is not None and given.device is None:
        raise ValueError(f"--dtype {given.dtype} says how operators are counted: give --model and --device, too")
    if given.device is not None:
        raise ValueError(
            f"--device {given.device} describes a device for a model whose operators are counted, and {given.file} has "
            "its device in it: give --model instead of the file, or leave --device out"
        )
    if given.file is not None and _is_instance(given.file):
        return _of_instance(given.file, given.gpus)
    measured = load(Profile, given.file) if given.file is not None else _measured(given)
    cost = CostModel.from_profile(measured)
    return Basis(
        graph=measured.graph,
        cost=cost,
        device=measured.device,
        num_devices=given.gpus or 1,
        foreign_cpu_share=measured.environment.foreign_cpu_share,
    )


def proof_of(plan: Plan) -> str:
    """Says how good a plan surely is."""
    found = plan.search
    if found.simulated_ms > 0:
        return f"{_predicted_proof(found)}; {CHOSEN_BY_STEP.format(found.simulated_ms)}"
    return _predicted_proof(found)


def _predicted_proof(found: SearchRecord) -> str:
    if found.status == "optimal":
        return f"proven: no plan of whole modules is predicted faster ({found.method}, {found.seconds:.3f} s)"
    if found.bound_ms > 0:
        return f"no plan is predicted faster than {found.bound_ms:.2f} ms ({found.method}, {found.seconds:.3f} s)"
    return f"found by {found.method} in {found.seconds:.3f} s, without a proof"


def _is_instance(path: Path) -> bool:
    """Returns whether a file looks like an instance; its reader says what is wrong with it."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(raw, dict) and "num_devices" in raw and "modules" in raw


def _of_instance(path: Path, gpus: int | None) -> Basis:
    from mosaic.solver.instance import Instance, TableCost

    instance = load(Instance, path)
    if gpus not in (None, instance.num_devices):
        raise ValueError(f"gpus={gpus}; {path} is about {instance.num_devices} devices: leave --gpus out")
    return Basis(
        graph=instance.graph,
        cost=TableCost(instance),
        device=instance.device,
        num_devices=instance.num_devices,
    )


def _measured(given: PlanCommand) -> Profile:
    from mosaic.cli.profile import ProfileCommand, measure

    assert given.model is not None
    return measure(ProfileCommand(model=given.model, backend=given.backend, strict=given.strict))[0]


def _counted(model: str, device: str, given: PlanCommand) -> Basis:
    """Counts a model's operators on tensors without data and predicts their times on a described device."""
    from mosaic.cli.counting import count_workload
    from mosaic.cost.analytic_cost import ASSUMED_CONTENTION, AnalyticCost
    from mosaic.cost.degrees import degrees_to_measure
    from mosaic.cost.interference import NoInterference
    from mosaic.hardware import find_cluster

    cluster = find_cluster(device, given.gpus)
    described, gpus = cluster.hardware, cluster.num_devices
    counted = count_workload(model, degrees_to_measure(gpus), kind=described.kind, dtype=given.dtype)
    is_free = given.contention == "none"
    cost = AnalyticCost(counted.counts, cluster, interference=NoInterference() if is_free else None)
    notes = [
        f"predicted from counted operators for {described.name} ({described.source}); nothing was measured",
        f"counted in {counted.dtype}: {counted.description}",
        "modules side by side are predicted not to disturb each other" if is_free else ASSUMED_CONTENTION,
    ]
    basis = Basis(
        graph=counted.graph,
        cost=cost,
        device=described.device(),
        num_devices=gpus,
        notes=tuple(notes),
        dtype=counted.dtype,
    )
    return _with_ranks(basis, cost, counted) if gpus > 1 else basis


def _with_ranks(basis: Basis, cost: AnalyticCost, counted: Counted) -> Basis:
    """Adds the communication of several GPUs to the times, in place of a sum of gradients that nothing hides."""
    from mosaic.cost.communication import RankedCost

    ranked = RankedCost(cost, counted.traffic, cost.cluster, basis.num_devices, included_ms=cost.communication_ms)
    notes = basis.notes
    if counted.unknown:
        notes += (f"no routing is predicted for {', '.join(counted.unknown)}: no leading dimension is the batch",)
    return replace(basis, cost=ranked, notes=notes)


def _compare(basis: Basis, search: SearchOptions, console: Console) -> None:
    from mosaic.report.comparison import comparison_table
    from mosaic.solver.compare import compare

    rows = compare(basis.graph, basis.cost, basis.device, num_devices=basis.num_devices, search=search)
    console.print(basis.titled(comparison_table(rows)))
