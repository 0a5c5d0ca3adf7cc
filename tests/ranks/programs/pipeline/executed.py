"""Random schedules over torch.distributed; each function is one rank's program, run by ``ranks.nursery``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from executor_cases import FaultyWork, NumberWork, chain_step, evaluated, no_caption, step

from mosaic.engine.options import RankSettings
from mosaic.errors import MosaicError
from mosaic.ranks.meeting.world import World
from mosaic.ranks.pipeline.executing.executor import Executor
from mosaic.ranks.pipeline.transports.distributed import DistributedTransport
from mosaic.ranks.pipeline.transports.transport import Message, Tensors
from ranks.begun import TIMEOUT_S, WATCH, join, kill_this_process
from ranks.transport_promises import PROMISES, message

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


def keeps_promises(rank: int, size: int, place: Path) -> None:
    """Names the promises of a transport that are kept."""
    transport = joined(rank, size, place)
    for promise in PROMISES:
        promise(transport)
        print(promise.__name__, flush=True)


# What goes wrong.


def fails_in(cell: str, act: Callable[[], object], rank: int, size: int, place: Path) -> None:
    """Executes a step twice; at one action something else happens."""
    transport = joined(rank, size, place)
    drawn = chain_step(size)
    work = FaultyWork(exits=NumberWork.of(drawn.graph).exits, at=cell, act=act)
    for _ in range(2):
        work.made.clear()
        Executor(transport).run(drawn.schedule, work)


def an_error_in_a_backward(rank: int, size: int, place: Path) -> None:
    fails_in("1B2", no_caption, rank, size, place)


def an_error_in_a_reduction(rank: int, size: int, place: Path) -> None:
    fails_in("REDUCE(1)", no_caption, rank, size, place)


def killed_in_a_backward(rank: int, size: int, place: Path) -> None:
    fails_in("1B2", kill_this_process, rank, size, place)


def killed_in_a_reduction(rank: int, size: int, place: Path) -> None:
    fails_in("REDUCE(1)", kill_this_process, rank, size, place)


def killed_in_a_send(rank: int, size: int, place: Path) -> None:
    """Rank 1 is killed when its first gradient is under way."""
    transport, drawn = joined(rank, size, place), chain_step(size)
    post_send = transport.post_send

    def post_and_die(given: Message, tensors: Tensors) -> object:
        sent = post_send(given, tensors)
        return sent if given.is_forward else kill_this_process()

    if rank == 1:
        transport.post_send = post_and_die  # type: ignore[method-assign]
    Executor(transport).run(drawn.schedule, NumberWork.of(drawn.graph))


def a_tensor_of_another_shape(rank: int, size: int, place: Path) -> None:
    drawn = chain_step(size)
    work = FaultyWork(exits=NumberWork.of(drawn.graph).exits, at="", act=no_caption)
    if rank == 1:
        work._tensors = lambda edge, value: (torch.zeros(77, dtype=torch.int64),)  # type: ignore[method-assign]
    Executor(joined(rank, size, place)).run(drawn.schedule, work)


def another_schedule(rank: int, size: int, place: Path) -> None:
    """Rank 1 has one of more microbatches; all are told, and then take the same step."""
    executor = Executor(joined(rank, size, place))
    for others in (5, 4):
        drawn = chain_step(size, others if rank == 1 else 4)
        try:
            executor.run(drawn.schedule, NumberWork.of(drawn.graph))
        except MosaicError as error:
            print(error)
    print("then equal")


def a_tensor_on_another_device(rank: int, size: int, place: Path) -> None:
    transport = joined(rank, size, place)
    tensor = torch.zeros(3, device="meta")
    try:
        transport.post_send(message(1 - rank, payload=(tensor,)), (tensor,))
    except MosaicError as error:
        print(error)
    transport.tell("done")
