"""All measurements of ``bench.gpu``, by importance.

Imports nothing heavy: the process that starts the measurements does not load torch.
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
"""Modules preloaded by the server that forks measurements."""
MODEL_NAMES = ("clip", "qwen3-vl", "unified-io-2", "imagebind", "ofasys", "ctvlm")
"""Names of ``mosaic.models.PAPER_MODELS``, in order of growing complexity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    name: str
    """Name; slashes separate groups."""
    asks: str
    function: str
    """``module:function``, which takes a ``Bench`` and yields figures as they are measured."""
    arguments: dict[str, Any] = field(default_factory=dict)
    seconds: float
    """Its part of a run of nine minutes."""
    environment: dict[str, str] = field(default_factory=dict)
    """Set before CUDA starts."""
    most_seconds: float | None = None
    """Explicit limit, if its time varies widely."""
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
            asks=f"how long is a step of {name} with a batch of {batch}, plain and with Mosaic?",
            function="bench.gpu.models:measure_model",
            arguments={"name": name, "batch": batch},
            seconds=seconds,
            in_dry_run=batch == 2,
        )
        for name in MODEL_NAMES
    )


def _tests(*, laws: bool) -> Iterator[Measurement]:
    """Yields the GPU tests by file; property tests have so many cases that they use the remaining time."""
    files = [file for folder in ("gpu", "contract") for file in sorted((TOP / "tests" / folder).glob("test_*.py"))]
    for file in files:
        if file.stem.startswith("test_laws") == laws:
            yield Measurement(
                name=f"tests/{file.stem}",
                asks="do these GPU tests pass?",
                function="bench.gpu.gpu_tests:run_tests",
                arguments={"file": file.relative_to(TOP).as_posix()},
                seconds=15 if laws else 5,
                most_seconds=None if laws else 60,
                in_dry_run=file.parent.name == "contract",
            )


_IN_ORDER = (
    Measurement(
        name="ceilings",
        asks="what are the device's peak rates?",
        function="bench.gpu.models:measure_ceilings",
        seconds=5,
    ),
    _question("overlap", "how much of the gain comes from quotas, and how much from concurrency?", 27),
    *_models(8, 22),
    *_tests(laws=False),
    _question("pool", "what do creating and acquiring contexts cost?", 13, grid=4),
    _question("isolation", "does work stay in its partition?", 12, grid=4),
    _question("scaling", "how long do kernels take at each quota?", 18, grid=16),
    _unknown(
        "outside-backward",
        "where does a backward run that is started outside its lane?",
        "measure_outside_backward",
        3,
    ),
    _unknown("launching", "how much CPU time do lanes add to a step of small modules?", "measure_launching", 6),
    _unknown("warps", "how many warps are in flight while CLIP trains?", "measure_warps", 8),
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
    _question("interference", "how much do kernels slow each other down?", 17, grid=4),
    Measurement(
        name="context",
        asks="how long is the slowest rank's attention over a long sequence, with headtail and with lpt?",
        function="bench.gpu.long_sequences:measure_long_sequences",
        seconds=12,
    ),
    Measurement(
        name="ranks/pipeline",
        asks="does a pipeline of two ranks on one GPU equal the plain loop, and what is its overhead?",
        function="bench.gpu.pipeline_ranks:measure_pipeline_ranks",
        seconds=8,
    ),
    Measurement(
        name="cost",
        asks="how accurate are predictions for held-out groups of 2 to 8 modules?",
        function="bench.cost.study:measure_cost",
        seconds=10,
    ),
    *_tests(laws=True),
)

MEASUREMENTS = {measurement.name: measurement for measurement in _IN_ORDER}
"""Measurements by name, by importance."""
