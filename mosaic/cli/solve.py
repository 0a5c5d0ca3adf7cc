"""``mosaic solve``: plans an instance from a file, or checks a plan against it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from tyro.conf import arg

from mosaic.errors import InvalidPlanError, MosaicError

if TYPE_CHECKING:
    from rich.console import Console

    from mosaic.plan import Plan
    from mosaic.solver.instances.instance import Instance
    from mosaic.solver.instances.problem_file import Answer
    from mosaic.solver.solve import SearchOptions


@dataclass(frozen=True, kw_only=True)
class Solve:
    """Plan an instance: a machine and modules with their option tables, in one JSON file that needs no profile.

    The format is described in mosaic/solver/README.md. Every plan is checked by code that shares nothing with the
    solvers. Exits with 0 and a status (optimal or feasible), or with 3 and the reasons where there is no plan.
    """

    instance: Annotated[tyro.conf.Positional[Path], arg(metavar="FILE")]
    """The instance."""
    method: Literal[
        "exact",
        "heuristic",
        "gahc",
        "sequential",
        "brute_force",
        "megatron",
        "distmm",
        "distmm-waves",
        "spindle",
        "spindle-optimus",
    ] = "exact"
    """exact proves its plan best, or gives a bound; heuristic is where it starts; gahc is the paper's Algorithm 1; the
    last five are planners to compare with, with whole modules."""
    time_limit: float = 10.0
    """Seconds for exact and heuristic, which then give the best so far; 0 gives the sequential plan at once."""
    seed: int = 0
    """Seed of what the search draws at random."""
    earlier: Annotated[Path | None, arg(name="from", metavar="PLAN")] = None
    """Start from this plan, or the plan of this answer: of the same modules before some came, went or changed, or of
    another number of devices. With exact and heuristic."""
    granularity: float | None = None
    """With gahc: consider multiples of this many percent of a device only, such as 30, 20, 10, 5 or 1; every quota of
    the tables by default."""
    prune: bool = True
    """With gahc: drop merges that cannot beat the best so far (line 11)."""
    cache: bool = True
    """With gahc: evaluate a set of modules once."""
    compare: bool = False
    """Also show what Megatron, DistMM, Spindle and others would plan."""
    explain: bool = False
    """Also say what binds each module's quota, and what more slots, devices or memory would bring."""
    check: Annotated[Path | None, arg(metavar="PLAN")] = None
    """Solve nothing: check this plan, or the plan of this answer, against the instance. Exits with 1 if it breaks a
    rule."""
    json: Annotated[Path | None, arg(metavar="FILE")] = None
    """Write status, objective_ms, bound_ms, plan and reasons here; - for standard output."""


def solve(given: Solve) -> None:
    """Plans or checks, writes the answer, prints it in one line."""
    from rich.console import Console

    from mosaic.artifact import load, to_json, write_text
    from mosaic.solver.instances.instance import Instance
    from mosaic.solver.instances.problem_file import solve_instance

    instance = load(Instance, given.instance)
    if given.check is not None:
        _check(instance, given.check)
        return
    _check_target(given)
    answer, error = solve_instance(
        instance,
        method=given.method,
        time_limit=given.time_limit,
        seed=given.seed,
        earlier=_load_plan(given.earlier) if given.earlier is not None else None,
        search=_search(given),
    )
    to_stdout = given.json is not None and str(given.json) == "-"
    if to_stdout:
        print(to_json(answer), end="")
    elif given.json is not None:
        write_text(to_json(answer), given.json)
    if error is not None:
        raise error
    print(_line(answer), file=sys.stderr if to_stdout else sys.stdout)
    _show(given, instance, answer, Console(stderr=to_stdout))


def _check_target(given: Solve) -> None:
    """Before a search that may take long."""
    if given.json is None or str(given.json) == "-":
        return
    if given.json.is_dir():
        raise MosaicError(f"cannot write {given.json}: Is a directory; name a file in it")
    if given.json.exists() and given.json.samefile(given.instance):
        raise MosaicError(f"--json {given.json} is the instance, which the answer would replace; name another file")


def _search(given: Solve) -> SearchOptions | None:
    """Granularity and ablations; None where none was asked for."""
    if given.granularity is None and given.prune and given.cache:
        return None
    from mosaic.solver.options import QuotaGrid
    from mosaic.solver.solve import SearchOptions

    grid = QuotaGrid() if given.granularity is None else QuotaGrid.of_percent(given.granularity)
    return SearchOptions(grid=grid, prune=given.prune, cache=given.cache)


def _show(given: Solve, instance: Instance, answer: Answer, console: Console) -> None:
    if not given.compare and not given.explain:
        return
    from mosaic.report.comparison import comparison_table
    from mosaic.report.explanation import explanation_table
    from mosaic.solver.compare import compare
    from mosaic.solver.exact.search import SearchLimits
    from mosaic.solver.explain import explain
    from mosaic.solver.instances.instance_cost import TableCost
    from mosaic.solver.solve import SearchOptions

    search = SearchOptions(limits=SearchLimits(seconds=given.time_limit, seed=given.seed))
    graph, cost = instance.graph, TableCost(instance)
    if given.compare:
        rows = compare(graph, cost, instance.device, num_devices=instance.num_devices, search=search)
        console.print(comparison_table(rows))
    if given.explain:
        assert answer.plan is not None
        console.print(explanation_table(explain(answer.plan, graph, cost, search=search)))


def _line(answer: Answer) -> str:
    bound = "no bound" if answer.bound_ms is None else f"bound {answer.bound_ms:.6f} ms"
    stages = len(answer.plan.stages) if answer.plan else 0
    return (
        f"{answer.instance}: {answer.status}, {answer.objective_ms:.6f} ms in {stages} stages, {bound}, "
        f"{answer.seconds:.3f} s"
    )


def _load_plan(path: Path) -> Plan:
    """Reads a plan, or the plan of an answer."""
    from mosaic.artifact import load
    from mosaic.errors import InvalidFileError
    from mosaic.plan import Plan
    from mosaic.solver.instances.problem_file import Answer

    try:
        return load(Plan, path)
    except InvalidFileError as no_plan:
        try:
            answer = load(Answer, path)
        except InvalidFileError as no_answer:
            raise InvalidFileError(f"neither a plan nor an answer: {no_plan}; as an answer: {no_answer}") from None
    if answer.plan is None:
        raise InvalidPlanError(f"{path} is an answer without a plan: {'; '.join(answer.reasons)}")
    return answer.plan


def _check(instance: Instance, path: Path) -> None:
    from mosaic.solver.instances.checker import check_plan

    verdict = check_plan(instance, _load_plan(path))
    if not verdict.is_valid:
        raise InvalidPlanError(
            f"{path} breaks the rules of {instance.name}" + "".join(f"\n  - {problem}" for problem in verdict.problems)
        )
    print(f"{instance.name}: the plan keeps every rule, {verdict.objective_ms:.6f} ms")
