"""Checkpoints of several ranks: saved under one plan, loaded under another, and equal bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.cases import run_ranks
from ranks.programs.parameters.checkpoints import SEEDS, going_on, saving
from safetensors.torch import load_file

from mosaic.checkpoint.folder import checkpoints_in, damage_of


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """All that a checkpoint holds, but states of random generators; each is in one file."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors = load_file(file)
        assert not found.keys() & tensors.keys()
        found.update(tensors)
    return {name: tensor for name, tensor in found.items() if not name.startswith("random.")}


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype
        assert torch.equal(tensor, right[name]), name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints of four ranks and of one, under random plans."""
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(
        "ranks.programs.parameters.checkpoints:saving",
        4,
        tmp_path_factory.mktemp("ranks"),
        arguments=[str(folder / "four")],
        timeout=200,
    )
    saving(0, 1, str(folder / "one"))
    return folder


@pytest.fixture(scope="module")
def on_two(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The answers of two ranks that load checkpoints of others and their own."""
    return run_ranks(
        "ranks.programs.parameters.checkpoints:on_two_ranks",
        2,
        tmp_path_factory.mktemp("two"),
        arguments=[str(folder)],
        timeout=200,
    )


def test_what_was_saved_is_the_same_after_others_loaded_it_under_other_plans(folder: Path, on_two: list[Any]):
    assert all(went_on for went_on, _, _ in on_two)
    for source, sizes in (("four", (1, 2)), ("one", (1, 2))):
        going_on(0, 1, str(folder), source)
        for seed in SEEDS:
            first = checkpoints_in(folder / source / f"run{seed}")[-1]
            for size in sizes:
                (again,) = checkpoints_in(folder / source / f"again{seed}on{size}")
                assert damage_of(again.path) == ()
                assert_equal(tensors_of(first.path), tensors_of(again.path))
                states = [json.loads((each.path / "state.json").read_text()) for each in (first, again)]
                assert states[0]["optimizer"]["states"] == states[1]["optimizer"]["states"]
                assert states[0]["optimizer"]["settings"] == states[1]["optimizer"]["settings"]
                assert states[0]["scheduler"] == states[1]["scheduler"]


def test_training_goes_on_under_another_plan_and_other_ranks_as_it_would_have(folder: Path, on_two: list[Any]):
    for source in ("four", "one"):
        for seed in SEEDS:
            start = load_file(folder / source / f"start{seed}.safetensors")
            end = load_file(folder / source / f"end{seed}.safetensors")
            assert any((end[name] - tensor).abs().max() > 5e-3 for name, tensor in start.items())
            found = load_file(folder / source / f"end{seed}on2.safetensors")
            for name, tensor in end.items():
                assert torch.allclose(found[name], tensor, rtol=1e-5, atol=1e-6), (source, seed, name)


def test_a_run_that_was_resumed_is_the_one_that_was_not_ended(on_two: list[Any]):
    assert [equal for _, equal, _ in on_two] == [True, True]


def test_what_ranks_cannot_save_or_load_is_said_on_all_of_them(on_two: list[Any]):
    for _, _, said in on_two:
        different_steps, damaged, full = said
        assert "different steps (rank 0: 1; rank 1: 2)" in different_steps
        assert damaged.startswith("InvalidCheckpointError")
        assert "was changed: its SHA-256" in damaged
        assert "step=1, or with fall_back=True" in damaged
        assert full.startswith("NoRoomError")
        assert "step-5 could not be saved: OSError: [Errno 27] File too large (rank 1)" in full
