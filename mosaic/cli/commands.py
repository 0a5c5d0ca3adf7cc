"""What each command does, once its arguments are read."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from mosaic.artifact import load, save, to_json, write_text
from mosaic.plan import Plan
from mosaic.report import Progress, graph_table, profile_table

if TYPE_CHECKING:
    from mosaic.cli import main as options
    from mosaic.profiler import ProfileSettings


def doctor(given: options.Doctor) -> None:
    """``mosaic doctor``."""
    from mosaic.cli.doctor.machine import collect_report, render

    if given.model is not None:
        _doctor_of_model(given.model, given.json)
        return
    if given.trace:
        _doctor_of_traces(given.trace, given.json)
        return
    report = collect_report()
    if given.json is not None:
        _write(json.dumps(dataclasses.asdict(report), indent=2) + "\n", given.json)
    if not _takes_stdout(given.json):
        render(report, Console())


def _doctor_of_model(where: str, target: Path | None) -> None:
    from mosaic.cli.doctor.model import examine_model, render
    from mosaic.errors import UnsupportedModelError

    report = examine_model(where)
    if target is not None:
        _write(json.dumps(dataclasses.asdict(report), indent=2) + "\n", target)
    if not _takes_stdout(target):
        render(report, Console(soft_wrap=True))
    if report.refused:
        raise UnsupportedModelError(f"{where} cannot be colocated as it is; the findings say why and what to do")


def _doctor_of_traces(paths: Sequence[Path], target: Path | None) -> None:
    from mosaic.cli.doctor.ranks import examine_traces, render

    found = examine_traces(paths)
    if target is not None:
        said = {**dataclasses.asdict(found), "sentences": found.sentences()}
        _write(json.dumps(said, indent=2) + "\n", target)
    if not _takes_stdout(target):
        render(found, Console(soft_wrap=True))


def demo(given: options.Demo) -> None:
    """``mosaic demo``."""
    from mosaic.demo.run import DemoSettings, run_demo
    from mosaic.demo.summary import summary_table

    console = Console(stderr=_takes_stdout(given.json))
    settings = DemoSettings(
        output=given.output,
        cache=given.cache or given.output / "cache",
        seed=given.seed,
        rounds=given.rounds,
        steps_per_round=given.steps_per_round,
        max_foreign_share=given.max_foreign_share,
    )
    with Progress() as progress:
        record = run_demo(settings, progress, console)
    console.print(summary_table(record))
    console.print(f"files are in {given.output}: {', '.join(sorted(p.name for p in given.output.glob('*.*')))}")
    _also_write(record, given.json)


def profile(given: options.Profile) -> None:
    """``mosaic profile``."""
    from mosaic.cli.profile import Request, measure, measure_links
    from mosaic.profiler import default_cache_folder

    links = measure_links(given.backend, given.cluster)
    if links is not None and links.rank > 0:
        return  # all ranks measure their links, the first one the modules
    options = {field.name: getattr(given, field.name) for field in dataclasses.fields(Request) if field.name != "links"}
    options["cache"] = given.cache or default_cache_folder()
    found = measure(Request(**options, links=links))
    measured = found.profile
    save(measured, given.output)
    console = Console(stderr=_takes_stdout(given.json))
    console.print(graph_table(measured.graph))
    ran = tuple(sample for sample in measured.samples if sample.infeasible is None)
    console.print(profile_table(dataclasses.replace(measured, samples=ran)))  # the others are in the notes
    for note in found.notes:
        console.print(note, highlight=False, markup=False)
    console.print(f"wrote {given.output}")
    if given.fit is not None:
        from mosaic.cli.fitting import fit_groups

        for line in fit_groups(measured, given.form, given.fit):
            console.print(line, highlight=False, markup=False)
    _also_write(measured, given.json)


def plan(given: options.PlanCommand) -> None:
    """``mosaic plan``."""
    from mosaic.cli.planning import make_plan

    _also_write(make_plan(given), given.json)


def run(given: options.Run) -> None:
    """``mosaic run``."""
    from mosaic.cli.run.on_ranks import is_launched
    from mosaic.profiler import ProfileSettings
    from mosaic.ranks.compare import COMPARED

    if given.steps < 1:
        raise ValueError(f"steps={given.steps}; use 1 or more")
    if given.compare and (given.plan is not None or given.method != "auto"):
        raise ValueError("--compare measures the plans of all methods; leave --plan and --method out")
    fixed = load(Plan, given.plan) if given.plan is not None else None
    methods = COMPARED if given.compare else (given.method,)
    settings = ProfileSettings(refuse_share=given.max_foreign_share)
    (_run_on_ranks if is_launched() else _run_here)(given, methods, fixed, settings)


def _run_here(given: options.Run, methods: Sequence[str], fixed: Plan | None, settings: ProfileSettings) -> None:
    from mosaic.cli.run.here import run_in_turn
    from mosaic.cli.workload import load_workload

    console = Console(stderr=_takes_stdout(given.json))
    measured = {}
    for method in methods:
        with Progress() as progress:
            measured[method] = run_in_turn(
                given.model,
                load_workload(given.model),
                fixed,
                given.steps,
                progress,
                settings=settings,
                output=given.output,
                method=method,
            )
        if given.compare:
            console.print(f"planned by {method}:", highlight=False)
        console.print(measured[method].description, highlight=False)
        for name, value in measured[method].figures().items():
            console.print(f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}", highlight=False)
    if given.json is not None:
        told = {method: dataclasses.asdict(one) for method, one in measured.items()}
        _write(json.dumps(told if given.compare else told[methods[0]], indent=2) + "\n", given.json)


def _run_on_ranks(given: options.Run, methods: Sequence[str], fixed: Plan | None, settings: ProfileSettings) -> None:
    from mosaic.cli.run.on_ranks import measured_table, run_on_ranks

    if given.output is not None:
        raise ValueError("--output draws what one process ran; leave it out under torchrun")
    found, is_first = run_on_ranks(given.model, methods, fixed, given.steps, settings)
    if is_first:
        Console(stderr=_takes_stdout(given.json)).print(measured_table(found))
        _also_write(found, given.json)


def _takes_stdout(target: Path | None) -> bool:
    return target is not None and str(target) == "-"


def _also_write(value: Any, target: Path | None) -> None:
    if target is not None:
        _write(to_json(value), target)


def _write(text: str, target: Path) -> None:
    if _takes_stdout(target):
        sys.stdout.write(text)
    else:
        write_text(text, target)
