"""The folder that ``init`` writes is complete and trains; nothing is overwritten."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import pytest

pytest.importorskip("sklearn", reason="needs the extra demo")

from mosaic.demo.days.digits import DayKind, write_day
from mosaic.demo.days.starter import write_starter
from mosaic.errors import MosaicError

DAY = date(2026, 11, 22)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("starter") / "robot"
    write_starter(folder, DAY)
    return folder


def test_what_is_there_is_not_overwritten_and_nothing_else_is_written(tmp_path: Path):
    (tmp_path / "train.py").write_text("mine")
    with pytest.raises(MosaicError, match=r"train\.py is there already"):
        write_starter(tmp_path, DAY)
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    assert (tmp_path / "train.py").read_text() == "mine"


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
