"""The promises of every transport, on threads and on processes; ``ranks.transport_promises`` has the programs."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks.nursery import run_program
from ranks.transport_promises import PROMISES, SIZE

from bench.pipeline.in_process import InProcess


def test_threads_keep_all_promises():
    for promise in PROMISES:
        InProcess(SIZE).run(promise)


@pytest.mark.parametrize("program", ["keeps_promises", "keeps_promises_by_pairs"])
def test_processes_keep_all_promises(program: str, tmp_path: Path):
    ended = run_program(f"ranks.programs.pipeline.executed:{program}", SIZE, tmp_path / "ranks", seconds=60.0)
    for one in ended:
        assert {promise.__name__ for promise in PROMISES} <= set(one.said.splitlines()), one
