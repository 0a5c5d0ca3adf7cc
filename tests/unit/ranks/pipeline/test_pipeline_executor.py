"""The executor: every value that arrives is what its sources made, whatever the order; and what it refuses."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest
from executor_cases import NumberWork, Step, chain_step, evaluated, step

from bench.pipeline.in_process import InProcess
from mosaic.errors import InvalidScheduleError, ModuleContractError, MosaicError
from mosaic.pipelining.schedule import PipelineSchedule
from mosaic.pipelining.tasks import ActionKind
from mosaic.ranks.pipeline.executor import Executor
from mosaic.ranks.pipeline.transport import Transport


def executed(drawn: Step) -> tuple[NumberWork, ...]:
    def program(transport: Transport) -> NumberWork:
        work = NumberWork()
        Executor(transport).run(drawn.schedule, work)
        return work

    return InProcess(drawn.num_ranks).run(program)


def check(works: tuple[NumberWork, ...], drawn: Step) -> None:
    made = {name: value for work in works for name, value in work.made.items()}
    assert made == evaluated(drawn.graph)
    assert sum(len(work.made) for work in works) == len(drawn.graph.tasks)
    reduced = {chunk: names for work in works for chunk, names in work.reduced.items()}
    assert reduced.keys() == {int(cell[7:-1]) for row in drawn.schedule.rows for cell in row if "REDUCE" in cell}
    for chunk, names in reduced.items():
        backwards = {name for name in made if name.chunk == chunk and name.kind is not ActionKind.FORWARD}
        assert backwards <= set(names)
    for work in works:
        assert not drawn.schedule.kept.keys() & set(map(str, work.kept))


def outcomes(size: int, program: Callable[[Transport], object]) -> list[BaseException | None]:
    """Returns the error of each rank's program."""

    def caught(transport: Transport) -> BaseException | None:
        try:
            program(transport)
        except (MosaicError, ValueError) as error:
            return error
        return None

    return list(InProcess(size).run(caught))


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_random_schedules_make_what_one_thread_makes(first: int):
    lanes = 0
    for seed in range(first, first + 50):
        drawn = step(seed)
        check(executed(drawn), drawn)
        lanes += len(drawn.schedule.rows) > drawn.num_ranks
    assert lanes


def test_a_task_that_makes_nothing_for_one_of_its_edges_is_refused():
    drawn = chain_step(2)

    def program(transport: Transport) -> None:
        work = NumberWork()
        work.backward = lambda task, gradients: {}
        Executor(transport).run(drawn.schedule, work)

    other, own = outcomes(2, program)
    assert isinstance(own, ModuleContractError)
    assert "made nothing for 0B" in str(own)
    assert "rank 1 failed in 1B" in str(other)


def refused(schedule: PipelineSchedule, rank: int, message: str) -> None:
    size = 1 + max(schedule.rank_of)
    error = outcomes(size, lambda transport: Executor(transport).run(schedule, NumberWork()))[rank]
    assert isinstance(error, InvalidScheduleError)
    assert re.match(message, str(error))


def test_backward_for_weights_apart_is_refused():
    drawn = chain_step(2)
    rows = (*drawn.schedule.rows[:1], (*drawn.schedule.rows[1], "1W0"))
    apart = dataclasses.replace(drawn.schedule, rows=rows, hash="")
    refused(apart, 1, "rank 1, 1W0: ranks run backward for weights with backward for")


def test_lanes_without_an_order_of_their_actions_are_refused():
    drawn = next(drawn for drawn in map(step, range(99)) if len(drawn.schedule.rows) > drawn.num_ranks)
    rank = next(rank for rank in drawn.schedule.rank_of if drawn.schedule.rank_of.count(rank) > 1)
    without = dataclasses.replace(drawn.schedule, turns=(), hash="")
    refused(without, rank, f"rank {rank} has lanes of .* lower the schedule again")
