"""The folder that ``init`` writes is complete and trains; nothing is overwritten."""

from __future__ import annotations

import importlib.util
import json
import tomllib
from datetime import date
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

pytest.importorskip("sklearn", reason="needs the extra demo")

from mosaic.demo.days.digits import DayKind, write_day
from mosaic.demo.days.starter import write_starter
from mosaic.errors import MosaicError
from mosaic.retrain.worker.sources import held_out_rows

DAY = date(2026, 11, 22)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("starter") / "robot"
    write_starter(folder, DAY)
    return folder


def opened(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("train", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def train(folder: Path) -> ModuleType:
    return opened(folder / "train.py")


def test_a_new_folder_has_recipe_model_a_ready_day_and_a_frozen_set(folder: Path):
    recipe = tomllib.loads((folder / "retrain.toml").read_text())
    functions = ("model", "data", "loss", "score", "optimizer", "companions", "update_companions")
    assert {*functions, "export", "sources", "budget", "gate", "promote"} == set(recipe)
    assert (folder / "data" / "2026-11-22" / recipe["sources"]["new"]["ready"]).exists()
    assert (folder / recipe["sources"]["frozen"]).is_dir()
    for key in functions:
        file, name = recipe[key].split(":")
        assert callable(getattr(opened(folder / file), name))


def test_what_is_there_is_not_overwritten_and_nothing_else_is_written(tmp_path: Path):
    (tmp_path / "train.py").write_text("mine")
    with pytest.raises(MosaicError, match=r"train\.py is there already"):
        write_starter(tmp_path, DAY)
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    assert (tmp_path / "train.py").read_text() == "mine"


def test_a_day_that_is_there_is_not_overwritten(folder: Path):
    with pytest.raises(MosaicError, match="days never change"):
        write_day(folder / "data" / "frozen", DayKind(), seed=0)


def test_the_same_seed_makes_the_same_bytes(tmp_path: Path):
    for name in ("once", "again"):
        write_day(tmp_path / name, DayKind(num_rows=30, mix={"image+audio": 0.5, "imu": 0.5}), seed=3)
    for file in ("rows.safetensors", "index.jsonl"):
        assert (tmp_path / "once" / file).read_bytes() == (tmp_path / "again" / file).read_bytes()


def clusters(folder: Path, kind: str) -> set[str]:
    rows = [json.loads(line) for line in (folder / "index.jsonl").read_text().splitlines()]
    return {row["cluster"] for row in rows if row["cluster"].startswith(kind)}


@pytest.mark.parametrize("kind", ["writer", "voice"])
def test_the_frozen_set_shares_no_voice_and_no_block_of_scans_with_a_day(folder: Path, kind: str):
    frozen, day = (clusters(folder / "data" / name, kind) for name in ("frozen", "2026-11-22"))
    assert len(frozen) >= 20
    assert len(day) >= 20
    assert not frozen & day


def test_a_few_steps_make_the_loss_smaller_and_scores_have_a_value_for_each_row(folder: Path, train: ModuleType):
    torch.manual_seed(0)
    model, data = train.make_model(), train.make_dataset(folder / "data" / "2026-11-22", True)
    optimizers, schedulers = train.make_optimizer(model, 40)
    companions = train.companions(model)
    losses = []
    loader = DataLoader(data, batch_size=64, shuffle=True)
    for _ in range(3):
        for batch in loader:
            loss = train.loss(model, batch)
            loss.backward()
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            train.update_companions(model, companions)
            losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
    frozen = train.make_dataset(folder / "data" / "frozen", False)
    batch = default_collate([frozen[place] for place in range(0, 1800, 9)])
    for scored in (model.eval(), companions["ema"].eval()):
        columns = train.score(scored, batch)
        assert {len(column) for column in columns.values()} == {200}
        assert columns["value"].mean() > 0.4


def test_rows_of_a_writer_or_speaker_are_held_out_together(folder: Path, train: ModuleType):
    data = train.make_dataset(folder / "data" / "2026-11-22", False)
    out = held_out_rows(data, share=0.1, seed=0, day="2026-11-22")
    held, trained = ({data[place]["cluster"] for place in np.flatnonzero(part)} for part in (out, ~out))
    assert held
    assert trained
    assert not held & trained
