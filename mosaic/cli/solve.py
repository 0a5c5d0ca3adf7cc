"""``mosaic solve``: plans an instance from a file, or checks a plan against it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from tyro.conf import arg

from mosaic.errors import InvalidPlanError

if TYPE_CHECKING:
    from mosaic.solver.instance import Instance
    from mosaic.solver.problem_file import Answer


@dataclass(frozen=True, kw_only=True)
class Solve:
    """Plan an instance: a machine and modules with their option tables, in one JSON file that needs no profile.

    The format is described in mosaic/solver/README.md. Every plan is checked by code that shares nothing with the
    solvers. Exits with 0 and a status (optimal or feasible), or with 3 and the reasons where there is no plan.
    """

    instance: Annotated[tyro.conf.Positional[Path], arg(metavar="FILE")]
    """The instance."""
    method: Literal["exact", "heuristic", "gahc", "sequential", "brute_force"] = "exact"
    """exact proves its plan best, or gives a bound; heuristic is where it starts; gahc is the paper's Algorithm 1."""
    time_limit: float = 10.0
    """Seconds for exact and heuristic, which then give the best so far; 0 gives the sequential plan at once."""
    seed: int = 0
    """Seed of the heuristic's restarts."""
    check: Annotated[Path | None, arg(metavar="PLAN")] = None
    """Solve nothing: check this plan, or the plan of this answer, against the instance. Exits with 1 if it breaks a
    rule."""
    json: Annotated[Path | None, arg(metavar="FILE")] = None
    """Write status, objective_ms, bound_ms, plan and reasons here; - for standard output."""


def solve(given: Solve) -> None:
    """Plans or checks, writes the answer, prints it in one line."""
    from mosaic.artifact import load, to_json, write_text
    from mosaic.solver.instance import Instance
    from mosaic.solver.problem_file import solve_instance

    instance = load(Instance, given.instance)
    if given.check is not None:
        _check(instance, given.check)
        return
    answer, error = solve_instance(instance, method=given.method, time_limit=given.time_limit, seed=given.seed)
    to_stdout = given.json is not None and str(given.json) == "-"
    if to_stdout:
        print(to_json(answer), end="")
    elif given.json is not None:
        write_text(to_json(answer), given.json)
    if error is not None:
        raise error
    print(_line(answer), file=sys.stderr if to_stdout else sys.stdout)


def _line(answer: Answer) -> str:
    bound = "no bound" if answer.bound_ms is None else f"bound {answer.bound_ms:.6f} ms"
    stages = len(answer.plan.stages) if answer.plan else 0
    return (
        f"{answer.instance}: {answer.status}, {answer.objective_ms:.6f} ms in {stages} stages, {bound}, "
        f"{answer.seconds:.3f} s"
    )


def _check(instance: Instance, path: Path) -> None:
    from mosaic.artifact import load
    from mosaic.errors import InvalidFileError
    from mosaic.plan import Plan
    from mosaic.solver.checker import check_plan
    from mosaic.solver.problem_file import Answer

    try:
        plan = load(Plan, path)
    except InvalidFileError:
        answer = load(Answer, path)
        if answer.plan is None:
            raise InvalidPlanError(f"{path} is an answer without a plan: {'; '.join(answer.reasons)}") from None
        plan = answer.plan
    verdict = check_plan(instance, plan)
    if not verdict.is_valid:
        raise InvalidPlanError(
            f"{path} breaks the rules of {instance.name}" + "".join(f"\n  - {problem}" for problem in verdict.problems)
        )
    print(f"{instance.name}: the plan keeps every rule, {verdict.objective_ms:.6f} ms")
