"""Ranks that are threads: what ends their waits, and what their order of messages is checked for."""

from __future__ import annotations

import pytest
import torch

from bench.pipeline.in_process import InProcess
from mosaic.errors import InvalidScheduleError, RankFailedError
from mosaic.ranks.pipeline.transports.transport import Message, TensorSpec, Transport

SPECS = (TensorSpec((2,), torch.float32),)


def test_a_rank_that_leaves_ends_the_waits_for_its_messages():
    def program(transport: Transport) -> None:
        if transport.rank == 1:
            transport.post_receive(Message("0F0>1F0", 0, True, SPECS)).wait()

    with pytest.raises(RankFailedError, match=r"rank 0 has left, and others wait for its end of 0F0>1F0"):
        InProcess(2).run(program)


def test_a_rank_that_leaves_ends_the_waits_for_what_it_tells():
    with pytest.raises(RankFailedError, match="rank 0 has left, and others wait for what it tells"):
        InProcess(2).run(lambda transport: transport.tell("mine") if transport.rank else None)


def test_the_error_of_the_rank_that_failed_is_raised():
    def program(transport: Transport) -> None:
        if transport.rank == 1:
            raise ValueError("no such caption")
        transport.tell("mine")

    with pytest.raises(ValueError, match="no such caption"):
        InProcess(2).run(program)


def test_messages_that_are_taken_for_each_other_are_found():
    def program(transport: Transport) -> None:
        if transport.rank == 0:
            transport.post_send(Message("0F0>1F0", 1, True, SPECS), (torch.zeros(2),)).wait()
        else:
            transport.post_receive(Message("0F1>1F1", 0, True, SPECS)).wait()

    with pytest.raises(InvalidScheduleError, match="rank 0 sends 0F0>1F0 where rank 1 receives 0F1>1F1; post both"):
        InProcess(2).run(program)
