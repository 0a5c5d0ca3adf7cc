"""A folder of checkpoints and its files: complete, dropped and damaged ones; plain data in JSON."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from mosaic.checkpoint.checkpointer import Checkpointer
from mosaic.checkpoint.folder import checkpoints_in, choose, damage_of
from mosaic.checkpoint.state import from_plain, to_plain
from mosaic.checkpoint.tensors import open_tensors
from mosaic.errors import InvalidCheckpointError, InvalidFileError


def write(folder: Path, step: int) -> Path:
    checkpointer = Checkpointer(torch.nn.Linear(3, 2))
    path = checkpointer.save(folder, step=step)
    checkpointer.finish_saving()
    return path


def test_a_file_that_was_cut_short_is_refused_wherever_it_ends(tmp_path: Path):
    whole = tmp_path / "whole"
    save_file({"a": torch.randn(3, 2), "b": torch.randn(5)}, whole)
    content = whole.read_bytes()
    for length in range(len(content)):
        (tmp_path / "cut").write_bytes(content[:length])
        with pytest.raises(InvalidFileError, match="cut short"):
            open_tensors(tmp_path / "cut")


def test_the_newest_is_the_one_that_was_saved_last_whatever_its_step(tmp_path: Path):
    for step in (10, 20, 5, 20):
        write(tmp_path, step)
    assert [(found.serial, found.step) for found in checkpoints_in(tmp_path)] == [(4, 20), (3, 5), (2, 20)]
    assert [found.serial for found in choose(tmp_path, None)] == [4, 3, 2]
    assert [found.serial for found in choose(tmp_path, 5)] == [3, 2]
    with pytest.raises(InvalidCheckpointError, match=r"no checkpoint of step=10 in .*; there are steps 20, 5, 20"):
        choose(tmp_path, 10)
    with pytest.raises(InvalidCheckpointError, match="no complete checkpoint"):
        choose(tmp_path / "nothing", None)


def test_any_byte_that_is_changed_or_missing_is_found(tmp_path: Path):
    whole = write(tmp_path, 1)
    assert damage_of(whole) == ()
    draw = random.Random(0)
    for file in sorted(whole.iterdir()):
        length = file.stat().st_size
        for place in {0, length - 2, *(draw.randrange(length - 1) for _ in range(6))}:  # JSON needs no last newline
            for cut in (False, True):
                copy = tmp_path / "copy"
                shutil.copytree(whole, copy)
                content = bytearray((copy / file.name).read_bytes())
                if cut:
                    del content[place:]
                else:
                    content[place] ^= 1 << draw.randrange(8)
                (copy / file.name).write_bytes(content)
                damage = damage_of(copy)
                assert damage, (file.name, place, cut)
                assert all(str(copy / file.name) in sentence for sentence in damage)
                shutil.rmtree(copy)
    (whole / "state.json").unlink()
    assert "state.json cannot be read: No such file" in damage_of(whole)[0]


KEYS = st.one_of(st.text(max_size=3), st.just("$"), st.integers(), st.tuples(st.integers(), st.text(max_size=2)))
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(KEYS, st.integers(), max_size=3).map(Counter),
    ),
    max_leaves=12,
)


def through_json(value: Any) -> Any:
    return from_plain(json.loads(json.dumps(to_plain(value, "it"))))


@settings(max_examples=60, deadline=None)
@given(VALUES)
def test_plain_data_is_equal_after_json(value: Any):
    assert repr(through_json(value)) == repr(value)  # equal, and of equal types


def test_small_tensors_and_odd_numbers_are_equal_after_json():
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        for shape in ((), (0,), (2, 3)):
            tensor = torch.randn(shape).to(dtype)
            found = through_json({"a": tensor})["a"]
            assert found.dtype == dtype
            assert torch.equal(found, tensor)
    assert math.isnan(through_json(float("nan")))
    assert through_json(float("-inf")) == -math.inf
    assert through_json(np.float64(0.1)) == 0.1


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"a": [1, object()]}, r"extra\['a'\]\[1\] is a builtins.object"),
        ({"a": np.zeros(2)}, r"extra\['a'\] is a numpy.ndarray"),
        ({"a": torch.zeros(2, device="meta")}, "without content"),
        ({frozenset([1]): 1}, "a key of extra is a builtins.frozenset"),
    ],
)
def test_what_no_checkpoint_holds_is_refused_by_name(value: Any, said: str):
    with pytest.raises(TypeError, match=said):
        to_plain(value, "extra")


def test_a_kind_of_value_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match=r"'os.system' is no kind of value"):
        from_plain({"$": "os.system", "items": ["true"]})
