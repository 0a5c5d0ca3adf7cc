"""A day's worker, phase by phase: ``python -m bench.retrain.phases FOLDER DAY`` prints seconds as JSON."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def main() -> None:
    """Goes through what the worker does up to the day's next step."""
    began = time.perf_counter()
    seconds: dict[str, float] = {}

    def ends(phase: str) -> None:
        seconds[phase] = time.perf_counter() - began - sum(seconds.values())

    import torch
    import torch._dynamo  # which each of torch's optimizers loads

    ends("loading torch")
    from mosaic.retrain.folder import Folder
    from mosaic.retrain.recipe import read_recipe
    from mosaic.retrain.working import worker  # noqa: F401
    from mosaic.retrain.working.work import Work
    from mosaic.train.day import Day
    from mosaic.train.environment import use_repeatable_kernels
    from mosaic.train.signals import StopRequests

    ends("loading Mosaic")
    folder = Folder(Path(sys.argv[1]))
    work = Work(folder, folder.day(sys.argv[2]), read_recipe(folder.recipe))
    samples, crew = work.samples(), work.crew()
    settings = work.settings(crew, None)
    use_repeatable_kernels(torch.device("cpu"))
    ends("recipe, user's file and data")
    day = Day(work.program, samples, settings, crew)
    ends("model, stored plan and room for copies")
    day.train(StopRequests(), to=1)  # the step is behind it: only the checkpoint and the loader's workers are missing
    ends("checkpoint, workers, and saving again")
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
