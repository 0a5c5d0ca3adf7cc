"""The plain loop in a process of its own, so that it runs at its best: all cores, torch's own threads and waiting.

Mosaic's process has OpenMP wait passively, which its lanes need and which slows a plain loop down. This process
has torch's defaults, knows nothing of Mosaic's engine, and answers one request at a time on its standard streams.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mosaic.errors import MosaicError


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainSettings:
    """What both loops share."""

    cache: Path
    """Folder of the data set."""
    seed: int
    """Seed of model, batches and dropout."""
    batch_size: int
    """Samples in a batch."""
    steps: int
    """Steps that will be asked for in all."""
    learning_rate: float
    """Of AdamW."""


class PlainProcess:
    """The caller's side of the plain loop."""

    def __init__(self, settings: PlainSettings) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mosaic.demo.plain", json.dumps({**_as_dict(settings)})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,  # an interrupt is for the caller, who ends this process
        )

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def train(self, steps: int) -> list[float]:
        """Takes training steps; returns their times in milliseconds."""
        times: list[float] = self._ask({"do": "train", "steps": steps})
        return times

    def timeline(self, steps: int) -> dict[str, Any]:
        """Takes recorded steps; returns a timeline as JSON data."""
        timeline: dict[str, Any] = self._ask({"do": "timeline", "steps": steps})
        return timeline

    def retrieval(self) -> dict[str, float]:
        """Evaluates its model."""
        found: dict[str, float] = self._ask({"do": "retrieval"})
        return found

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise MosaicError(
                f"the plain loop's process ended with exit code {self._process.wait()}; see its error above"
            )
        return json.loads(answer)

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        if error is not None:
            self._process.kill()
        self._process.wait()
        self._process.stdout.close()


def _as_dict(settings: PlainSettings) -> dict[str, Any]:
    return {
        "cache": str(settings.cache),
        "seed": settings.seed,
        "batch_size": settings.batch_size,
        "steps": settings.steps,
        "learning_rate": settings.learning_rate,
    }


def _serve(settings: PlainSettings) -> None:
    """Body of the process: trains, records or evaluates on request."""
    import torch

    from mosaic.artifact import to_json
    from mosaic.demo.data import batches, load
    from mosaic.demo.loop import retrieval
    from mosaic.demo.loop import train as train_on
    from mosaic.demo.model import TriModal
    from mosaic.engine.plain_timeline import recorded

    data = load(settings.cache, seed=settings.seed)
    torch.manual_seed(settings.seed)
    model = TriModal()
    optimizer = torch.optim.AdamW(model.parameters(), settings.learning_rate)
    stream = list(batches(data.train, settings.batch_size, settings.seed, settings.steps))
    towers = {name: module for name, module in model.named_children() if name in ("image", "audio", "text")}
    position = 0
    for line in sys.stdin:
        request = json.loads(line)
        answer: Any
        chosen = [stream[(position + offset) % len(stream)] for offset in range(request.get("steps", 0))]
        position += len(chosen)
        if request["do"] == "train":
            answer = list(timed_steps(lambda batch: train_on(model, [batch], optimizer), chosen))
        elif request["do"] == "timeline":
            with recorded(towers, len(os.sched_getaffinity(0))) as recorder:
                for batch in chosen:
                    train_on(model, [batch], optimizer)
                    recorder.end_step()
            answer = json.loads(to_json(recorder.timeline()))
        else:
            answer = retrieval(model, data.test)
        print(json.dumps(answer), flush=True)


def timed_steps(step: Any, batches: list[Any]) -> Iterator[float]:
    """Takes a step on every batch; yields each one's wall time in milliseconds."""
    for batch in batches:
        start = time.perf_counter()
        step(batch)
        yield (time.perf_counter() - start) * 1e3


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    _serve(PlainSettings(**{**given, "cache": Path(given["cache"])}))
