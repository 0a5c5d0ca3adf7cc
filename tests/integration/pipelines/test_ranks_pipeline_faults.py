"""Pipelines that meet what nobody planned: refused on all ranks, or ended on all with who, where and why."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ranks.nursery import Ended, run_programs

from mosaic.rank_trace import RankTrace
from mosaic.ranks.world.cancel import EXIT_CODE
from mosaic.report.slow_ranks import compare_ranks

BOUND_S = 60.0
PROGRAMS = (
    *("killed_in_a_save", "killed_in_a_backward", "resumed", "slow_rank"),
    *("busy", "refused_starts", "refused_steps", "no_loss"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, list[Ended]]:
    found: dict[str, list[Ended]] = {}
    for name in PROGRAMS:
        (found[name],) = run_programs([(f"ranks.programs.pipeline.faulty:{name}", 2, folder / name)], seconds=BOUND_S)
    return found


@pytest.mark.parametrize("name", ["refused_steps", "refused_starts"])
def test_what_cannot_be_run_is_refused_on_all_ranks_and_costs_nothing_else(outcomes: dict[str, list[Ended]], name: str):
    assert [(one.code, one.said) for one in outcomes[name]] == [(0, "refused\n")] * 2


def test_an_error_ends_all_ranks_with_its_reason(outcomes: dict[str, list[Ended]]):
    for one in outcomes["no_loss"]:
        assert one.code in (1, EXIT_CODE), one
        assert "ValueError: the model returned CausalLMOutputWithPast without a loss; give pipeline(" in one.said


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name.startswith("killed")])
def test_a_killed_rank_ends_the_other_which_names_it_and_where_it_was(outcomes: dict[str, list[Ended]], name: str):
    other, killed = outcomes[name]
    assert killed.code == -9
    assert other.code in (1, EXIT_CODE), other
    assert re.search(r"rank 1 \(\S+, process \d+\) is not heard of after", other.said), other.said
    assert "Last seen: " in other.said


def test_a_checkpoint_that_was_cut_short_leaves_the_one_before_from_which_a_run_goes_on(
    outcomes: dict[str, list[Ended]],
):
    assert [(one.code, one.said) for one in outcomes["resumed"]] == [(0, "equal\n")] * 2


def test_a_rank_that_does_not_come_is_named(outcomes: dict[str, list[Ended]]):
    other = outcomes["busy"][0]
    assert other.code == 1, other
    assert re.search(
        r"rank 1 \(.*\) has not come after 6 s .* rank 1: step 1, in the loop's own code after", other.said
    ), other.said


def test_the_doctor_names_the_slow_rank_of_a_pipeline(outcomes: dict[str, list[Ended]], folder: Path):
    assert [(one.code, one.said) for one in outcomes["slow_rank"]] == [(0, "slow\n")] * 2
    found = compare_ranks([RankTrace.read(folder / "slow_rank" / f"trace-rank{rank}.json") for rank in range(2)])
    slowest = found.slow[0]
    assert (slowest.rank, slowest.slow[0].phase) == (1, "forward"), found
