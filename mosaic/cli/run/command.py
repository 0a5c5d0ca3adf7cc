"""``mosaic run``: its options, here and under torchrun."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from mosaic.artifact import load
from mosaic.cli.options import Json, Method, Model, Strict, console_beside, write_json
from mosaic.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Run:
    """Train a model for some steps, plain and colocated in turn, and print the measurements.

    The default loss is the mean square of the outputs. Under torchrun
    (torchrun --nproc-per-node 2 --no-python mosaic run --model train.py:make) it trains on all ranks, in turn with
    data-parallel training, and the model's sample is a rank's batch.
    """

    model: Model
    plan: Path | None = None
    """A plan of `mosaic plan`, which runs unchanged. By default a plan is solved now."""
    method: Method = "auto"
    compare: bool = False
    """Measure the plans of all methods one after the other."""
    steps: int = 20
    """Steps of each."""
    output: Path | None = None
    """Folder for timeline.png and trace.json."""
    strict: Strict = False
    json: Json = None

    def execute(self) -> None:
        """Trains; under torchrun on all ranks."""
        from mosaic.cli.run.on_ranks import is_launched
        from mosaic.ranks.compare import COMPARED

        if self.steps < 1:
            raise ValueError(f"steps={self.steps}; use 1 or more")
        if self.compare and (self.plan is not None or self.method != "auto"):
            raise ValueError("--compare measures the plans of all methods; leave --plan and --method out")
        methods = COMPARED if self.compare else (self.method,)
        fixed = load(Plan, self.plan) if self.plan is not None else None
        (self._run_on_ranks if is_launched() else self._run_here)(methods, fixed)

    def _run_here(self, methods: tuple[str, ...], fixed: Plan | None) -> None:
        from mosaic.cli.run.here import run_in_turn
        from mosaic.cli.workload import load_workload
        from mosaic.profiler import ProfileSettings
        from mosaic.report.progress import Progress

        console = console_beside(self.json)
        settings = ProfileSettings(strict=self.strict)
        measured = {}
        for method in methods:
            with Progress() as progress:
                measured[method] = run_in_turn(
                    self.model,
                    load_workload(self.model),
                    fixed,
                    self.steps,
                    progress,
                    settings=settings,
                    output=self.output,
                    method=method,
                )
            if self.compare:
                console.print(f"planned by {method}:", highlight=False)
            console.print(measured[method].description, highlight=False)
            for name, value in measured[method].figures().items():
                console.print(f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}", highlight=False)
        rows = {method: dataclasses.asdict(result) for method, result in measured.items()}
        write_json(json.dumps(rows if self.compare else rows[methods[0]], indent=2) + "\n", self.json)

    def _run_on_ranks(self, methods: tuple[str, ...], fixed: Plan | None) -> None:
        from mosaic.cli.run.on_ranks import measured_table, run_on_ranks
        from mosaic.profiler import ProfileSettings

        if self.output is not None:
            raise ValueError("--output draws what one process ran; leave it out under torchrun")
        settings = ProfileSettings(strict=self.strict)
        measured, is_first = run_on_ranks(self.model, methods, fixed, self.steps, settings)
        if is_first:
            console_beside(self.json).print(measured_table(measured))
            write_json(measured, self.json)
