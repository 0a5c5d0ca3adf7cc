"""``mosaic plan``: plans from a profile, an instance or a model's operators."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from tyro.conf import arg

from mosaic.artifact import load, read, save
from mosaic.cli.options import DtypeName, Json, Method, OptionalModel, console_beside, write_json
from mosaic.cost import Cost, CostModel
from mosaic.device import Device
from mosaic.graph import ModuleGraph
from mosaic.plan import Plan
from mosaic.profile import Profile
from mosaic.report.figure import save_figure
from mosaic.report.plan_view import plan_figure, plan_table
from mosaic.report.table import comparison_table
from mosaic.solver.instance import MAX_DEVICES, Instance, TableCost
from mosaic.solver.methods import method_of

if TYPE_CHECKING:
    from mosaic.cli.counting import Counted
    from mosaic.cli.gain import Gain
    from mosaic.hardware import Hardware


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """Solve for temporal stages and slot quotas, from a file or from a model's operators.

    FILE is a profile written by `mosaic profile`, or a hand-written instance: a machine and modules with their option
    tables (docs/planning.md has the format). Planning from a file needs neither torch nor a GPU. --model counts
    operators for a described device and runs nothing. --pipeline RANKS plans a step of a pipeline instead and has its
    own options (see `mosaic plan --pipeline 4 --help`). --context RANKS divides one sequence over ranks.
    """

    file: Annotated[tyro.conf.Positional[Path | None], arg(metavar="FILE")] = None
    """A profile or an instance."""
    model: OptionalModel = None
    device: str | None = None
    """With --model: the device to plan for: h100-80g (default), a100-80g, h200, h800, a40, host, or a .json file."""
    gpus: int | None = None
    """Number of devices; by default 1, or the instance's. For several, a profile must have their degrees."""
    dtype: DtypeName = None
    method: Method = "auto"
    time_limit: float = 10.0
    """Limit of the search in counted work, about seconds on an idle core; Ctrl-C ends it early."""
    explain_gain: bool = False
    """With --model: also explain the predicted gain. --json has the explanation instead of the plan."""
    compare: bool = False
    """Also show the plans of the other methods, by the same cost model."""
    output: Path = Path("plan.json")
    """File of the plan."""
    picture: Annotated[Path | None, arg(metavar="FILE")] = None
    """Also draw the plan, as .png or .svg."""
    json: Json = None

    def execute(self) -> int:
        from mosaic.solver import SearchOptions
        from mosaic.solver.limits import SearchLimits
        from mosaic.solver.runnable import plan_to_run

        method = method_of(self.method)
        basis = find_basis(self)
        if self.file is not None and any(t and t.resolve() == self.file.resolve() for t in (self.output, self.json)):
            raise ValueError(f"--output {self.file} would overwrite the input; name another file")
        graph, cost, device, count = basis.graph, basis.cost, basis.device, basis.num_devices
        with first_interrupt() if method.can_be_stopped else nullcontext() as stop:
            should_stop = stop.is_set if stop is not None else None
            limits = SearchLimits(effort=self.time_limit, seconds=10 * self.time_limit, should_stop=should_stop)
            search = SearchOptions(limits=limits)
            plan = plan_to_run(self.method, graph, cost, device, num_devices=count, search=search)
            plan = replace(plan, foreign_cpu_share=basis.foreign_cpu_share)
            save(plan, self.output)
        console = console_beside(self.json)
        console.print(plan_table(plan, graph))
        console.print(proof_of(plan), *basis.notes, sep="\n", highlight=False, markup=False)
        result: Plan | Gain = plan
        if self.explain_gain and basis.counted is not None and basis.hardware is not None:
            from mosaic.cli.gain import explain

            result = explain(plan, cost, basis.counted.counts, basis.hardware)
            result.print(console)
        write_json(result, self.json)
        if limits.is_stopped:
            Console(stderr=True).print(f"mosaic: stopped; {self.output} has the best plan so far", style="red")
            return 130
        if self.compare:
            from mosaic.solver.compare import compare

            rows = compare(graph, cost, device, num_devices=count, search=search)
            console.print(comparison_table(rows))
        if self.picture is not None:
            save_figure(plan_figure(plan), self.picture)
        console.print(f"wrote {self.output}")
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """Modules, times and machine to plan for, and the counts if operators were counted."""

    graph: ModuleGraph
    cost: Cost
    device: Device
    num_devices: int
    notes: tuple[str, ...] = ()
    foreign_cpu_share: float = 0.0
    counted: Counted | None = None
    hardware: Hardware | None = None


def find_basis(command: PlanCommand) -> Basis:
    """Reads a profile or an instance, or counts operators for a described device.

    Raises:
        ValueError: Options contradict each other or the file.
    """
    if (command.file is None) == (command.model is None):
        raise ValueError("give either FILE (a profile or an instance) or --model FILE:FACTORY")
    if command.gpus is not None and not 1 <= command.gpus <= MAX_DEVICES:
        raise ValueError(f"gpus={command.gpus}; use 1 to {MAX_DEVICES}")
    if command.model is not None:
        return _counted(command.model, command.device or "h100-80g", command)
    assert command.file is not None
    for name, value in (("device", command.device), ("dtype", command.dtype), ("explain-gain", command.explain_gain)):
        if value:
            raise ValueError(f"{command.file} has only times: pass --model instead of the file, or leave out --{name}")
    if _is_instance(command.file):
        instance = load(Instance, command.file)
        graph, device, count = instance.graph, instance.device, instance.num_devices
        if command.gpus not in (None, count):
            raise ValueError(f"gpus={command.gpus}, but {command.file} is for {count} devices: leave out --gpus")
        return Basis(graph=graph, cost=TableCost(instance), device=device, num_devices=count)
    measured = load(Profile, command.file)
    return Basis(
        graph=measured.graph,
        cost=CostModel.from_profile(measured),
        device=measured.device,
        num_devices=1 if command.gpus is None else command.gpus,
        foreign_cpu_share=measured.environment.foreign_cpu_share,
    )


def proof_of(plan: Plan) -> str:
    """Describes the proven quality of a plan."""
    record = plan.search
    if record.status == "optimal":
        text = f"proven: no plan of whole modules is predicted faster ({record.method}, {record.seconds:.3f} s)"
    elif record.bound_ms > 0:
        text = f"no plan is predicted faster than {record.bound_ms:.2f} ms ({record.method}, {record.seconds:.3f} s)"
    else:
        text = f"planned by {record.method} in {record.seconds:.3f} s, without a bound"
    if record.simulated_ms > 0:
        text += f"; simulated step over a shared network: {record.simulated_ms:.2f} ms, the best of several plans"
    return text


def _is_instance(path: Path) -> bool:
    """Returns True if a file looks like an instance; its reader reports errors."""
    try:
        raw = json.loads(read(path))
    except (ValueError, RecursionError):
        return False
    return isinstance(raw, dict) and "num_devices" in raw and "modules" in raw


def _counted(model: str, device: str, command: PlanCommand) -> Basis:
    """Counts a model's operators on meta tensors and predicts their times on a described device."""
    from mosaic.cli.counting import count_workload
    from mosaic.cost.analytic_cost import ASSUMED_CONTENTION, AnalyticCost
    from mosaic.cost.degrees import degrees_to_measure
    from mosaic.hardware import find_cluster

    cluster = find_cluster(device, command.gpus)
    described, gpus = cluster.hardware, cluster.num_devices
    counted = count_workload(model, degrees_to_measure(gpus), kind=described.kind, dtype=command.dtype)
    cost = AnalyticCost(counted.counts, cluster)
    notes = [
        f"predicted from counted operators for {described.name} ({described.source}); nothing was measured",
        f"counted in {counted.dtype}: {counted.description}",
        ASSUMED_CONTENTION,
    ]
    times: Cost = cost
    if gpus > 1:  # communication of several GPUs, in place of gradient reduction without overlap
        from mosaic.cost.communication import RankedCost

        times = RankedCost(cost, counted.traffic, cost.cluster, gpus, included_ms=cost.communication_ms)
        if counted.unknown:
            names = ", ".join(counted.unknown)
            notes.append(f"no routing is predicted for {names}: their results or batch cannot be counted")
    return Basis(
        graph=counted.graph,
        cost=times,
        device=described.device(),
        num_devices=gpus,
        notes=tuple(notes),
        counted=counted,
        hardware=described,
    )


@contextmanager
def first_interrupt() -> Iterator[threading.Event]:
    """Yields an event that the first interrupt in the block sets; a second raises KeyboardInterrupt."""
    interrupted = threading.Event()
    before = signal.getsignal(signal.SIGINT)

    def stop(*_: object) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, stop)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
