"""A small folder for ``mosaic retrain``, whose day takes a second beside its imports."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mosaic.artifact import load, steps_in
from mosaic.retrain.folder import DayFolder, Folder
from mosaic.retrain.records import Trained

PROGRAM = Path(__file__).with_name("towers.py")
NUM_STEPS = 40
RECIPE: Mapping[str, Any] = {
    "model": "train.py:Towers",
    "data": "train.py:Rows",
    "loss": "train.py:loss",
    "score": "train.py:score",
    "optimizer": "train.py:make_optimizer",
    "companions": "train.py:make_companions",
    "update_companions": "train.py:update_companions",
    "scaler": "train.py:make_scaler",
    "device": "cpu",
    "sources": {"new": {"path": "data/{day}"}, "frozen": "data/frozen"},
    "budget": {
        "batch": 16,
        "micro_batches": 2,
        "steps": NUM_STEPS,
        "save": "0.05s",
        "workers": 0,
        "colocate": False,
    },
    "gate": {"margin": 0.9},
    "check": {"max_drop": 1.0},
}
"""``retrain.toml``; a margin that no model of this size misses."""


def write_folder(root: Path, *days: str, **changed: Any) -> Folder:
    """Makes a folder in which ``mosaic retrain run`` can be started, with data of some days."""
    root.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(PROGRAM, root / "train.py")
    write_recipe(root, **changed)
    write_rows(root / "data" / "frozen", 40, seed=99)
    for day in days:
        write_day(root, day)
    return Folder(root)


def write_recipe(root: Path, **changed: Any) -> None:
    """Writes the recipe with other keys than ``RECIPE`` has; of a table some, as in ``budget={"workers": 2}``."""
    merged = {
        name: {**RECIPE.get(name, {}), **value} if isinstance(value, dict) else value for name, value in changed.items()
    }
    (root / "retrain.toml").write_text("\n".join(_toml({**RECIPE, **merged})))


def write_day(root: Path, day: str, num_rows: int = 120, **more: Any) -> Path:
    """Writes a day's rows and marks them ready; ``more`` goes into each row."""
    path = write_rows(root / "data" / day, num_rows, seed=int(day.replace("-", "")), **more)
    (path / "_SUCCESS").touch()
    return path


def write_rows(path: Path, num_rows: int, *, seed: int, **more: Any) -> Path:
    """Writes rows whose label can be learned."""
    draw = random.Random(seed)
    path.mkdir(parents=True, exist_ok=True)
    with (path / "rows.jsonl").open("w") as file:
        for _ in range(num_rows):
            label = draw.randrange(2)
            row = {side: [round(draw.gauss(label, 1.0), 3) for _ in range(4)] for side in ("left", "right")}
            file.write(json.dumps({**row, "label": label, **more}) + "\n")
    return path


def bits_of(day: DayFolder) -> dict[str, object]:
    """Returns what kills must not change: the losses of all steps, parameters and buffers, the export, all scores."""
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (day.model, day.scores)}
    losses = {step: row["loss"] for step, row in steps_in(day.metrics).items()}
    return {"losses": losses, "parameters": load(Trained, day.trained).digest, **files}


def _toml(table: Mapping[str, Any], above: str = "") -> list[str]:
    lines = [f"{name} = {json.dumps(value)}" for name, value in table.items() if not isinstance(value, dict)]
    for name, value in table.items():
        if isinstance(value, dict):
            lines += [f"[{above}{name}]", *_toml(value, f"{above}{name}.")]
    return lines
