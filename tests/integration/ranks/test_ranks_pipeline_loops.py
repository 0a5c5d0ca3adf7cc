"""What loops do beside steps of a pipeline: low precision, averages, evaluation, checkpoints, what is no number."""

from __future__ import annotations

import pytest
from ranks.nursery import Ended, run_programs

BOUND_S = 120.0
SIZES = {
    "under_autocast": 2,
    "with_averages": 2,
    "evaluated": 2,
    "exchanged": 2,
    "with_what_is_not_a_number": 2,
    "with_normalized_batches": 2,
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Ended]]:
    folder = tmp_path_factory.mktemp("loops")
    asked = [(f"ranks.programs.pipeline.loops:{name}", size, folder / name) for name, size in SIZES.items()]
    return dict(zip(SIZES, run_programs(asked, seconds=BOUND_S), strict=True))


@pytest.mark.parametrize("name", SIZES)
def test_loops_around_a_pipeline_do_what_the_plain_loop_does(outcomes: dict[str, list[Ended]], name: str):
    assert [(one.code, one.said) for one in outcomes[name]] == [(0, "equal\n")] * SIZES[name]
