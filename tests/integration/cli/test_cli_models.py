"""Commands on a model of the zoo, named as ``zoo:NAME-SIZE`` in the place of a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from mosaic import artifact
from mosaic.cli.counting import count_workload
from mosaic.cli.main import run
from mosaic.plan import Plan


@pytest.mark.parametrize(
    ("model", "gpus", "modules"),
    [
        ("clip-paper", "1", {"encoders.image", "encoders.text"}),
        ("t2v-gpu", "8", {"encoders.video", "encoders.text", "transformer"}),
    ],
)
def test_a_model_of_the_papers_size_is_planned_for_described_gpus_without_its_weights(
    model: str, gpus: str, modules: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    output = tmp_path / "plan.json"
    asked = ["--model", f"zoo:{model}", "--device", "h100-80g", "--gpus", gpus, "--method", "exact"]
    assert run(["plan", *asked, "--output", str(output)]) == 0
    placed = {placement.module for placement in artifact.load(Plan, output).placements}
    assert placed == modules
    printed = " ".join(capsys.readouterr().out.split())
    assert "in bfloat16 forward backward" in printed
    assert "counted in bfloat16: matrix products and attention in bfloat16 (autocast); weights" in printed
    assert "assumed: a neighbour costs a module the geometric mean of its cost" in printed


@pytest.mark.parametrize(
    ("kind", "asked", "counted"),
    [("cuda", None, "bfloat16"), ("host", None, "float32"), ("cuda", "float32", "float32")],
)
def test_the_zoo_is_counted_in_what_a_device_trains_in_or_what_was_asked(kind, asked, counted):
    results = count_workload("zoo:clip-tiny", (1,), kind=kind, dtype=asked)
    assert results.dtype == counted
    for node in results.graph.modules:
        # Value, gradient and two moments, all in 32 bits.
        assert results.counts[node.name][1].memory.resident_bytes >= 16 * node.num_parameters


_TIED = """
import torch
from torch import nn

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.reader = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 32))
        self.seer = nn.Linear(32, 32)
        self.writer = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 64, bias=False))
        self.writer[1].weight = self.reader[0].weight

    def forward(self, ids, x):
        return self.writer(self.reader(ids).mean(1) + self.seer(x))

def make():
    return Tied(), {"ids": torch.zeros(4, 3, dtype=torch.long), "x": torch.zeros(4, 32)}
"""


def test_a_plan_for_several_gpus_has_the_modules_that_ranks_place(tmp_path: Path):
    file = tmp_path / "tied.py"
    file.write_text(_TIED)
    alone = count_workload(f"{file}:make", (1,), kind="cuda").graph
    several = count_workload(f"{file}:make", (1, 2), kind="cuda").graph
    assert {module.name for module in alone.modules} == {"seer"}
    assert {module.name for module in several.modules} == {"reader", "seer", "writer"}
