"""The study of pipelines that run at sizes that take a moment: figures have a source, samples, or a reason."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from bench.gpu.bench import open_bench
from bench.gpu.pipeline_ranks import measure_pipeline_ranks
from bench.pipeline import tables
from bench.pipeline.actions import empty_action_cost
from bench.pipeline.measured.memory import memory, peak_bytes
from bench.pipeline.measured.models import MODELS
from bench.pipeline.measured.step_cost import step_cost
from bench.pipeline.measured.steps import Sizes, steps, too_few_cores
from bench.ranks.launch import on_ranks
from bench.record import Figure, Study
from mosaic.artifact import save

SIZES = Sizes(width=64, layers=2, microbatches=2, steps=1, rounds=1, plan_s=0.0)


@pytest.fixture(scope="module")
def llama() -> list[Figure]:
    return list(on_ranks(partial(steps, name="llama", sizes=SIZES), 2, 100))


def by_name(figures: list[Figure]) -> dict[str, Figure]:
    return {one.name: one for one in figures if one.source == "measured"}


def test_a_chain_is_run_by_all_ways_and_by_torch_with_the_same_losses(llama: list[Figure]):
    found = by_name(llama)
    for name in ("1f1b", "gpipe", "torch's Schedule1F1B"):
        ratio = found[f"llama, 2 ranks: {name}: step over the planned one's, ratio"]
        assert ratio.value is not None, ratio.reason
        assert ratio.value > 0
    assert len(found["llama, 2 ranks: planned: step, ms"].samples) == 1


def test_simulated_steps_stand_beside_measured_ones(llama: list[Figure]):
    name = "llama, 2 ranks: planned: tasks of a step, ms"
    assert {one.source for one in llama if one.name == name} == {"measured", "simulated"}
    assert "llama, 2 ranks: simulated against measured tasks of a step, median error, % (goal: 5)" in by_name(llama)


def test_a_model_that_torch_cannot_cut_has_what_torch_said():
    figures = list(on_ranks(partial(steps, name="llava", sizes=SIZES), 2, 100))
    missing = by_name(figures)["llava, 2 ranks: torch's Schedule1F1B: step over the planned one's, ratio"]
    assert missing.value is None
    assert missing.reason.startswith("torch.distributed.pipelining.pipeline: ")
    assert by_name(figures)["llava, 2 ranks: planned: step, ms"].value


def test_memory_of_a_rank_is_near_what_was_simulated():
    figures = list(on_ranks(partial(memory, name="llama", baseline="1f1b", sizes=SIZES), 2, 100))
    values = {one.source: one.value for one in figures if one.name.endswith("fullest rank, MB")}
    assert values["measured"] == pytest.approx(values["simulated"], rel=0.25)


def test_memory_counts_what_is_in_use_at_one_time():
    def run() -> None:
        first = torch.empty(1000, 100)
        del first
        second, third = torch.empty(500, 100), torch.empty(700, 100)
        del second, third

    assert peak_bytes(run) == 4 * 1200 * 100


def test_a_steps_own_cost_and_an_actions_have_figures():
    names = [one.name for one in on_ranks(partial(step_cost, rounds=1), 2, 100)]
    assert names[0].startswith("a step beside its tasks")
    assert all(one.value for one in empty_action_cost())


def test_microbatches_are_the_same_for_one_seed_and_ragged():
    steps = [MODELS["llava"].step(1, 8) for _ in range(2)]
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(*steps, strict=True))
    assert len({len(one.get("pixel_values", ())) for one in steps[0]}) > 2


def test_the_table_has_a_row_for_each_model_and_says_what_is_missing(tmp_path: Path, llama: list[Figure]):
    assert tables.measured_table(tmp_path) == "not measured yet\n"
    study = Study(
        study=tables.NAME,
        command="python -m bench.pipeline.measured",
        created="2026-01-01T00:00:00Z",
        commit="0" * 40,
        python_version="3",
        torch_version="2",
        machine=None,
        foreign_cpu_share=None,
        figures=(*llama, *too_few_cores("llama", 4)),
    )
    (tmp_path / "host").mkdir()
    save(study, tmp_path / "host" / f"2026-01-01-0-{tables.NAME}.json")
    lines = tables.measured_table(tmp_path).splitlines()
    assert lines[2].startswith("| llama, 2 ranks | ")
    assert lines[3] == "| llama, 4 ranks | - | - | - | - | - | - | - | - |"
    assert any("each rank needs one" in line for line in lines[4:])


def test_a_pipeline_of_threads_has_the_plain_loops_gradients():
    bench = open_bench(seconds=20.0, dry_run=True, on_host=True)
    figures = list(measure_pipeline_ranks(bench))
    differences = [one.value for one in figures if one.name.startswith("gradients against")]
    assert len(differences) == 2
    assert max(differences) < 1e-5
    assert {one.labels["variant"] for one in figures if one.name == "step_ms"} == {"plain loop", "planned", "1f1b"}
