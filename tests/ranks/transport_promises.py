"""The promises of ``mosaic/ranks/pipeline/transport.py``: each function is what one of three ranks does.

They are run by threads and by processes alike; what they find wrong, they raise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from mosaic.errors import ModuleContractError, RankFailedError
from mosaic.ranks.pipeline.transport import Message, Pending, Tensors, TensorSpec, Transport

SIZE = 3
PAYLOADS = (
    torch.arange(12.0).view(3, 4).t(),  # not contiguous
    torch.arange(6.0).to(torch.bfloat16),
    torch.tensor(7),
    torch.zeros(2, 0),
    torch.tensor([True, False]),
    torch.arange(3, dtype=torch.int64).expand(4, 3),
    torch.tensor([1 + 2j]),
    torch.arange(4.0, requires_grad=True),
)


def message(peer: int, name: str = "0F0>1F0", *, is_forward: bool = True, payload=PAYLOADS) -> Message:
    return Message(name, peer, is_forward, tuple(TensorSpec.of(tensor) for tensor in payload))


def send(transport: Transport, message: Message, tensors: Tensors) -> Pending:
    return transport.post([message], [tensors])[0]


def receive(transport: Transport, message: Message) -> Pending:
    return transport.post([message], [None])[0]


def tensors_of_any_kind_arrive(transport: Transport) -> None:
    after, before = (transport.rank + 1) % SIZE, (transport.rank - 1) % SIZE
    sent = send(transport, message(after), PAYLOADS)
    received = receive(transport, message(before)).wait()
    assert sent.wait() == ()
    assert all(tensor.is_contiguous() and not tensor.requires_grad for tensor in received)
    for tensor, payload in zip(received, PAYLOADS, strict=True):
        assert tensor.dtype is payload.dtype
        assert torch.equal(tensor, payload)


def messages_of_a_channel_keep_their_order_whichever_is_awaited_first(transport: Transport) -> None:
    payloads = [torch.full((3,), number) for number in range(8)]
    names = [f"0F{number}>1F{number}" for number in range(8)]
    if transport.rank == 0:
        sent = [send(transport, message(1, n, payload=(p,)), (p,)) for n, p in zip(names, payloads, strict=True)]
        for handle in reversed(sent):
            handle.wait()
    if transport.rank == 1:
        posted = [receive(transport, message(0, n, payload=(p,))) for n, p in zip(names, payloads, strict=True)]
        found = [handle.wait()[0].tolist() for handle in reversed(posted)]
        assert found == [payload.tolist() for payload in reversed(payloads)]


def messages_of_a_group_arrive_as_what_they_are(transport: Transport) -> None:
    """Some have no elements; they are awaited in any order."""
    payloads = [PAYLOADS, (torch.zeros(0),), (torch.tensor(3.5), torch.arange(5))]
    for last in range(3):
        if transport.rank == 0:
            messages = [message(1, f"0F{number}>1F{number}", payload=each) for number, each in enumerate(payloads)]
            for handle in transport.post(messages, payloads)[::-1]:
                assert handle.wait() == ()
        if transport.rank == 1:
            messages = [message(0, f"0F{number}>1F{number}", payload=each) for number, each in enumerate(payloads)]
            handles = transport.post(messages, [None] * 3)
            for at in (last, *(at for at in range(3) if at != last)):
                received = handles[at].wait()
                assert all(torch.equal(a, b) for a, b in zip(received, payloads[at], strict=True))


def lanes_do_not_wait_for_each_other(transport: Transport) -> None:
    """One rank posts for one pair of lanes first, the other for the other, and awaits it before it posts that."""
    transport.open_lanes([(0, 1), (1, 0)])
    pairs = ((0, 1), (1, 0)) if transport.rank == 0 else ((1, 0), (0, 1))
    if transport.rank == 0:
        sent = [
            send(transport, replace(message(1, payload=(one,)), lanes=pair), (one,))
            for pair in pairs
            for one in (torch.full((2,), float(pair[0])), torch.full((2,), 2.0 + pair[0]))
        ]
        for handle in sent:
            handle.wait()
    if transport.rank == 1:
        for pair in pairs:
            for base in (0.0, 2.0):
                way = replace(message(0, payload=(torch.ones(2),)), lanes=pair)
                assert receive(transport, way).wait()[0].tolist() == [base + pair[0]] * 2


def what_the_plan_does_not_say_is_not_sent(transport: Transport) -> None:
    planned = message(1, payload=(torch.zeros(3, 4),))
    for wrong in ((torch.zeros(4, 3),), (torch.zeros(3, 4).double(),), (), (torch.zeros(3, 4), torch.zeros(1))):
        with pytest.raises(ModuleContractError, match=r"0F0>1F0 is planned to carry float32\[3, 4\], and"):
            send(transport, planned, wrong)


def a_rank_that_gives_up_ends_what_the_others_wait_for(transport: Transport) -> None:
    """One in a receive, one in an agreement."""
    if transport.rank == 1:
        transport.abort("failed in 2F0: ValueError: no such caption")
        return

    def wait() -> None:
        if transport.rank == 0:
            receive(transport, message(1)).wait()
        transport.all_gather("and then?")

    with pytest.raises(RankFailedError, match=r"^rank 1 failed in 2F0: ValueError: no such caption$") as caught:
        wait()
    assert caught.value.ranks == (1,)


PROMISES: tuple[Callable[[Transport], None], ...] = (
    tensors_of_any_kind_arrive,
    messages_of_a_channel_keep_their_order_whichever_is_awaited_first,
    messages_of_a_group_arrive_as_what_they_are,
    lanes_do_not_wait_for_each_other,
    what_the_plan_does_not_say_is_not_sent,
    a_rank_that_gives_up_ends_what_the_others_wait_for,
)
"""The last one is of no use to those after it."""
