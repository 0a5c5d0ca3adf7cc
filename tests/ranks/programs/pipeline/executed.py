"""Random schedules over torch.distributed; each function is one rank's program, run by ``ranks.nursery``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from executor_cases import NumberWork, evaluated, on_lanes, step

from mosaic.engine.options import RankSettings
from mosaic.ranks.pipeline.executor import Executor
from mosaic.ranks.pipeline.transport import Message, Pending, Tensors, Transport
from mosaic.ranks.world.world import World
from ranks.begun import TIMEOUT_S, WATCH, join
from ranks.transport_promises import PROMISES

SEEDS = range(12)


def joined(rank: int, size: int, place: Path) -> Transport:
    join(rank, size, place)
    return Transport(World(settings=RankSettings(timeout_s=TIMEOUT_S, **WATCH)))


def all_equal(rank: int, size: int, place: Path) -> None:
    """Steps one after the other, each of another model, all of which make what one thread makes; lanes on threads.

    Both ends of messages that one task sends through one channel post them as one group.
    """
    transport = joined(rank, size, place)
    executor = Executor(transport)
    groups: list[tuple[bool, tuple[str, ...]]] = []

    def post(messages: Sequence[Message], tensors: Sequence[Tensors | None]) -> list[Pending]:
        groups.append((tensors[0] is None, tuple(message.name for message in messages)))
        return Transport.post(transport, messages, tensors)

    transport.post = post
    for seed in SEEDS:
        drawn = step(seed, num_ranks=size)
        work = NumberWork()
        executor.run(drawn.schedule, work, lanes=on_lanes(transport, drawn.schedule))
        expected = evaluated(drawn.graph)
        assert work.made == {name: expected[name] for name in work.made}, seed
        num_made = sum(transport.all_gather(len(work.made)))
        assert num_made == len(expected), seed
    everywhere = [group for own in transport.all_gather(groups) for group in own]
    sent, received = (sorted(names for is_received, names in everywhere if is_received == at) for at in (False, True))
    assert sent == received
    assert max(map(len, sent)) > 1
    transport.close()
    print("equal")


def keeps_promises(rank: int, size: int, place: Path) -> None:
    """Names the promises of a transport that are kept."""
    transport = joined(rank, size, place)
    for promise in PROMISES:
        promise(transport)
        print(promise.__name__, flush=True)


def keeps_promises_by_pairs(rank: int, size: int, place: Path) -> None:
    """The same where messages to all peers of a group queue behind each other, as on NCCL."""
    with mock.patch("mosaic.ranks.pipeline.transport.peers_share_a_communicator", return_value=True):
        keeps_promises(rank, size, place)
