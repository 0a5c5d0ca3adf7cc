"""``mosaic bench``: one question about a device, answered as a table, a JSON file and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from mosaic.cli.options import BackendName, Json, OptionalModel, console_beside, open_named_backend, write_json
from mosaic.errors import MosaicError

if TYPE_CHECKING:
    from mosaic.profiler import Subject


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure the sharing of a GPU's SMs: one question per run, with a table, a JSON file and a picture.

    pool: the cost of a new context and stream, against one from the pool.
    scaling: the time of a kernel or a module at every quota.
    interference: the slowdown of two kernels side by side, over quotas.
    isolation: the SMs that a partition really uses, and the delay of a short kernel beside a long one.
    overlap: the same two modules one after the other, on plain and prioritised streams, and on partitions.

    Needs an NVIDIA GPU from Volta on and exits with 4 without one. --backend host runs the same measurement on CPU
    cores, as a dry run.
    """

    question: tyro.conf.Positional[Literal["pool", "scaling", "interference", "isolation", "overlap"]]
    """Question to answer."""
    size: Literal["full", "quick", "tiny"] = "full"
    """quick: fewer quotas and repetitions; tiny: the smallest sizes that run all code; their times mean little."""
    seconds: float = float("inf")
    """Stop after about this many seconds, keep the results so far, and name the rest."""
    model: OptionalModel = None
    backend: BackendName = "cuda"
    output: Path = Path("mosaic-bench")
    """Folder for QUESTION.json and QUESTION.png."""
    json: Json = None

    def execute(self) -> None:
        from mosaic.microbench import QUESTIONS, BenchSettings, Budget, Setup

        question = QUESTIONS[self.question]
        if self.model is not None and not question.takes_subjects:
            names = " and ".join(name for name, question in QUESTIONS.items() if question.takes_subjects)
            raise ValueError(f"--model goes with {names}; {self.question} measures kernels of its own")
        budget = Budget(self.seconds)
        backend = open_named_backend(self.backend or "cuda")
        is_tiny, is_pair = self.size == "tiny", self.question == "overlap"
        settings = BenchSettings.tiny() if is_tiny else BenchSettings.fit(backend, quick=self.size == "quick")
        subjects = () if self.model is None else _subjects(self.model, backend.torch_device, pair=is_pair)
        console = console_beside(self.json)
        console.print(f"{question.name}: {question.asks} Measuring {backend.device.name}", highlight=False)
        result = question.answer(Setup(backend=backend, settings=settings, budget=budget, subjects=subjects))
        console.print(question.table(result))
        files = question.write(result, self.output)
        console.print(f"wrote {' and '.join(map(str, files))}", highlight=False)
        write_json(result.content(), self.json)


def _subjects(where: str, device: Any, *, pair: bool) -> Sequence[Subject]:
    """Finds the modules of a user's model on the measured device; all, or two independent ones."""
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
