"""Torch's CSV: what is written there, torch lowers without a deadlock, and what is read back takes the same time."""

from __future__ import annotations

import csv
import io

import pytest
from pipeline_cases import chain, images, two_encoders
from torch.distributed.pipelining import schedules as torchs

from mosaic.errors import InvalidScheduleError
from mosaic.pipelining.partition import Request
from mosaic.pipelining.planner import PlannerOptions, plan_baseline, plan_step
from mosaic.pipelining.torch_csv import baseline_of_csv, to_torch_csv

STEP = images(*[1] * 6)


REQUEST = Request(model=chain(12), num_ranks=3, microbatches=STEP, chunks_per_rank=2)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "megatron", "zb-v"])
def test_a_baseline_comes_back_from_its_csv_and_torch_adds_messages(name: str):
    planned = plan_baseline(name, REQUEST, STEP)
    text = to_torch_csv(planned.schedule())
    read = baseline_of_csv("file.csv", text)
    again = plan_baseline("file.csv", REQUEST, STEP, table={"file.csv": read})
    assert again.makespan_ns == planned.makespan_ns
    assert to_torch_csv(again.schedule()) == text
    actions = {
        rank: [torchs._Action.from_str(cell) for cell in row] for rank, row in enumerate(csv.reader(io.StringIO(text)))
    }
    rank_of = {action.stage_index: rank for rank, row in actions.items() for action in row}
    lowered = torchs._add_send_recv(actions, stage_to_rank=rank_of.__getitem__, num_stages=len(rank_of))
    assert sum(map(len, lowered.values())) > sum(map(len, actions.values()))


def test_chunks_that_are_no_chain_are_refused():
    step = images(*[1] * 4)
    two = Request(model=two_encoders(), num_ranks=3, microbatches=step)
    schedule = plan_step(two, step, options=PlannerOptions(partition="separated")).schedule()
    with pytest.raises(InvalidScheduleError, match=r"chunks are no chain .*torch's CSV cannot say.*write .* as \.json"):
        to_torch_csv(schedule)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0SEND_F0\n", r"row 0: '0SEND_F0' is no computation; write 0F1"),
        ("0F0,0B0,0W0\n", r"whole backwards and backwards apart"),
        ("1F0,1B0\n0F0,0B0\n", r"stages of rows are \[1, 0\]"),
        ("", r"stages of rows are \[\]"),
    ],
)
def test_a_file_that_is_no_order_is_refused(text: str, message: str):
    with pytest.raises(InvalidScheduleError, match=message):
        baseline_of_csv("file.csv", text)
