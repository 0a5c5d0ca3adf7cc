"""Checkpoints of all that a daily run keeps, and their loading into a model that has changed since."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from mosaic.checkpoint import tensors
from mosaic.checkpoint.checkpointer import Checkpointer
from mosaic.checkpoint.folder import checkpoints_in
from mosaic.errors import InvalidCheckpointError, NoRoomError


class Tower(nn.Module):
    """A model of named branches with a head over all of them."""

    def __init__(self, *branches: str, width: int = 6) -> None:
        super().__init__()
        self.branches = nn.ModuleDict({name: nn.Linear(5, width) for name in branches})
        self.drop = nn.Dropout(0.2)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.drop(sum(branch(rows) for branch in self.branches.values()))))


class Loop:
    """A loop with all that it may keep: two optimizers and schedulers, a scaler, an average, generators of its own."""

    def __init__(self, *branches: str, seed: int = 0, width: int = 6) -> None:
        torch.manual_seed(seed)
        self.model = Tower(*branches, width=width)
        self.kept = Checkpointer(self.model)
        body = [parameter for name, parameter in self.model.named_parameters() if not name.startswith("head")]
        self.optimizers = {
            "body": torch.optim.AdamW(body, lr=0.05),
            "head": torch.optim.SGD(self.model.head.parameters(), lr=0.1, momentum=0.9),
        }
        self.schedulers = [
            torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizers["body"], 20),
            torch.optim.lr_scheduler.LambdaLR(self.optimizers["head"], lambda step: 1 / (1 + step)),
        ]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        self.generators = {
            "rows": torch.Generator().manual_seed(seed),
            "noise": torch.Generator().manual_seed(seed + 1),
        }

    @property
    def belongings(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizers,
            "scheduler": self.schedulers,
            "scaler": self.scaler,
            "companions": {"ema": self.average},
            "generators": self.generators,
        }

    def train(self, num_steps: int) -> list[float]:
        losses = []
        for _ in range(num_steps):
            rows = torch.randn(8, 5, generator=self.generators["rows"]) + float(np.random.standard_normal())
            rows += 0.1 * torch.randn(8, 5, generator=self.generators["noise"])
            loss = self.model(rows).square().mean()
            self.scaler.scale(loss).backward()
            for optimizer in self.optimizers.values():
                self.scaler.step(optimizer)
                optimizer.zero_grad()
            self.scaler.update()
            for scheduler in self.schedulers:
                scheduler.step()
            self.average.update_parameters(self.model)
            losses.append(loss.item())
        return losses

    def save(self, folder: Path, step: int, **more: Any) -> Path:
        path = self.kept.save(folder, step=step, **self.belongings, **more)
        self.kept.finish_saving()
        return path

    def state(self) -> dict[str, torch.Tensor]:
        return {**self.model.state_dict(), **{f"ema/{name}": t for name, t in self.average.state_dict().items()}}


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


def test_all_that_a_loop_keeps_goes_on_bit_for_bit(tmp_path: Path):
    first = Loop("image", "text")
    first.train(3)
    first.save(tmp_path, 3, extra={"consumed": 24})
    losses = first.train(4)
    second = Loop("image", "text", seed=7)
    second.train(1)
    found = second.kept.load(tmp_path, **second.belongings)
    assert (found.step, found.extra) == (3, {"consumed": 24})
    assert second.train(4) == losses
    assert_equal(first.state(), second.state())
    assert first.scaler.state_dict() == second.scaler.state_dict()
    assert [each.state_dict() for each in first.schedulers] == [each.state_dict() for each in second.schedulers]


def test_a_changed_model_is_refused_with_the_differing_names_and_loads_exported_weights(tmp_path: Path):
    first = Loop("image", "text")
    first.train(3)
    first.save(tmp_path / "run", 3)
    first.kept.export(tmp_path / "weights.safetensors")
    second = Loop("image", "text", "motion", seed=7)
    before = copy.deepcopy(second.state())
    with pytest.raises(InvalidCheckpointError, match=r"motion.bias is only in the model.*or load its exported weights"):
        second.kept.load(tmp_path / "run", **second.belongings)
    assert_equal(second.state(), before)
    loaded = second.kept.load_weights(tmp_path / "weights.safetensors", partial=True)
    assert loaded.new == ("branches.motion.bias", "branches.motion.weight")
    assert (loaded.gone, loaded.changed) == ((), {})
    for name, tensor in first.model.state_dict().items():
        assert torch.equal(second.state()[name], tensor), name
    assert torch.equal(second.model.branches["motion"].weight, before["branches.motion.weight"])
    narrow = Loop("image", "text", width=9)
    loaded = narrow.kept.load_weights(tmp_path / "weights.safetensors", partial=True)
    assert loaded.changed["head.weight"] == ("[3, 6]", "[3, 9]")
    assert torch.equal(narrow.model.head.bias, first.model.head.bias)


def test_a_new_day_takes_weights_and_moments_and_keeps_its_own_rates_and_random_numbers(tmp_path: Path):
    first = Loop("image", "text")
    first.train(9)
    first.save(tmp_path, 9)
    second = Loop("image", "text", seed=5)
    drawn = torch.get_rng_state()
    second.kept.load(tmp_path, optimizer=second.optimizers, companions={"ema": second.average}, new_run=True)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert_equal(first.state(), second.state())
    assert second.optimizers["body"].param_groups[0]["lr"] == 0.05
    for label in first.optimizers:
        states = [list(loop.optimizers[label].state.values()) for loop in (first, second)]
        for ours, theirs in zip(*states, strict=True):
            assert all(torch.equal(value, theirs[key]) for key, value in ours.items())


def test_a_full_disk_is_an_error_of_its_own_and_earlier_checkpoints_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    loop = Loop("image")
    loop.save(tmp_path, 1)
    really, full = tensors.save_file, True

    def save_file(*arguments: Any, **more: Any) -> None:
        if full:
            raise SafetensorError("I/O error: Os { code: 28, kind: StorageFull }")
        really(*arguments, **more)

    monkeypatch.setattr(tensors, "save_file", save_file)
    loop.kept.save(tmp_path, step=4, **loop.belongings)
    with pytest.raises(NoRoomError, match=r"step-4 could not be saved: .*No space left on device"):
        loop.kept.save(tmp_path, step=5, **loop.belongings)
    with pytest.raises(NoRoomError, match=r"all.safetensors.* could not be saved: .*No space left on device"):
        loop.kept.export(tmp_path / "all.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["00000001-step-1"]
    full = False
    loop.save(tmp_path, 5)
    assert [found.step for found in checkpoints_in(tmp_path)] == [5, 1]
