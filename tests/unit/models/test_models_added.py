"""Adding a model to the zoo is one file and one line of its table; shown in a copy of the package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import mosaic

TWINS = """
from dataclasses import dataclass
import torch
from torch import nn
from mosaic.models.inputs import TINY, InputSizes
from mosaic.models.zoo_model import ZooModel

@dataclass(frozen=True)
class TwinsConfig:
    width: int
    inputs: InputSizes = TINY

class Twins(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.left, self.right = nn.Linear(48, config.width), nn.Linear(48, config.width)

    def forward(self, left, right):
        return {"loss": (self.left(left) - self.right(right)).square().mean()}

def make_batch(config, draw):
    return {"left": draw.normal(48), "right": draw.normal(48)}

MODEL = ZooModel(
    name="twins", make=Twins, sample=make_batch, sizes={"tiny": TwinsConfig(64)}, source="this test"
)
"""


def test_a_model_is_added_by_one_file_and_one_line_and_planned_by_the_command(tmp_path: Path):
    source, copy = Path(mosaic.__file__).parent, tmp_path / "mosaic"
    copy.mkdir()
    for each in source.iterdir():
        if each.name != "models":
            (copy / each.name).symlink_to(each.resolve())
    shutil.copytree(source / "models", copy / "models")
    (copy / "models" / "twins.py").write_text(TWINS)
    table = copy / "models" / "catalogue.py"
    before = table.read_text()
    table.write_text(before.replace('    "clip",\n', '    "clip",\n    "twins",\n'))
    assert len(table.read_text().splitlines()) == len(before.splitlines()) + 1
    code = """
import sys
from mosaic import models
from mosaic.cli.main import run
model = models.build("twins")
models.loss_of(model(**models.make_batch("twins"))).backward()
assert all(parameter.grad is not None for parameter in model.parameters())
sys.exit(run(sys.argv[1:]))
"""
    out = tmp_path / "plan.json"
    arguments = ["plan", "--model", "zoo:twins-tiny", "--device", "h100-80g", "--output", str(out)]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    placed = {each["part"]["module"] for stage in json.loads(out.read_text())["stages"] for each in stage["placements"]}
    assert placed == {"left", "right"}
