"""The models of the papers on a GPU: a whole training step becomes one CUDA graph."""

from __future__ import annotations

import pytest

from bench.gpu.bench import open_bench
from bench.gpu.models import Workload, whole_step_graph
from mosaic.models import PAPER_MODELS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", PAPER_MODELS)
def test_a_whole_training_step_is_captured_in_one_graph(name: str):
    bench = open_bench(seconds=60, dry_run=True)
    work = Workload(name, 2, bench)
    work.step()
    with whole_step_graph(work, bench) as (plain, captured):
        expected = work.losses(plain)
        assert work.losses(captured) == pytest.approx(expected, rel=0.02)
