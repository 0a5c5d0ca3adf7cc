"""Encoders on lanes beside the backbone, at the same time: the plain loop's losses, gradients and random numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from executor_cases import NumberWork, no_caption, on_lanes
from lane_cases import WIDTH, Seen, check_equal, laned, run, seen_step
from torch import nn

from bench.pipeline.in_process import InProcess
from mosaic.backends.host.lanes import HostLanes
from mosaic.errors import InvalidPlanError, RankFailedError
from mosaic.pipelining.schedule import PipelineSchedule, TaskName
from mosaic.ranks.pipeline.executor import Executor, RankTask
from mosaic.ranks.pipeline.transport import Tensors, Transport

RAGGED = ((2, 1), (0, 0), (3, 0), (0, 2), (1, 1))


def test_lanes_that_drop_elements_drop_those_of_the_plain_loop():
    torch.manual_seed(1)
    sizes = {"vision": 1, "audio": 1}  # which would draw other numbers: encoders take all images of a microbatch
    made = laned(Seen(dropout=0.3).double(), seen_step(*RAGGED), own_lanes=True, sizes=sizes)
    assert not any("." in cell for row in made.drawn(0).rows for cell in row)
    check_equal(made, made.drawn(0), made.drawn(1, strategy="recompute"))
    made.model.eval()
    assert any("." in cell for row in made.drawn(0).rows for cell in row)


class Turn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.angle = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.polar(torch.ones_like(self.angle), self.angle)


class Spectra(Seen):
    """Its vision encoder returns complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.ModuleList(Turn() for _ in range(3))

    def forward(self, words: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        seen = torch.complex(pixels, pixels)
        for layer in self.vision:
            seen = layer(seen)
        return super().forward(words + seen.conj().imag.mean(0))


def test_complex_numbers_between_chunks_have_gradients():
    torch.manual_seed(1)
    made = laned(Spectra().double(), seen_step((2, 0), (1, 0)))
    check_equal(made, made.drawn(0))


def test_an_encoder_whose_units_depend_on_each_other_takes_whole_microbatches():
    torch.manual_seed(1)
    model = Seen()
    model.vision[1].register_forward_pre_hook(lambda module, args: (args[0] - args[0].mean(0),))
    made = laned(model.double(), seen_step((4, 4), (2, 2)), sizes={"vision": 1, "audio": 1})
    pieces = {cell[0] for row in made.drawn(0).rows for cell in row if "." in cell and cell[0].isdigit()}
    encoders = {str(index) for index, chunk in enumerate(made.partition.chunks) if chunk.parts[0].module == "audio"}
    assert pieces == encoders
    check_equal(made, made.drawn(0))


def test_a_weight_that_lanes_of_one_rank_train_is_refused():
    model = Seen()
    model.audio[0].inner.weight = model.text[2].inner.weight
    made = laned(model.double(), seen_step((1, 1)))
    with pytest.raises(InvalidPlanError, match=r"lanes 0, 1 of rank 0 both train audio\.0\.inner\.weight"):
        run(made, made.drawn(0))
    model.audio[0].inner.weight.requires_grad_(False)
    frozen = laned(model, seen_step((1, 1)))
    check_equal(frozen, frozen.drawn(0))


def two_lanes(*rows: str, edges: Sequence[str] = ()) -> PipelineSchedule:
    """Rank 0 with two lanes, and rank 1 if there is a third row."""
    cells = tuple(tuple(row.split()) for row in rows)
    return PipelineSchedule(
        plan="lanes",
        num_microbatches=1,
        rank_of=(0, 0, 1)[: len(rows)],
        chunks=("vision[0:1/1]", "audio[0:1/1]", "text[0:1/1]"),
        rows=cells,
        edges=dict.fromkeys(edges, 4),
        turns=((0,) * len(cells[0]) + (1,) * len(cells[1]), ()),
    )


@dataclass(kw_only=True)
class ActingWork(NumberWork):
    """Does something in forwards of chunks."""

    acts: Mapping[int, Callable[[], object]]

    def forward(self, task: RankTask, inputs: Mapping[TaskName, Tensors]) -> dict[TaskName, Tensors]:
        self.acts.get(task.name.chunk, lambda: None)()
        return super().forward(task, inputs)


def test_a_lane_that_fails_ends_the_lane_and_the_rank_that_wait_for_it():
    rows = "0F0 SEND(0F0>2F0) WAIT_SEND(0F0>2F0)", "1F0", "RECV(0F0>2F0) WAIT_RECV(0F0>2F0) 2F0"
    schedule = two_lanes(*rows, edges=["1F0>0F0", "0F0>2F0"])

    def program(transport: Transport) -> BaseException | None:
        work = ActingWork(acts={1: no_caption})
        try:
            Executor(transport).run(schedule, work, lanes=on_lanes(transport, schedule))
        except (ValueError, RankFailedError) as error:
            return error
        return None

    own, other = InProcess(2).run(program)
    assert isinstance(own, ValueError)
    assert isinstance(other, RankFailedError)
    assert str(other) == "rank 0 failed in 1F0: ValueError: no such caption"


def test_lanes_end_when_their_caller_is_interrupted(monkeypatch: pytest.MonkeyPatch):
    """While one of them waits for a rank that does not send."""
    rows = "RECV(2F0>0F0) WAIT_RECV(2F0>0F0) 0F0", "1F0", "2F0 SEND(2F0>0F0) WAIT_SEND(2F0>0F0)"
    schedule = two_lanes(*rows, edges=["2F0>0F0"])
    gate, drain, begun = threading.Event(), HostLanes.drain, threading.Event()

    def interrupted(lanes: HostLanes) -> None:
        monkeypatch.setattr(HostLanes, "drain", drain)
        assert begun.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(HostLanes, "drain", interrupted)

    def program(transport: Transport) -> BaseException | None:
        acts = {1: begun.set, 2: lambda: gate.wait(60)}
        work = ActingWork(acts=acts)
        try:
            Executor(transport).run(schedule, work, lanes=on_lanes(transport, schedule))
        except (KeyboardInterrupt, RankFailedError) as error:
            return error
        finally:
            gate.set()
        return None

    own, other = InProcess(2).run(program)
    assert isinstance(own, KeyboardInterrupt)
    assert str(other) == "rank 0 failed in the wait for its lanes: KeyboardInterrupt: "
