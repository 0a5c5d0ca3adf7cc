"""State that a module reads besides its arguments, on streams: as in the plain loop, ordered, or an error."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from engine_cases import SIDE_BY_SIDE, Glued, pair_batch, tower
from hidden_state_cases import (
    BETWEEN,
    CASES,
    COUNTED,
    EAGER,
    following,
    held_back,
    is_hooked,
    run_on_streams,
    shown,
    teacher,
    train,
)
from stream_cases import colocated
from torch import nn

from mosaic.errors import ModuleContractError

RUNS = [(case, True, False) for case in CASES] + [(case, False, True) for case in list(CASES)[::2]]


@pytest.mark.parametrize(("case", "in_sample", "graphs"), RUNS)
def test_what_is_done_around_a_call_is_seen_by_the_call(case: str, in_sample: bool, graphs: bool):
    run_on_streams(
        partial(shown, case, in_sample), train, graphs=graphs, captured=case not in EAGER, in_place=in_sample
    )


@pytest.mark.parametrize(("case", "graphs"), [(case, number % 2 == 1) for number, case in enumerate(BETWEEN)])
def test_what_is_done_between_the_model_s_calls_is_seen_and_ordered(case: str, graphs: bool):
    run_on_streams(*BETWEEN[case], graphs=graphs, captured=not held_back(case), hooked=is_hooked(case))


def buffer_written_after(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    left, right = self.left(x), self.right(y)
    if self.is_on:
        self.__dict__["centers"][0].mul_(0.5).add_(y.mean())
    return left * right


def with_centers() -> Glued:
    model = following(buffer_written_after)()
    model.__dict__["centers"] = [model.left.center]
    return model


def with_layers() -> Glued:
    def glue(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        left, right = self.left(x), self.right(y)
        if self.is_on:
            right = right + layers[0](y.repeat(1, 2))
        return left * right

    model = Glued(glue, tower(8, 16, nn.BatchNorm1d(16)))
    layers = [model.left[2]]
    return model


FOUND: dict[str, tuple[str, Callable[[], Glued]]] = {
    "a buffer is written after the call": ("left", with_centers),
    "a layer with statistics is called beside it": ("left", with_layers),
    **{
        f"weights are {update.__name__} {when} the call": ("right", partial(teacher, update, when))
        for update, when in zip(COUNTED, ("after", "between"), strict=True)
    },
}


@pytest.mark.parametrize(("case", "graphs"), [(case, "replaced between" in case) for case in FOUND])
def test_a_write_beside_a_lane_that_no_sample_showed_is_an_error_of_the_same_step(case: str, graphs: bool):
    name, make = FOUND[case]
    model = make()
    model.is_on = False
    with colocated(model, pair_batch(), SIDE_BY_SIDE, graphs=graphs) as (_, backend):
        for _ in range(2):
            model(*pair_batch()).square().mean().backward()
        backend.api.memory.noted = []  # a device would race on
        model.is_on = True
        with pytest.raises(ModuleContractError) as caught:
            model(*pair_batch())
        assert backend.api.memory.noted or (graphs and "replaced" in case)  # a capture keeps what was replaced
        assert re.match(
            rf"a parameter or buffer of {name!r} was written to while its lane had perhaps not finished with it "
            r"\(found at .*\.py:\d+ in (glue|buffer_written_after)\); write before .*exclude=",
            str(caught.value),
        )
        model.is_on, backend.api.memory.noted = False, None
        model(*pair_batch()).square().mean().backward()
