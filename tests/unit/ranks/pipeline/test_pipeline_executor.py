"""The executor: every value that arrives is what its sources made, whatever the order."""

from __future__ import annotations

import pytest
from executor_cases import NumberWork, Step, evaluated, step

from mosaic.ranks.pipeline.executor import Executor
from mosaic.ranks.pipeline.in_process import InProcess


def executed(drawn: Step) -> tuple[NumberWork, ...]:
    def program(transport) -> NumberWork:
        work = NumberWork.of(drawn.graph)
        Executor(transport).run(drawn.schedule, work)
        return work

    return InProcess(drawn.num_ranks).run(program)


def check(works: tuple[NumberWork, ...], drawn: Step) -> None:
    made = {name: value for work in works for name, value in work.made.items()}
    assert made == evaluated(drawn.graph)
    assert sum(len(work.made) for work in works) == len(drawn.graph.tasks)
    for work in works:
        assert not drawn.schedule.kept.keys() & set(map(str, work.kept))
        for chunk, names in work.reduced.items():
            assert len(names) == sum(name.chunk == chunk for name in made)


@pytest.mark.parametrize("first", range(0, 500, 50))
def test_500_random_schedules_make_what_one_thread_makes(first: int):
    for seed in range(first, first + 50):
        drawn = step(seed)
        check(executed(drawn), drawn)
