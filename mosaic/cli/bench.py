"""``mosaic bench``: one question about a device, answered as a table, a JSON file and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from mosaic.artifact import to_json, write_text
from mosaic.backends.table import open_backend
from mosaic.errors import MosaicError
from mosaic.microbench import QUESTIONS, BenchSettings, Budget

if TYPE_CHECKING:
    from mosaic.cli.main import Bench
    from mosaic.profiler import Subject


def bench(given: Bench) -> None:
    """Measures, prints the table and leaves the files."""
    question = QUESTIONS[given.question]
    if given.model is not None and not question.takes_subjects:
        takes = " and ".join(name for name, each in QUESTIONS.items() if each.takes_subjects)
        raise MosaicError(f"--model goes with {takes}; {given.question} measures kernels of its own")
    budget = Budget(given.seconds)
    backend = open_backend(given.backend, given.device)
    settings = BenchSettings.tiny() if given.tiny else BenchSettings.fit(backend, quick=given.quick)
    more: dict[str, Any] = {}
    if given.model is not None:
        more["subjects"] = _subjects(given.model, backend.torch_device, pair=given.question == "overlap")
    Console(stderr=True).print(f"{question.name}: {question.asks} Measuring {backend.device.name}", highlight=False)
    result = question.measure(backend, settings, budget, **more)
    to_stdout = given.json is not None and str(given.json) == "-"
    console = Console(stderr=to_stdout)
    console.print(question.table(result))
    written = question.leave(result, given.output)
    console.print(f"wrote {' and '.join(map(str, written))}", highlight=False)
    if to_stdout:
        print(to_json(result), end="")
    elif given.json is not None:
        write_text(to_json(result), Path(given.json))


def _subjects(where: str, device: Any, *, pair: bool) -> Sequence[Subject]:
    """Finds the modules of a user's model, moved to the device that is measured; all, or two that are independent."""
    from mosaic.cli.workload import load_workload, moved
    from mosaic.engine import find_modules

    workload = load_workload(where)
    finding = find_modules(workload.model.to(device), moved(workload.sample, device))
    if not pair:
        return finding.subjects
    for both in combinations(finding.subjects, 2):
        if finding.graph.independent(both[0].name, both[1].name):
            return both
    raise MosaicError(f"no two modules of {where} are independent of each other, which overlap needs")
