"""Pipelines that meet what nobody planned: refused on all ranks, or ended on all with who, where and why."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ranks.nursery import Ended, run_program, run_programs

BOUND_S = 60.0
SIZES = {
    "faulty:killed_in_a_backward": 2,
    "faulty:killed_in_a_save": 2,
    "faulty:busy": 2,
    "faulty:no_loss": 2,
    "faulty:refused_starts": 2,
    "faulty:refused_steps": 2,
    "replicated:an_error_in_one_replica": 4,
    "replicated:with_other_weights": 2,
    "shared_layers:an_error_of_one": 2,
}
AT_ONCE = 2
"""Programs that run at the same time."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, list[Ended]]:
    found: dict[str, list[Ended]] = {}
    for first in range(0, len(SIZES), AT_ONCE):
        names = list(SIZES)[first : first + AT_ONCE]
        asked = [(f"ranks.programs.pipeline.{name}", SIZES[name], folder / name.partition(":")[2]) for name in names]
        found.update(zip(names, run_programs(asked, seconds=BOUND_S), strict=True))
    return found


@pytest.mark.parametrize("name", ["refused_steps", "refused_starts"])
def test_what_cannot_be_run_is_refused_on_all_ranks_and_costs_nothing_else(outcomes: dict[str, list[Ended]], name: str):
    assert [(one.code, one.said) for one in outcomes[f"faulty:{name}"]] == [(0, "refused\n")] * 2


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("faulty:no_loss", "the loss of the model's CausalLMOutputWithPast is a NoneType; give pipeline("),
        ("replicated:an_error_in_one_replica", "ValueError: no such caption"),
        ("replicated:with_other_weights", "the ranks' models have other weights"),
        ("shared_layers:an_error_of_one", "ValueError: no such caption"),
    ],
)
def test_an_error_of_one_rank_ends_all_with_its_reason(outcomes: dict[str, list[Ended]], name: str, said: str):
    for rank, one in enumerate(outcomes[name]):
        assert one.code == 1, one
        assert said in one.said, one
        if said.endswith("caption") and rank != 1:
            assert "RankFailedError: rank 1 failed in " in one.said, one


@pytest.mark.parametrize("name", [name for name in SIZES if "killed" in name])
def test_a_killed_rank_ends_the_others_which_name_it_and_where_it_was(outcomes: dict[str, list[Ended]], name: str):
    assert outcomes[name][1].code == -9
    for other in outcomes[name][:1] + outcomes[name][2:]:
        assert other.code == 1, other
        assert re.search(r"rank 1 \(\S+, process \d+\) is not heard of after", other.said), other.said
        assert "Last seen: " in other.said


def test_a_checkpoint_that_was_cut_short_leaves_the_one_before_from_which_a_run_goes_on(
    outcomes: dict[str, list[Ended]], folder: Path
):
    assert outcomes["faulty:killed_in_a_save"][1].code == -9
    ended = run_program("ranks.programs.pipeline.faulty:resumed", 2, folder / "resumed", seconds=BOUND_S)
    assert [(one.code, one.said) for one in ended] == [(0, "equal\n")] * 2


def test_a_rank_that_does_not_come_is_named(outcomes: dict[str, list[Ended]]):
    other = outcomes["faulty:busy"][0]
    assert other.code == 1, other
    assert re.search(
        r"rank 1 \(.*\) has not come after 6 s .* rank 1: step 1, in the loop's own code after", other.said
    ), other.said
