"""The set of spoken digit triples: what is held out stays unseen, and a bad cache is made again."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn", reason="needs the extra demo")
pytest.importorskip("espeakng_loader", reason="needs the extra demo")

from mosaic.demo import recordings, speech
from mosaic.demo.data import ALPHABET, NUM_TEST_VOICES, DigitTriples, batches, load, whole
from mosaic.errors import MosaicError

FILE = recordings._FILE


@pytest.fixture(scope="module", autouse=True)
def few_recordings() -> Iterator[None]:
    """Making the recordings takes a fraction of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recordings, "VOICES", recordings.VOICES[: NUM_TEST_VOICES + 2])
        patch.setattr(recordings, "WORDS_PER_MINUTE", (190,))
        yield


@pytest.fixture(scope="module")
def cache(few_recordings: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "made" / "on" / "the" / "way"
    load(folder)
    return folder


@pytest.fixture(scope="module")
def triples(cache: Path) -> DigitTriples:
    return load(cache)


@pytest.fixture
def copied_cache(cache: Path, tmp_path: Path) -> Path:
    (tmp_path / FILE).write_bytes((cache / FILE).read_bytes())
    return tmp_path


def digits_of(caption: torch.Tensor) -> list[int]:
    letters = "".join(ALPHABET[token - 1] for token in caption.tolist() if token)
    return [recordings.WORDS.index(word) for word in letters.replace(",", "").split() if word in recordings.WORDS]


def test_a_batch_never_has_equal_strings(triples: DigitTriples) -> None:
    for batch in batches(triples.train, 96, 0, 30):
        strings = {tuple(digits_of(caption)) for caption in batch["text"]}
        assert len(strings) == 96
        assert {len(string) for string in strings} == {3}


def test_test_strings_voices_and_scans_are_unseen(triples: DigitTriples) -> None:
    train, test = triples.train, triples.test
    assert {tuple(row) for row in train.strings.tolist()}.isdisjoint(tuple(row) for row in test.strings.tolist())
    assert set(train.voices).isdisjoint(test.voices)
    assert set(train.scan_ids.tolist()).isdisjoint(test.scan_ids.tolist())
    assert (len(train.strings), len(test.strings)) == (800, 200)


def test_image_speech_and_caption_show_the_same_digits(triples: DigitTriples) -> None:
    """Each row is put together again from its own digits."""
    split = triples.test
    frames = split.speech_frames.flatten(0, 1)
    clips = split.speech.flatten(0, 1)
    batch = whole(split)
    for row in range(0, 200, 20):
        digits = split.strings[row].tolist()
        assert digits_of(batch["text"][row]) == digits
        for place, digit in enumerate(digits):
            scan = batch["image"][row, 0, :, 8 * place : 8 * place + 8]
            begin, end = split.scan_starts[digit : digit + 2].tolist()
            assert (split.scans[begin:end] == scan).all(dim=(1, 2)).any()
        spoken = [
            torch.cat([clip[digit, : count[digit]] for digit in digits])
            for clip, count in zip(clips, frames, strict=True)
        ]
        audio = batch["audio"][row].T
        assert any(torch.equal(audio[: len(words)], words) for words in spoken)


def test_the_split_depends_on_the_seed_and_the_file_does_not(cache: Path) -> None:
    before = (cache / FILE).stat().st_mtime_ns
    assert not torch.equal(load(cache, seed=1).test.strings, load(cache, seed=2).test.strings)
    assert (cache / FILE).stat().st_mtime_ns == before


def test_a_damaged_file_is_made_again_with_a_message(copied_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = copied_cache / FILE
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        recordings.load_recordings(copied_cache)
    assert "making it again" in caplog.text
    caplog.clear()
    assert recordings.load_recordings(copied_cache).scans.shape == (1797, 8, 8)
    assert not caplog.records


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(MosaicError, match="cannot write"):
        recordings.load_recordings(tmp_path / "file" / "cache")


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    with pytest.raises(MosaicError, match=r"pip install 'mosaic-colocate\[demo\]'"):
        load(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_batch_without_enough_strings_and_an_unknown_voice_or_speed_are_refused(triples: DigitTriples) -> None:
    with pytest.raises(ValueError, match="use 1 to 800"):
        batches(triples.train, 801, 0, 1)
    with speech.Synthesiser() as synthesiser:
        with pytest.raises(ValueError, match="'xx-none'"):
            synthesiser.speak("one", voice="xx-none", words_per_minute=180)
        with pytest.raises(ValueError, match="use 80 to 450"):
            synthesiser.speak("one", voice="en-us", words_per_minute=20)
