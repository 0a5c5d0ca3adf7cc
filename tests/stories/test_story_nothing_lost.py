"""Stories: what was killed goes on as if nothing had happened; a model is retrained day by day."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file
from story_killed import train
from story_models import assert_same_bits

import mosaic
from mosaic.retrain import champion

HERE = Path(__file__).parent


def run_script(*words: object) -> int:
    return subprocess.run([sys.executable, *map(str, words)], timeout=200).returncode


def test_a_loop_that_is_killed_goes_on_from_its_checkpoint_with_the_same_bits(
    tmp_path: Path, mosaic_command: Callable[..., int]
):
    script, folder = HERE / "story_killed.py", tmp_path / "checkpoints"
    assert run_script(script, folder, 3) == -signal.SIGKILL
    assert not (folder / "trained.safetensors").exists()
    assert run_script(script, folder) == 0
    plain = train()
    assert_same_bits(plain, load_file(folder / "trained.safetensors"))
    assert mosaic_command("checkpoints", folder) == 0


TRAIN_PY = """
import json, os, signal
from pathlib import Path
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text, self.head = nn.Linear(4, 16), nn.Linear(4, 16), nn.Linear(32, 2)

    def forward(self, image, text):
        return self.head(torch.cat((self.image(image).relu(), self.text(text).relu()), dim=1))

class Rows(torch.utils.data.Dataset):
    def __init__(self, folder, train):
        self.rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        return {"image": torch.tensor(row["image"]), "text": torch.tensor(row["text"]), "label": row["label"]}

def make_optimizer(model, num_steps):
    return torch.optim.AdamW(model.parameters(), lr=0.03)

calls = 0

def loss(model, batch):
    global calls
    calls += 1
    kill = Path(__file__).with_name("kill")
    if calls == 15 and kill.exists():
        kill.unlink()
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    return nn.functional.cross_entropy(model(batch["image"], batch["text"]), batch["label"])

def score(model, batch):
    right = model(batch["image"], batch["text"]).argmax(1) == batch["label"]
    return {"value": right.float(), "label": batch["label"]}
"""
RECIPE = """
model = "train.py:Model"
data = "train.py:Rows"
loss = "train.py:loss"
score = "train.py:score"
optimizer = "train.py:make_optimizer"
device = "cpu"
[sources]
new = {path = "data/{day}"}
frozen = "data/frozen"
[budget]
batch = 16
steps = 30
save = "0.05s"
workers = 0
[gate]
margin = 0.3
"""


def write_rows(folder: Path, count: int, *, wrong: bool = False) -> None:
    """Rows whose label can be learned; of a bad day each label is the other one."""
    draw = random.Random(folder.name)
    folder.mkdir(parents=True)
    with (folder / "rows.jsonl").open("w") as file:
        for _ in range(count):
            label = draw.randrange(2)
            row = {name: [round(draw.gauss(3 * label, 1.0), 3) for _ in range(4)] for name in ("image", "text")}
            file.write(json.dumps({**row, "label": 1 - label if wrong else label}) + "\n")
    (folder / "_SUCCESS").touch()


def make_node(path: Path) -> Path:
    path.mkdir()
    (path / "train.py").write_text(TRAIN_PY)
    (path / "retrain.toml").write_text(RECIPE)
    write_rows(path / "data" / "frozen", 200)
    write_rows(path / "data" / "2026-11-20", 160)
    return path


def test_a_days_model_is_promoted_after_a_kill_and_a_bad_day_is_refused(
    tmp_path: Path, mosaic_command: Callable[..., int]
):
    nodes = []
    for name in ("disturbed", "undisturbed"):
        (tmp_path / name).mkdir()
        nodes.append(make_node(tmp_path / name / "node"))
    node, undisturbed = nodes
    (node / "kill").touch()
    assert run_script("-m", "mosaic", "retrain", "run", node) == -signal.SIGKILL
    assert not (node / "kill").exists()
    with pytest.raises(mosaic.MosaicError, match="no champion yet"):
        champion(node)
    for each in nodes:
        assert mosaic_command("retrain", "run", each) == 0
    first, expected = champion(node), champion(undisturbed)
    assert first.weights.read_bytes() == expected.weights.read_bytes()
    assert "PROMOTED" in (node / "days" / "2026-11-20" / "report.html").read_text()

    write_rows(node / "data" / "2026-11-21", 160, wrong=True)
    assert mosaic_command("retrain", "run", node) == 5
    assert champion(node) == first
    assert "KEPT" in (node / "days" / "2026-11-21" / "report.html").read_text()
