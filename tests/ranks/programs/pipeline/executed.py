"""Random schedules over torch.distributed; each function is one rank's program, run by ``ranks.nursery``."""

from __future__ import annotations

from pathlib import Path

from executor_cases import NumberWork, evaluated, step

from mosaic.engine.options import RankSettings
from mosaic.ranks.meeting.world import World
from mosaic.ranks.pipeline.distributed import DistributedTransport
from mosaic.ranks.pipeline.executor import Executor
from ranks.begun import TIMEOUT_S, WATCH, join

SEEDS = range(12)


def joined(rank: int, size: int, place: Path) -> DistributedTransport:
    join(rank, size, place)
    return DistributedTransport(World(timeout_s=TIMEOUT_S, watch=RankSettings(timeout_s=TIMEOUT_S, **WATCH)))


def all_equal(rank: int, size: int, place: Path) -> None:
    """Steps one after the other, each of another model, all of which make what one thread makes."""
    transport = joined(rank, size, place)
    executor = Executor(transport)
    for seed in SEEDS:
        drawn = step(seed, num_ranks=size)
        work = NumberWork.of(drawn.graph)
        executor.run(drawn.schedule, work)
        expected = evaluated(drawn.graph)
        assert work.made == {name: expected[name] for name in work.made}, seed
        num_made = sum(map(int, transport.tell(str(len(work.made)))))
        assert num_made == len(expected), seed
    transport.close()
    print("equal")


class Faulty(NumberWork):
    """Does something else in the last backward of its rank."""

    def backward(self, task, gradients):
        if str(task) == self.at:
            self.act()
        return super().backward(task, gradients)
