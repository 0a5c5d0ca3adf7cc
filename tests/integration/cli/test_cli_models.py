"""Commands on a model of the zoo, named as ``zoo:NAME-SIZE`` in the place of a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mosaic import artifact
from mosaic.cli.counting import count_workload
from mosaic.cli.main import run
from mosaic.plan import Plan


def test_a_model_of_the_papers_size_is_planned_for_a_described_gpu_without_its_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    output = tmp_path / "plan.json"
    asked = ["--model", "zoo:clip-paper", "--device", "h100-80g", "--method", "exact"]
    gain = tmp_path / "gain.json"
    assert run(["plan", *asked, "--output", str(output), "--explain-gain", "--json", str(gain)]) == 0
    placed = {placement.module for placement in artifact.load(Plan, output).placements}
    assert placed == {"encoders.image", "encoders.text"}
    printed = " ".join(capsys.readouterr().out.split())
    assert "counted in bfloat16: matrix products and attention in bfloat16 (autocast); weights" in printed
    assert "assumed: a neighbour slows a module down by the geometric mean of two" in printed
    assert "modelled from predicted times" in printed
    assert "expected step on h100-80g, predicted, without loss and optimizer: one module at a time" in printed
    explained = json.loads(gain.read_text())
    assert explained["source"] == "predicted"
    assert explained["bound_ms"] <= explained["plan_ms"] <= explained["sequential_ms"]
    assert {module["bound_by"] for module in explained["modules"]} == {"SM-bound"}


_BOUNDS = """
import torch
from torch import nn

TOWERS = {
    "launch": (lambda: [nn.Linear(8, 8) for _ in range(8)], (4, 8)),
    "bandwidth": (lambda: [nn.LayerNorm(64), nn.GELU()], (1 << 22, 64)),
}

class Two(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.left, self.right = nn.Sequential(*layers()), nn.Sequential(*layers())

    def forward(self, x, y):
        return self.left(x).mean() + self.right(y).mean()

def make(kind):
    layers, shape = TOWERS[kind]
    with torch.device("meta"):
        return Two(layers).bfloat16(), [torch.zeros(shape).bfloat16() for _ in range(2)]

launch, bandwidth = (lambda kind=kind: make(kind) for kind in TOWERS)
"""


@pytest.mark.parametrize(
    ("kind", "bound", "words"),
    [
        ("launch", "launch-bound", "an eager step takes at least this time"),
        ("bandwidth", "bandwidth-bound", "another module can compute on the others"),
    ],
)
def test_each_kind_of_bound_is_named_for_a_gpu_that_is_not_there(
    kind: str, bound: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "bounds.py").write_text(_BOUNDS)
    arguments = ["--explain-gain", "--json", "-", "--output", str(tmp_path / "plan.json")]
    assert run(["plan", "--model", f"{tmp_path}/bounds.py:{kind}", *arguments]) == 0
    captured = capsys.readouterr()
    explained = json.loads(captured.out)
    assert explained["device"] == "h100-80g"
    assert [module["bound_by"] for module in explained["modules"]] == [bound] * 2
    for module in explained["modules"]:  # no module is faster than its bound
        assert max(module["launch_ms"], module["sm_ms"], module["bandwidth_ms"]) <= module["whole_ms"] * (1 + 1e-9)
    assert explained["launch_ms"] == pytest.approx(sum(module["launch_ms"] for module in explained["modules"]))
    assert explained["expected_ms"] == max(explained["launch_ms"], explained["plan_ms"])
    assert words in " ".join(captured.err.split())
    assert "rule of thumb" in captured.err


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
    several = count_workload(f"{file}:make", (1, 2), kind="cuda").graph
    assert {module.name for module in several.modules} == {"reader", "seer", "writer"}
