"""Forwards of a schedule by themselves."""

from __future__ import annotations

from mosaic.pipelining.schedule import PipelineSchedule, forward_only


def test_forwards_and_their_messages_stay_in_order():
    schedule = PipelineSchedule(
        plan="chain",
        num_microbatches=1,
        rank_of=(0, 1),
        chunks=("text[0:1/2]", "text[1:2/2]"),
        rows=(
            ("0F0", "SEND(0F0>1F0)", "RECV(1B0>0B0)", "GOT(1B0>0B0)", "0B0", "FREE(0F0)", "SENT(0F0>1F0)", "REDUCE(0)"),
            ("RECV(0F0>1F0)", "GOT(0F0>1F0)", "1F0", "1B0", "FREE(1F0)", "SEND(1B0>0B0)", "SENT(1B0>0B0)"),
        ),
        edges={"0F0>1F0": 8, "1F0>1B0": 0, "0F0>0B0": 0, "1B0>0B0": 8},
        kept={"0F0": 4},
        strategies={"0F0": (1,)},
    )
    found = forward_only(schedule)
    assert found.rows == (("0F0", "SEND(0F0>1F0)", "SENT(0F0>1F0)"), ("RECV(0F0>1F0)", "GOT(0F0>1F0)", "1F0"))
    assert found.edges == {"0F0>1F0": 8}
    assert found.hash != schedule.hash
    assert forward_only(found).rows == found.rows
