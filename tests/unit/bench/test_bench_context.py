"""The study of long sequences, in small, and the tables that are made of it."""

from __future__ import annotations

from itertools import chain

import pytest

from bench.context import balance, papers, planning
from bench.context.__main__ import packed_blocks
from bench.harness import study_of
from bench.record import Study
from mosaic.profiler import ForeignLoad


@pytest.fixture(scope="module")
def study() -> Study:
    figures = chain(
        planning.planning("mp", 2048, (2,)),
        balance.balance("ee", 4096, 4, 2),
        balance.others(),
        balance.received("mp of ~1k, 16384 tokens", lambda seed: packed_blocks(16384, 1024, seed), 4, 1),
        papers.table_4("ep", 16384, 8, 1),
        papers.figure_12("mp", 16384, 8),
    )
    return study_of("bench_context", list(figures), ForeignLoad())


def value(study: Study, name: str) -> float:
    (found,) = (one.value for one in study.figures if one.name == name)
    assert found is not None
    return found


def test_planning_is_timed_and_ranks_come_out_even(study: Study):
    assert value(study, "mp, 2048 tokens, 2 ranks: most over mean after trades") < 1.05
    timed = [one for one in study.figures if one.name.endswith(", ms") and one.source == "measured"]
    assert len(timed) == 6
    assert all(one.value > 0 for one in timed)
