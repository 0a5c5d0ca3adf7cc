"""Values other than large tensors survive JSON as they were; others are refused by name."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mosaic.checkpoint.state import from_plain, to_plain

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


def types_of(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value), [types_of(item) for item in value]
    if isinstance(value, dict):
        return type(value), [(types_of(key), types_of(item)) for key, item in value.items()]
    return type(value)


@settings(max_examples=60, deadline=None)
@given(VALUES)
def test_plain_data_is_equal_after_json(value: Any):
    found = through_json(value)
    assert found == value
    assert types_of(found) == types_of(value)


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
        ({"a": torch.zeros(1 << 19)}, "2097152 bytes"),
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
    with pytest.raises(ValueError, match="'kept' is no kind of value"):
        from_plain({"$": "kept", "key": "a"})
