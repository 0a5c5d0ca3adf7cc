"""Programs on several ranks; each checks what it computes, most of them against DistributedDataParallel."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks.cases import run_ranks
from ranks.nursery import run_program

PROGRAMS = {
    "random graphs under random layouts, the same bits, activation checkpointing": (
        "programs.parameters.equality:on_two_ranks",
        2,
    ),
    "random graphs on four ranks": ("programs.parameters.equality:random_graphs", 4),
    "loops as people write them": ("programs.running.unchanged:everything", 2),
    "a backward that one rank leaves out ends both": ("programs.running.unchanged:uneven", 2),
    "examples as they stand, with Trainer and Lightning": ("programs.running.examples:examples", 2),
    "loops that need more parameters or rows than a rank has": ("programs.parameters.awkward:everything", 2),
    "state that a module reads besides its arguments": ("programs.calls.hidden:everything", 2),
    "what is sent, and what overlaps": ("programs.calls.engine:observed", 2),
    "a failure on a lane leaves the loop": ("programs.calls.engine:failing", 2),
    "routed calls on streams": ("programs.calls.streams:observed", 2),
    "plans are tried, and nothing of it is left but the choice": ("programs.choosing.trial:everything", 2),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_on_ranks_is_right(name: str, tmp_path: Path):
    function, size = PROGRAMS[name]
    run_ranks(f"ranks.{function}", size, tmp_path)


@pytest.mark.parametrize(("name", "size"), [("over_sequences", 4), ("of_their_own", 3), ("nested", 3)])
def test_a_glued_model_trains_on_ranks_that_share_sequences_or_layers_as_on_one(name: str, size: int, tmp_path: Path):
    ended = run_program(f"ranks.programs.glued:{name}", size, tmp_path / "ranks", seconds=120.0)
    assert [(rank.code, rank.said.endswith("equal\n")) for rank in ended] == [(0, True)] * size, ended
