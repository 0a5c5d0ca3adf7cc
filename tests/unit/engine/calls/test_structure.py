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


def same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return first is second
    if dataclasses.is_dataclass(first):
        fields = dataclasses.fields(first)
        return type(first) is type(second) and all(
            same(getattr(first, field.name), getattr(second, field.name)) for field in fields
        )
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


@pytest.mark.parametrize("value", NESTED, ids=str)
def test_what_is_taken_apart_can_be_put_together(value: Any):
    leaves, spec = flatten(value)
    rebuilt = unflatten(leaves, spec)
    assert type(rebuilt) is type(value)
    assert same(value, rebuilt)


def test_keys_tell_shapes_types_and_values_apart():
    assert leaf_key(A) == leaf_key(torch.zeros(2))
    keys = [A, B, A.double(), torch.ones(2, requires_grad=True), 1, 1.0, True, "1", None, slice(1), slice(2)]
    assert len({leaf_key(leaf) for leaf in keys}) == len(keys)
