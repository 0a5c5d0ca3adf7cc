"""Every measurement of ``bench.gpu`` in order of worth: a run that is cut short has the most important ones.

Nothing heavy is imported here: the process that starts the measurements never loads torch, so nothing can break it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from bench.bundle import TOP

if TYPE_CHECKING:
    from bench.gpu.bench import Bench
    from bench.record import Figure

PRELOADED = (*("torch._dynamo", "numpy", "pytest", "bench.gpu.models", "bench.gpu.questions", "bench.cost.study"),)
"""Modules that the server loads from which measurements are forked."""
MODEL_NAMES = ("clip", "qwen3-vl", "unified-io-2", "imagebind", "ofasys", "ctvlm")
"""Names of ``mosaic.models.PAPER_MODELS``, in order of growing complexity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    name: str
    """Key; slashes make groups."""
    asks: str
    function: str
    """``module:function``, which takes a ``Bench`` and yields figures as they are measured."""
    arguments: dict[str, Any] = field(default_factory=dict)
    seconds: float
    """Its share of a run of nine minutes."""
    environment: dict[str, str] = field(default_factory=dict)
    """Set before CUDA starts."""
    most_seconds: float | None = None
    """Its bound in place of one by its share, for what may take much less or much more."""
    in_dry_run: bool = True
    """True if a dry run includes it; False for repetitions of the same code at other sizes."""

    def resolve(self) -> Callable[[Bench], Iterator[Figure]]:
        """Imports the function and returns it with its keywords."""
        module, _, name = self.function.partition(":")
        return partial(getattr(importlib.import_module(module), name), **self.arguments)


def _question(name: str, asks: str, seconds: float, grid: int = 8) -> Measurement:
    arguments = {"name": name, "grid": grid}
    function = "bench.gpu.questions:measure_question"
    return Measurement(name=name, asks=asks, function=function, arguments=arguments, seconds=seconds)


def _unknown(name: str, asks: str, function: str, seconds: float, **environment: str) -> Measurement:
    return Measurement(
        name=f"unknowns/{name}",
        asks=asks,
        function=f"bench.gpu.questions:{function}",
        seconds=seconds,
        environment=environment,
    )


def _models(batch: int, seconds: float) -> tuple[Measurement, ...]:
    return tuple(
        Measurement(
            name=f"models/{name}/{batch}",
            asks=f"how long is a step of {name} at a batch of {batch}, plain and with Mosaic?",
            function="bench.gpu.models:measure_model",
            arguments={"name": name, "batch": batch},
            seconds=seconds,
            in_dry_run=batch == 2,
        )
        for name in MODEL_NAMES
    )


def _tests(*, laws: bool) -> Iterator[Measurement]:
    """Yields the gpu tests by file: those of laws go through so many cases that they take what time is left."""
    files = [file for folder in ("gpu", "contract") for file in sorted((TOP / "tests" / folder).glob("test_*.py"))]
    for file in files:
        if file.stem.startswith("test_laws") == laws:
            yield Measurement(
                name=f"tests/{file.stem}",
                asks="do these gpu tests pass here?",
                function="bench.gpu.gpu_tests:run_tests",
                arguments={"file": file.relative_to(TOP).as_posix()},
                seconds=15 if laws else 5,
                most_seconds=None if laws else 60,
                in_dry_run=file.parent.name == "contract",
            )


_IN_ORDER = (
    Measurement(
        name="ceilings",
        asks="what can the device do at most?",
        function="bench.gpu.models:measure_ceilings",
        seconds=5,
    ),
    _question("overlap", "what part of a gain comes from quotas, and what from concurrency?", 27),
    *_models(8, 22),
    *_tests(laws=False),
    _question("pool", "what does it cost to make contexts, and to lend them?", 13, grid=4),
    _question("isolation", "does work stay in its partition?", 12, grid=4),
    _question("scaling", "how much time does work take at every quota?", 18, grid=16),
    _unknown(
        "outside-backward",
        "where does a backward run that is started outside of its lane?",
        "measure_outside_backward",
        3,
    ),
    _unknown("launching", "how much CPU time does a step of small modules take more on lanes?", "measure_launching", 6),
    _unknown("warps", "how many warps are in flight as CLIP trains?", "measure_warps", 8),
    *_models(2, 9),
    *(
        _unknown(
            f"connections-{count}",
            f"do two modules overlap with {count} hardware queues?",
            "measure_connections",
            5,
            CUDA_DEVICE_MAX_CONNECTIONS=str(count),
        )
        for count in (8, 32)
    ),
    _question("interference", "what do kernels cost each other?", 17, grid=4),
    Measurement(
        name="context",
        asks="how long is the slowest rank's attention over a long sequence, by headtail and as planned?",
        function="bench.gpu.long_sequences:measure_long_sequences",
        seconds=12,
    ),
    Measurement(
        name="ranks/pipeline",
        asks="is a pipeline of two ranks on one GPU equal to the plain loop, and what does it cost?",
        function="bench.gpu.pipeline_ranks:measure_pipeline_ranks",
        seconds=8,
    ),
    Measurement(
        name="cost",
        asks="how well are held-out plans of 2 to 8 modules predicted, and what do the plans cost?",
        function="bench.cost.study:measure_cost",
        seconds=10,
    ),
    *_tests(laws=True),
)

MEASUREMENTS = {measurement.name: measurement for measurement in _IN_ORDER}
"""By name, in order of worth."""
