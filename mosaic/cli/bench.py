"""``mosaic bench``: answers one question about a device with a table, a JSON file and a picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from mosaic.cli.options import BackendName, Json, console_beside, open_named_backend, write_json


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure how the SMs of a GPU can be shared: a table, a JSON file and a picture for one question per run.

    pool: the cost of creating a context and a stream, and of acquiring them from the pool.
    scaling: the time of a kernel at every quota.
    interference: the slowdown of two kernels side by side, over quotas.
    isolation: the SMs that a partition uses, and the delay of a short kernel beside a long one.
    overlap: the step of two modules one after the other, on plain and prioritised streams, and on partitions.

    Needs an NVIDIA GPU (Volta or newer); exits with 4 if there is none. --backend host runs the same measurement on CPU
    cores, as a dry run.
    """

    question: tyro.conf.Positional[Literal["pool", "scaling", "interference", "isolation", "overlap"]]
    """Question to answer."""
    size: Literal["full", "quick", "tiny"] = "full"
    """quick: fewer quotas and repetitions; tiny: smallest sizes, to exercise the code; the times mean little."""
    seconds: float = float("inf")
    """Stop after about this many seconds, write the results so far, and list what was not measured."""
    backend: BackendName = "cuda"
    output: Path = Path("mosaic-bench")
    """Folder for QUESTION.json and QUESTION.png."""
    json: Json = None

    def execute(self) -> None:
        from mosaic.microbench import QUESTIONS, BenchSettings, Budget, Setup

        question = QUESTIONS[self.question]
        budget, backend = Budget(self.seconds), open_named_backend(self.backend or "cuda")
        fit = BenchSettings.tiny() if self.size == "tiny" else BenchSettings.fit(backend, quick=self.size == "quick")
        console = console_beside(self.json)
        console.print(f"{question.name}: {question.asks} Measuring {backend.device.name}", highlight=False)
        result = question.answer(Setup(backend=backend, settings=fit, budget=budget))
        console.print(question.table(result))
        files = question.write(result, self.output)
        console.print(f"wrote {' and '.join(map(str, files))}", highlight=False)
        write_json(result.content(), self.json)
