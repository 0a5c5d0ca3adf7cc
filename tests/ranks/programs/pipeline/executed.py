"""Random schedules over torch.distributed; each function is one rank's program, run by ``ranks.nursery``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from executor_cases import FaultyWork, NumberWork, chain_step, evaluated, no_caption, on_lanes, step

from mosaic.engine.options import RankSettings
from mosaic.errors import MosaicError
from mosaic.pipelining.schedule.action import TaskName
from mosaic.pipelining.schedule.schedule import PipelineSchedule
from mosaic.ranks.pipeline.executing.executor import Executor
from mosaic.ranks.pipeline.transports.distributed import DistributedTransport
from mosaic.ranks.pipeline.transports.transport import Message, Tensors
from mosaic.ranks.world.world import World
from ranks.begun import TIMEOUT_S, WATCH, join, kill_this_process
from ranks.transport_promises import PROMISES, message

SEEDS = range(12)


def joined(rank: int, size: int, place: Path) -> DistributedTransport:
    join(rank, size, place)
    return DistributedTransport(World(timeout_s=TIMEOUT_S, watch=RankSettings(timeout_s=TIMEOUT_S, **WATCH)))


def all_equal(rank: int, size: int, place: Path) -> None:
    """Steps one after the other, each of another model, all of which make what one thread makes; lanes on threads."""
    transport = joined(rank, size, place)
    executor = Executor(transport)
    for seed in SEEDS:
        drawn = step(seed, num_ranks=size)
        work = NumberWork.of(drawn.graph)
        executor.run(drawn.schedule, work, lanes=on_lanes(transport, drawn.schedule))
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


def keeps_promises_by_pairs(rank: int, size: int, place: Path) -> None:
    """The same where messages to all peers of a group queue behind each other, as in nccl2."""
    with mock.patch("mosaic.ranks.pipeline.transports.distributed.peers_share_a_communicator", return_value=True):
        keeps_promises(rank, size, place)


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


def an_error_on_a_lane(rank: int, size: int, place: Path) -> None:
    """The other lane waits for rank 1, which waits for the lane that fails."""
    transport = joined(rank, size, place)
    rows = (
        "RECV(2F0>0F0) GOT(2F0>0F0) 0F0",
        "1F0 1B0 SEND(1F0>2F0) SENT(1F0>2F0)",
        "RECV(1F0>2F0) GOT(1F0>2F0) 2F0 SEND(2F0>0F0) SENT(2F0>0F0)",
    )
    schedule = PipelineSchedule(
        plan="lanes",
        num_microbatches=1,
        rank_of=(0, 0, 1),
        chunks=("text[0:1/1]", "vision[0:1/1]", "audio[0:1/1]"),
        rows=tuple(tuple(row.split()) for row in rows),
        edges={"1F0>2F0": 4, "2F0>0F0": 4},
    )
    exits = {TaskName.parse(one): [TaskName.parse(other)] for one, other in (("1F0", "2F0"), ("2F0", "0F0"))}
    work = FaultyWork(exits=defaultdict(list, exits), at="1B0", act=no_caption)
    Executor(transport).run(schedule, work, lanes=on_lanes(transport, schedule))


def killed_in_a_backward(rank: int, size: int, place: Path) -> None:
    fails_in("1B2", kill_this_process, rank, size, place)


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
