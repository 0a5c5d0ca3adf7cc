"""Results that go straight from one module's ranks to another's, on processes that exchange them."""

from __future__ import annotations

from typing import Any

import pytest
from ranks.cases import run_ranks

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks("ranks.programs.straight:observed", 3, tmp_path_factory.mktemp("straight"))


def test_chains_and_diamonds_on_overlapping_ranks_train_as_data_parallel_training(observed: list[dict[str, Any]]):
    for told in observed:
        for case in told["cases"]:
            for direct in (True, False):
                assert case[f"loss {direct}"] < TOLERANCE, case
                assert case[f"parameters {direct}"] < TOLERANCE, case
                assert (case[f"in place {direct}"] > 0) == case["tied"], case


def test_less_is_sent_where_results_go_straight(observed: list[dict[str, Any]]):
    for case in observed[0]["cases"]:
        assert case["straight True"] > case["straight False"] == 0
        assert sum(case["sent True"]) < sum(case["sent False"]), case


def test_what_is_predicted_to_be_sent_is_what_is_sent(observed: list[dict[str, Any]]):
    for told in observed:
        for predicted, sent in told["predicted"]:
            assert predicted == sent
    totals = [sum(sent.values()) for _, sent in observed[0]["predicted"]]
    assert all(totals)
    straight, home = totals[2], totals[4]  # the same layout
    assert straight < home


def test_a_use_that_the_sample_did_not_make_is_an_error_and_no_hang(observed: list[dict[str, Any]]):
    for rank, told in enumerate(observed):
        found = told["misused"]
        for use in ("reads", "returns", "swaps"):
            assert "options=Options(ranks=RankSettings(direct=False))" in found[use], found
            assert "'eye'" in found[use], found
            assert found[f"after {use}"] == "True", found
        assert found["outside"] == "True"
        assert found["alone"].startswith("RankFailedError" if rank else "ModuleContractError"), found
