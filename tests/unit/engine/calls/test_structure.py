"""Taking arguments and results apart."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch

from mosaic.engine.calls.structure import flatten, leaf_key, unflatten


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    extra: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    inner: Output
    name: str = "x"


class Named(NamedTuple):
    first: torch.Tensor
    second: int


A, B = torch.ones(2), torch.zeros(3)
NESTED = [
    A,
    (A, B),
    [A, {"x": B, "y": [A, None, 3]}],
    {"z": (), "a": []},
    Output(A, [B, 2]),
    Frozen(Output(A, {"k": B})),
    [Output(A), Output(B, Output(A))],
    Named(A, 3),
    collections.OrderedDict(b=A, a=B),
    None,
    "text",
]


@pytest.mark.parametrize("value", NESTED, ids=str)
def test_what_is_taken_apart_can_be_put_together(value: Any):
    leaves, spec = flatten(value)
    rebuilt = unflatten(leaves, spec)
    assert type(rebuilt) is type(value)
    assert repr(rebuilt) == repr(value)  # the types, the order and the numbers
    assert all(leaf is own for leaf, own in zip(flatten(rebuilt)[0], leaves, strict=True))


def test_keys_tell_shapes_types_and_values_apart():
    assert leaf_key(A) == leaf_key(torch.zeros(2))
    keys = [A, B, A.double(), torch.ones(2, requires_grad=True), 1, 1.0, True, "1", None, slice(1), slice(2)]
    assert len({leaf_key(leaf) for leaf in keys}) == len(keys)
