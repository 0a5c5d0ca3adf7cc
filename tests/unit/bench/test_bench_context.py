"""The study of long sequences, in small, and the tables that are made of it."""

from __future__ import annotations

from functools import partial
from itertools import chain
from pathlib import Path

import pytest

from bench.context import balance, families, in_pipeline, on_ranks, papers, planning, tables
from bench.context.__main__ import draw, packed_blocks
from bench.harness import study_of
from bench.ranks import launch
from bench.record import Study
from mosaic.artifact import save
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


def test_ours_is_even_in_tiles_where_the_papers_is_in_pairs(study: Study):
    of = "ee, 4096 tokens, 4 ranks: "
    ours, paper = (value(study, f"{of}{name}: most tiles over mean") for name in ("lpt", "lpt-paper"))
    assert ours <= paper
    assert ours < 1.05
    assert value(study, f"{of}torch's PTRR: most tiles over mean") >= 1


def test_coarser_chunks_receive_less(study: Study):
    of = "mp of ~1k, 16384 tokens, 4 ranks, lpt, chunks of "
    shares = [value(study, f"{of}{size}: received over gathering all, mean of ranks") for size in (128, 512, 2048)]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < shares[0] <= 1


def test_competitors_that_do_not_run_are_named_with_a_reason(study: Study):
    missing = [one for one in study.figures if one.value is None]
    assert {one.name.split("'")[0] for one in missing} == {"MagiAttention", "torch"}
    assert all(one.reason for one in missing)


def test_tables_have_theirs_beside_ours(study: Study, tmp_path: Path):
    assert tables.balance_table(tmp_path) == tables.received_table(tmp_path) == "not measured yet\n"
    (tmp_path / "host").mkdir()
    save(study, tmp_path / "host" / "2026-01-01-abc-bench_context.json")
    assert "| ee, 4096 tokens, 4 ranks, tiles | " in tables.balance_table(tmp_path)
    assert "| mp of ~1k, 16384 tokens, 4 ranks | " in tables.received_table(tmp_path)
    assert "| 16384 | EP | 3.92 | 3.93 | 4.24 | 3.96 | " in tables.paper_times_table(tmp_path)


def test_attention_on_two_ranks_is_measured_in_turn():
    found = {one.name: one for one in on_ranks.attention(512, (0,), 1, 60.0)}
    assert len(found) == 13
    assert all(one.value > 0 for one in found.values())


def test_steps_of_pipelines_are_measured_in_turn_and_have_the_same_losses():
    sizes = in_pipeline.Sizes(tokens=512, microbatches=1, layers=2, rounds=1)
    found = {one.name: one for one in in_pipeline.in_pipeline(sizes, 90.0)}
    assert len(found) == 6
    assert all(one.value > 0 for one in found.values())


def test_the_picture_is_drawn(study: Study, tmp_path: Path):
    draw(study, tmp_path)
    assert (tmp_path / "context_mp.png").stat().st_size > 10_000


ENDS = {"qwen3": "equal", "bart": "refused"}


def test_every_family_ends_in_a_word():
    found = {one.name: one.labels for one in launch.on_ranks(partial(families.tried, [*ENDS]), 2, 60.0)}
    assert {name: labels["outcome"] for name, labels in found.items()} == ENDS
    assert "takes no position_ids" in found["bart"]["says"]
