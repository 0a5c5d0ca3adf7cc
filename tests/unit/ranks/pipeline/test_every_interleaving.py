"""Rows of small schedules in every interleaving: what is lowered never waits for ever."""

from __future__ import annotations

import math

from every_interleaving import mixed_up, walk_all
from executor_cases import Step, step

from mosaic.pipelining.schedule import PipelineSchedule

MAX_STATES = 4_000


def within_ranks(schedule: PipelineSchedule) -> dict[str, set[str]]:
    """For each task what it takes of its own rank."""
    home = {cell: rank for rank, row in zip(schedule.rank_of, schedule.rows, strict=True) for cell in row}
    found: dict[str, set[str]] = {}
    for source, target in (edge.split(">") for edge in schedule.edges):
        if home[source] == home[target]:
            found.setdefault(target, set()).add(source)
    return found


def merged(drawn: Step) -> tuple[tuple[str, ...], ...]:
    """The cells of each rank, lanes merged, in the order of the executor."""
    found = []
    for rank in range(drawn.num_ranks):
        rows = drawn.schedule.rows_of(rank)
        if len(rows) == 1:
            found += rows
            continue
        lanes = [iter(row) for row in rows]
        found.append(tuple(next(lanes[lane]) for lane in drawn.schedule.turns[rank]))
    return tuple(found)


def test_no_lowered_schedule_waits_for_ever_in_any_interleaving():
    num_tried = num_lanes = 0
    for seed in range(300):
        drawn = step(seed, max_microbatches=1 + seed % 2)
        rows = merged(drawn)
        if len(rows) < 2 or math.prod(1 + len(row) for row in rows) > MAX_STATES:
            continue
        num_states, stuck = walk_all(rows)
        assert stuck == (), (seed, rows)
        num_tried += num_states > 50
        num_lanes += len(drawn.schedule.rows) > len(rows)
    assert num_tried > 30
    assert num_lanes > 1


def test_no_lanes_that_walk_by_themselves_wait_for_ever_in_any_interleaving():
    num_tried = num_across = 0
    for seed in range(300):
        drawn = step(seed, max_microbatches=1 + seed % 2)
        rows = drawn.schedule.rows
        if len(rows) == drawn.num_ranks or math.prod(1 + len(row) for row in rows) > MAX_STATES * 10:
            continue
        num_states, stuck = walk_all(rows, within_ranks(drawn.schedule))
        assert stuck == (), (seed, rows)
        num_tried += num_states > 50
        num_across += any("SEND" in cell for row in rows for cell in row)
    assert num_tried > 8
    assert num_across > 8


def test_both_ends_of_a_lowered_schedules_pairs_post_in_one_order():
    for seed in range(100):
        rows = merged(step(seed))
        assert mixed_up(rows, by_pairs=False) is None
        assert mixed_up(rows, by_pairs=True) is None
