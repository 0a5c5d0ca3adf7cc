"""The data of both demos: held-out material stays unseen, all modalities of a row agree, seeds give the same bytes."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn", reason="needs the extra demo")

from mosaic.demo.data import ALPHABET, WORDS, DigitTriples, batches, load, whole
from mosaic.demo.days.digits import DayKind, write_day, write_starter
from mosaic.errors import MosaicError

DAY = date(2026, 11, 22)


@pytest.fixture(scope="module")
def triples() -> DigitTriples:
    return load()


def digits_of(caption: torch.Tensor) -> list[int]:
    letters = "".join(ALPHABET[token - 1] for token in caption.tolist() if token)
    return [WORDS.index(word) for word in letters.replace(",", "").split() if word in WORDS]


def test_a_batch_never_has_equal_strings(triples: DigitTriples) -> None:
    for batch in batches(triples.train, 96, 0, 30):
        assert len({tuple(digits_of(caption)) for caption in batch["text"]}) == 96
    with pytest.raises(ValueError, match="use 1 to 800"):
        batches(triples.train, 801, 0, 1)


def test_test_strings_voices_and_scans_are_unseen(triples: DigitTriples) -> None:
    train, test = triples.train, triples.test
    assert {tuple(row) for row in train.strings}.isdisjoint(tuple(row) for row in test.strings)
    assert (len(train.strings), len(test.strings)) == (800, 200)
    assert not np.array_equal(load(seed=1).test.strings, test.strings)
    for own, other in ((train.scans[0], test.scans[0]), ([x[0] for x in train.speech], [x[0] for x in test.speech])):
        assert {array.tobytes() for array in own}.isdisjoint(array.tobytes() for array in other)


def test_image_speech_and_caption_show_the_same_digits(triples: DigitTriples) -> None:
    """Each row is put together again from its own digits."""
    split = triples.test
    batch = whole(split)
    for row in range(0, 200, 20):
        digits = split.strings[row]
        assert digits_of(batch["text"][row]) == digits.tolist()
        for place, digit in enumerate(digits):
            scan = batch["image"][row, 0, :, 8 * place : 8 * place + 8].numpy()
            assert (split.scans[digit] == scan).all(axis=(1, 2)).any()
        spoken = [np.concatenate([voice[digit] for digit in digits]) for voice in split.speech]
        audio = batch["audio"][row].T.numpy()
        assert any(np.array_equal(audio[: len(words)], words) for words in spoken)


def test_a_new_folder_overwrites_nothing_and_its_frozen_set_shares_no_voice_and_no_scans_with_its_day(tmp_path: Path):
    write_starter(tmp_path / "robot", DAY)
    clusters = {}
    for name in ("frozen", DAY.isoformat()):
        rows = (tmp_path / "robot" / "data" / name / "index.jsonl").read_text().splitlines()
        clusters[name] = {json.loads(row)["cluster"] for row in rows}
        assert min(sum(kind in each for each in clusters[name]) for kind in ("writer", "voice")) >= 20
    assert clusters["frozen"].isdisjoint(clusters[DAY.isoformat()])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.py").write_text("mine")
    with pytest.raises(MosaicError, match=r"train\.py is there already"):
        write_starter(tmp_path / "mine", DAY)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["train.py"]


def test_the_same_seed_makes_the_same_bytes(tmp_path: Path):
    for name in ("once", "again"):
        write_day(tmp_path / name, DayKind(num_rows=30, mix={"image+audio": 0.5, "imu": 0.5}), seed=3)
    for file in ("rows.safetensors", "index.jsonl"):
        assert (tmp_path / "once" / file).read_bytes() == (tmp_path / "again" / file).read_bytes()
