"""Checkpoints of all that a daily run keeps, and their loading into a model that has changed since."""

from __future__ import annotations

import copy
import errno
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from mosaic.checkpoint.checkpointer import Checkpointer
from mosaic.checkpoint.folder import check_room, checkpoints_in
from mosaic.checkpoint.state import SavedState
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
    assert not any((found.new, found.gone, found.changed, found.notes))
    assert second.train(4) == losses
    assert_equal(first.state(), second.state())
    assert first.scaler.state_dict() == second.scaler.state_dict()
    assert [each.state_dict() for each in first.schedulers] == [each.state_dict() for each in second.schedulers]
    found.restore_random(second.generators)
    drawn = torch.rand(3, generator=second.generators["rows"])
    found.restore_random(second.generators)
    assert torch.equal(torch.rand(3, generator=second.generators["rows"]), drawn)


def test_a_changed_model_loads_the_tensors_and_optimizers_that_fit_and_notes_the_others(tmp_path: Path):
    first = Loop("image", "text")
    first.train(3)
    first.save(tmp_path, 3)
    second = Loop("image", "text", "motion", seed=7)
    fresh = copy.deepcopy(second.model.branches["motion"])
    with pytest.raises(InvalidCheckpointError, match=r"motion.bias is only in the model.*or load with partial=True"):
        second.kept.load(tmp_path, **second.belongings)
    with pytest.raises(ValueError, match=r"leave scheduler= and scaler= out"):
        second.kept.load(tmp_path, **second.belongings, partial=True)
    objects = {name: second.belongings[name] for name in ("optimizer", "companions", "generators")}
    loaded = second.kept.load(tmp_path, **objects, partial=True)
    assert loaded.new == ("branches.motion.bias", "branches.motion.weight")
    assert (loaded.gone, loaded.changed) == ((), {})
    assert any("optimizer body: as it was; the optimizer that was saved did not have" in n for n in loaded.notes)
    for name, tensor in first.state().items():
        assert torch.equal(second.state()[name], tensor), name
    assert torch.equal(second.model.branches["motion"].weight, fresh.weight)
    assert not second.optimizers["body"].state
    momenta = [list(loop.optimizers["head"].state.values()) for loop in (first, second)]
    assert momenta[0]
    for saved, own in zip(*momenta, strict=True):
        assert all(torch.equal(own[key], value) for key, value in saved.items())
    narrow = Loop("image", "text", width=9)
    optimizer = torch.optim.AdamW([p for n, p in narrow.model.named_parameters() if not n.startswith("head")])
    loaded = narrow.kept.load(tmp_path, optimizer={"body": optimizer}, partial=True)
    assert loaded.changed["head.weight"] == ("F32 [3, 6]", "F32 [3, 9]")
    assert torch.equal(narrow.model.head.bias, first.model.head.bias)
    assert not optimizer.state


def test_a_new_day_takes_weights_and_moments_and_keeps_its_own_rates_and_random_numbers(tmp_path: Path):
    first = Loop("image", "text")
    first.train(9)
    first.save(tmp_path, 9)
    second = Loop("image", "text", seed=5)
    drawn = torch.get_rng_state()
    found = second.kept.load(
        tmp_path, optimizer=second.optimizers, companions={"ema": second.average}, generators={}, new_run=True
    )
    assert torch.equal(torch.get_rng_state(), drawn)
    found.restore_random(second.generators)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert_equal(first.state(), second.state())
    assert second.optimizers["body"].param_groups[0]["lr"] == 0.05
    for label in first.optimizers:
        states = [list(loop.optimizers[label].state.values()) for loop in (first, second)]
        for ours, theirs in zip(*states, strict=True):
            assert all(torch.equal(value, theirs[key]) for key, value in ours.items())
    other = Loop("motion")
    with pytest.raises(InvalidCheckpointError, match="motion"):
        other.kept.load(tmp_path, optimizer=other.optimizers, new_run=True)


def test_a_full_disk_is_an_error_of_its_own_after_which_old_checkpoints_can_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    loop = Loop("image")
    for step in (1, 2, 3):
        newest = loop.save(tmp_path, step)
    (newest / "state.json").write_text("{}")
    flush, full = os.fsync, True

    def fsync(handle: int) -> None:
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    loop.kept.save(tmp_path, step=4, **loop.belongings)
    with pytest.raises(NoRoomError, match=r"step-4 could not be saved: .*No space left on device"):
        loop.kept.save(tmp_path, step=5, **loop.belongings)
    with pytest.raises(NoRoomError, match=r"cannot write .*all.safetensors: No space left on device"):
        loop.kept.export(tmp_path / "all.safetensors")
    assert [found.step for found in checkpoints_in(tmp_path)] == [3, 2, 1]
    full = False
    assert loop.kept.make_room(tmp_path) == (3, 1)  # the newest was damaged
    assert [path.name for path in tmp_path.iterdir()] == ["00000002-step-2"]
    loop.save(tmp_path, 5)
    assert [found.step for found in checkpoints_in(tmp_path)] == [5, 2]


def test_room_for_a_checkpoint_is_known_before_the_first_step(tmp_path: Path):
    model = nn.Sequential(nn.Linear(300, 400), nn.Linear(400, 200, bias=False))
    model[1].weight.requires_grad_(False)
    average = AveragedModel(model)
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.ndim == 2], amsgrad=True)
    state = SavedState(model, optimizer, companions={"ema": average})
    before = state.room_needed()
    model(torch.randn(2, 300)).square().mean().backward()
    optimizer.step()
    assert before >= state.room_needed()
    kept = Checkpointer(model)
    path = kept.save(tmp_path, step=1, optimizer=optimizer, companions={"ema": average})
    kept.finish_saving()
    taken = sum(file.stat().st_size for file in path.iterdir())
    assert taken <= before
    assert before < 1.3 * taken


def test_a_run_without_room_is_told_what_is_free_and_what_is_needed(tmp_path: Path):
    free = shutil.disk_usage(tmp_path).free
    folder = tmp_path / "not" / "there"
    check_room(folder, checkpoint_bytes=1 << 20, count=5, more_bytes=1 << 20)
    with pytest.raises(NoRoomError, match=r"has .* GiB free and .* GiB are needed: 2 checkpoints of .*; free .*"):
        check_room(folder, checkpoint_bytes=free, count=2)
    Loop("image").save(tmp_path, 1)
    check_room(tmp_path, checkpoint_bytes=free - (1 << 30), count=2)  # one of them is there
    with pytest.raises(NoRoomError, match="2 checkpoints"):
        check_room(tmp_path, checkpoint_bytes=free - (1 << 30), count=3)
