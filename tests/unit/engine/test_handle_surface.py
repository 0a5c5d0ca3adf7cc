"""The names of handles, and options that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import mosaic
from mosaic.errors import InvalidFileError
from mosaic.ranks import RankHandle, colocate_ranks

HANDLE = {
    *("plan", "describe", "metrics", "timeline", "disabled", "remove", "save", "load", "export"),
    *("graph", "active", "is_trying", "profile", "replan", "clear_timeline", "finish_saving", "load_weights"),
    *("digest", "num_learned"),
}
ON_RANKS = {"full_state_dict", "clip_grad_norm_", "write_trace"}


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_the_public_names_of_handles_are_frozen():
    assert public(mosaic.Handle) == HANDLE
    assert public(RankHandle) == HANDLE | ON_RANKS


@pytest.mark.parametrize("option", [{"ranks": mosaic.RankSettings()}, {"method": "data-parallel"}])
def test_options_of_several_ranks_are_refused_on_one(option: dict[str, Any]):
    with pytest.raises(ValueError, match="is for several ranks, and this process is the only one"):
        mosaic.colocate(nn.Linear(2, 2), torch.ones(2, 2), options=mosaic.Options(**option))


def test_graphs_are_refused_on_several_ranks():
    with pytest.raises(ValueError, match="cuda_graphs=True: calls on several ranks"):
        colocate_ranks(nn.Linear(2, 2), torch.ones(2, 2), options=mosaic.Options(cuda_graphs=True))


@pytest.mark.parametrize(
    ("wrong", "error", "sentence"),
    [
        ({"cuda_graphs": "always"}, ValueError, "cuda_graphs='always'; use True, False or 'auto'"),
        ({"sm_target": "on"}, ValueError, "sm_target='on'; use True, False or 'auto'"),
        ({"method": "best"}, ValueError, "unknown method 'best'; choose one of: auto"),
        ({"trial": 3}, TypeError, 'trial=3; use a TrialSettings, "auto" or None'),
        ({"profile": 5}, TypeError, "profile=5 is a int; pass a mosaic.Profile or its file's path"),
        ({"profile": "nowhere.json"}, InvalidFileError, "cannot read nowhere.json: No such file"),
        ({"cache": 3}, TypeError, "cache=3; use a folder"),
        ({"ranks": 2}, TypeError, "ranks=2; use a RankSettings or None"),
        ({"progress": "bar"}, TypeError, "progress='bar' is not callable"),
    ],
)
def test_options_refuse_a_wrong_value_when_they_are_made(wrong: dict[str, Any], error: type[Exception], sentence: str):
    with pytest.raises(error, match=sentence):
        mosaic.Options(**wrong)


def test_options_are_an_object_of_their_own():
    with pytest.raises(TypeError, match="is a dict; pass mosaic"):
        mosaic.colocate(nn.Linear(2, 2), torch.ones(2, 2), options={"method": "auto"})  # type: ignore[arg-type]


@pytest.mark.parametrize("begin", [mosaic.colocate, mosaic.pipeline])
def test_what_is_no_model_is_refused(begin: Any):
    with pytest.raises(TypeError, match=r"None .*pass an nn\.Module"):
        begin(None, torch.ones(2, 2), backend="host")
