"""The demo's plain loop in a process of its own: it knows nothing of Mosaic's engine; see ``mosaic.child``."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mosaic.child import Child


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


class PlainProcess(Child):
    """The caller's side of the plain loop."""

    def __init__(self, settings: PlainSettings) -> None:
        super().__init__("mosaic.demo.plain", json.dumps(_as_dict(settings)))

    def train(self, steps: int) -> list[float]:
        """Takes training steps; returns their times in milliseconds."""
        times: list[float] = self.ask({"do": "train", "steps": steps})
        return times

    def timeline(self, steps: int) -> dict[str, Any]:
        """Takes recorded steps; returns a timeline as JSON data."""
        timeline: dict[str, Any] = self.ask({"do": "timeline", "steps": steps})
        return timeline

    def retrieval(self) -> dict[str, float]:
        """Evaluates its model."""
        found: dict[str, float] = self.ask({"do": "retrieval"})
        return found


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
    from mosaic.engine.host.plain_timeline import recorded

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
