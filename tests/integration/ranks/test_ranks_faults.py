"""Ranks that are killed, fail, leave or are stuck: the others end, and say which one it was and where each was.

Each case has a bound of its own on the time after which a rank counts as hanging; these are wide, for busy machines.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
import torch
from ranks.nursery import Ended, run_programs
from safetensors.torch import load_file

BOUND_S = 60.0
AT_ONCE = 4
"""Cases that run at the same time: most of their time is waiting."""
NAMES = ("in_order", "fewer_batches_on_one", "uninterrupted", "killed", "an_error_on_one", "unlike")
"""Those that wait longest are side by side."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, list[Ended]]:
    found: dict[str, list[Ended]] = {}
    for first in range(0, len(NAMES), AT_ONCE):
        names = NAMES[first : first + AT_ONCE]
        asked = [(f"ranks.programs.meeting.faults:{name}", 2, folder / name) for name in names]
        found.update(zip(names, run_programs(asked, seconds=BOUND_S), strict=True))
    return found


def names(said: str, rank: int) -> bool:
    """Returns True if a message names a rank with its machine and process as the one at fault."""
    return re.search(rf"RankFailedError: rank {rank} \(\S+, process \d+\)", said) is not None


def test_a_rank_that_waits_for_one_that_was_killed_names_it_and_where_each_was(outcomes: dict[str, list[Ended]]):
    other, killed = outcomes["killed"]
    assert (other.code, killed.code) == (1, -signal.SIGKILL)
    assert names(other.said, 1), other.said
    assert "is not heard of after a connection was closed: it was killed" in other.said
    # Its last heartbeat may be of before its first step.
    assert re.search(r"Last seen: rank 0: .*; rank 1: (step \d, |before its first step)", other.said), other.said


def test_the_others_are_told_the_error_of_a_rank_that_fails(outcomes: dict[str, list[Ended]]):
    other, failed = outcomes["an_error_on_one"]
    assert (other.code, failed.code) == (1, 1)
    assert names(other.said, 1)
    text = r"failed: ValueError: no such caption. Last seen: rank 0: (step \d,|before its) .* rank 1: step 2, "
    assert re.search(text, other.said)
    assert re.search(r"mosaic: rank 1 \(.*" + text, failed.said)


def test_a_rank_with_fewer_batches_is_named(outcomes: dict[str, list[Ended]]):
    waiting, left = outcomes["fewer_batches_on_one"]
    assert left.code == 0
    assert waiting.code == 1
    assert names(waiting.said, 1)
    assert "has left the loop after 3 calls of the model" in waiting.said
    assert "same number of batches" in waiting.said


def test_a_run_that_ends_in_order_ends_without_a_word(outcomes: dict[str, list[Ended]]):
    for rank in outcomes["in_order"]:
        assert (rank.code, rank.said.strip()) == (0, "trained")


def test_torchrun_restarts_a_run_that_goes_on_from_its_last_checkpoint(
    outcomes: dict[str, list[Ended]], folder: Path, tmp_path: Path
):
    place = tmp_path / "restarted"
    ((done,),) = run_programs([("ranks.programs.meeting.restart:restarted", 1, place)], seconds=200)
    said = done.said
    assert done.code == 0, said  # torchrun may have ended the other rank before it could say anything
    killed = re.search(r"killed rank \d at step (\d+)", said)
    assert killed is not None
    starts = [int(step) for step in re.findall(r"rank \d starts at step (\d+)", said)]
    assert len(starts) == 4, said
    assert starts[:2] == [0, 0]
    assert starts[2] == starts[3], said
    assert starts[3] <= int(killed[1]), said
    assert all(rank.code == 0 for rank in outcomes["uninterrupted"]), outcomes["uninterrupted"]
    expected = load_file(folder / "uninterrupted" / "model.safetensors")
    found = load_file(place / "model.safetensors")
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), (name, said)


def test_ranks_that_are_not_alike_are_named_on_all(outcomes: dict[str, list[Ended]]):
    for rank in outcomes["unlike"]:
        assert rank.code == 0
        said = rank.said.splitlines()
        assert len(said) == 2
        assert "rank 1 has torch='2.5.0'" in said[0]
        assert "give each a sample with the same number of rows, padded to one length" in said[1]
        assert "found: rank 1 has inputs of 'text'='3x9 int64'; needed: inputs of 'text'='3x5 int64' as on" in said[1]
