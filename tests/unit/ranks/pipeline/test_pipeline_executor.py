"""The executor: every value that arrives is what its sources made, whatever the order; and what it refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from executor_cases import FaultyWork, NumberWork, Step, chain_step, evaluated, no_caption, step

from bench.pipeline.in_process import InProcess
from mosaic.errors import InvalidScheduleError, ModuleContractError, MosaicError, RankFailedError
from mosaic.pipelining.schedule import PipelineSchedule
from mosaic.pipelining.tasks import ActionKind
from mosaic.ranks.pipeline.executing.executor import Executor
from mosaic.ranks.pipeline.executing.program import program_of
from mosaic.ranks.pipeline.transports.transport import TensorSpec, Transport


def executed(drawn: Step) -> tuple[NumberWork, ...]:
    def program(transport: Transport) -> NumberWork:
        work = NumberWork.of(drawn.graph)
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
    """What each rank's program raises."""

    def caught(transport: Transport) -> BaseException | None:
        try:
            program(transport)
        except MosaicError as error:
            return error
        except ValueError as error:
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


def test_a_failed_action_ends_the_others_which_name_it():
    drawn = chain_step(3)

    def program(transport: Transport) -> None:
        work = FaultyWork(exits=NumberWork.of(drawn.graph).exits, at="1B2", act=no_caption)
        Executor(transport).run(drawn.schedule, work)

    first, failed, last = outcomes(3, program)
    assert isinstance(failed, ValueError)
    for other in (first, last):
        assert isinstance(other, RankFailedError)
        assert str(other) == "rank 1 failed in 1B2: ValueError: no such caption"
        assert other.ranks == (1,)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("schedule", "the ranks have not the same schedule: rank 1 has"),
        ("split", "not the same split of the model: rank 1 has 'other', and rank 0 has 'one'"),
        ("specs", "rank 0 and rank 1 know other shapes or types of what they send each other"),
    ],
)
def test_ranks_that_differ_are_refused_on_all_of_them_before_the_first_action(what: str, message: str):
    drawn = [chain_step(3, 4), chain_step(3, 5 if what == "schedule" else 4)]
    done: list[object] = []

    def program(transport: Transport) -> None:
        own = drawn[transport.rank == 1]
        work = NumberWork.of(own.graph)
        if what == "specs" and transport.rank == 1:
            work.specs = lambda edge: (TensorSpec((2,), torch.int32),)
        executor = Executor(transport, split="other" if what == "split" and transport.rank == 1 else "one")
        executor.run(own.schedule, work)
        done.append(work)

    for error in outcomes(3, program):
        assert isinstance(error, InvalidScheduleError)
        assert message in str(error)
    assert not done


def test_a_rank_that_cannot_run_its_schedule_is_named_on_the_others():
    drawn = chain_step(2)

    def program(transport: Transport) -> None:
        work = NumberWork.of(drawn.graph)
        if transport.rank == 1:
            work.specs = lambda edge: no_caption()
        Executor(transport).run(drawn.schedule, work)

    other, own = outcomes(2, program)
    assert str(own) == "no such caption"
    assert str(other) == "rank 1 cannot run its schedule: ValueError: no such caption"


def test_a_task_that_makes_nothing_for_one_of_its_edges_is_refused():
    drawn = chain_step(2)

    def program(transport: Transport) -> None:
        work = NumberWork.of(drawn.graph)
        work.backward = lambda task, gradients: {}
        Executor(transport).run(drawn.schedule, work)

    other, own = outcomes(2, program)
    assert isinstance(own, ModuleContractError)
    assert "made nothing for 0B" in str(own)
    assert "rank 1 failed in 1B" in str(other)


@pytest.mark.parametrize(
    ("rank", "old", "new", "message"),
    [
        (0, "0F0 SEND(0F0>1F0)", "SEND(0F0>1F0) 0F0", r"SEND\(0F0>1F0\): 0F0 has to come before it"),
        (1, "RECV(0F0>1F0) ", "GOT(0F0>1F0) RECV(0F0>1F0) ", r"GOT\(0F0>1F0\): RECV\(0F0>1F0\) has to come"),
        (1, "GOT(0F0>1F0) 1F0", "1F0 GOT(0F0>1F0)", r"1F0: GOT\(0F0>1F0\) has to come before it"),
        (0, "SENT(0F0>1F0)", "", r"SENT\(0F0>1F0\): it is missing"),
        (0, "0F0 SEND", "0F0 0F0 SEND", "0F0: it is there twice"),
        (0, "SEND(0F0>1F0)", "RECV(0F0>1F0)", r"RECV\(0F0>1F0\): no edge of the schedule leaves or reaches this rank"),
    ],
)
def test_actions_out_of_turn_are_refused_before_they_run(rank: int, old: str, new: str, message: str):
    drawn = chain_step(2)
    rows = [" ".join(row) for row in drawn.schedule.rows]
    assert old in rows[rank]
    rows[rank] = rows[rank].replace(old, new, 1)
    wrong = dataclasses.replace(drawn.schedule, rows=tuple(tuple(row.split()) for row in rows), hash="")
    with pytest.raises(InvalidScheduleError, match=message):
        program_of(wrong, rank, NumberWork.of(drawn.graph))


def test_lanes_that_no_order_suits_are_refused():
    rows = ("0F0 SEND(0F0>2F0) SENT(0F0>2F0)", "1F0 SEND(1F0>2F1) SENT(1F0>2F1)")
    other = "GOT(1F0>2F1) RECV(1F0>2F1) 2F1 RECV(0F0>2F0) GOT(0F0>2F0) 2F0"
    made = PipelineSchedule(
        plan="lanes",
        num_microbatches=2,
        rank_of=(0, 0, 1),
        chunks=("vision[0:1/1]", "audio[0:1/1]", "text[0:1/1]"),
        rows=tuple(tuple(row.split()) for row in (*rows, other)),
        edges={"0F0>2F0": 4, "1F0>2F1": 4},
    )
    work = NumberWork(exits={})
    assert program_of(made, 0, work).cells == made.rows[:2]
    waits = dataclasses.replace(made, edges={**made.edges, "0F0>1F0": 4, "1F0>0F0": 4}, hash="")
    with pytest.raises(InvalidScheduleError, match="rank 0 has lanes that cannot come to their end: row 0"):
        program_of(waits, 0, work)
