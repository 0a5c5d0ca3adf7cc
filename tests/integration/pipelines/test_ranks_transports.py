"""The promises of every transport, on threads and on processes; ``ranks.transport_promises`` has the programs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from ranks.nursery import run_program
from ranks.transport_promises import PROMISES, SIZE

from bench.pipeline.in_process import InProcess

BOUND_S = 60.0


def kept_by_threads(place: Path) -> set[str]:
    for promise in PROMISES:
        InProcess(SIZE).run(promise)
    return {promise.__name__ for promise in PROMISES}


def kept_by_processes(place: Path, program: str = "keeps_promises") -> set[str]:
    ended = run_program(f"ranks.programs.pipeline.executed:{program}", SIZE, place, seconds=BOUND_S)
    return set.intersection(*({line for line in one.said.splitlines() if line.isidentifier()} for one in ended))


KEPT: dict[str, Callable[[Path], set[str]]] = {
    "in_process": kept_by_threads,
    "distributed": kept_by_processes,
    "distributed, a group for each pair": partial(kept_by_processes, program="keeps_promises_by_pairs"),
}


@pytest.fixture(scope="module", params=KEPT)
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    return KEPT[request.param](tmp_path_factory.mktemp("transport") / "ranks")


@pytest.mark.parametrize("promise", [promise.__name__ for promise in PROMISES])
def test_a_promise_is_kept(kept: set[str], promise: str):
    assert promise in kept
