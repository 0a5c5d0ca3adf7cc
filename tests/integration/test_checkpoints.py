"""Checkpoints on one rank: written beside training, whole or not there, refused where they do not fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import nn

from mosaic.checkpoint import checkpointer
from mosaic.checkpoint.checkpointer import Checkpointer
from mosaic.checkpoint.folder import checkpoints_in
from mosaic.cli.main import run as mosaic
from mosaic.errors import InvalidCheckpointError, InvalidFileError, MosaicError, UnsupportedModelError


class Tied(nn.Module):
    """Two names for one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 40)
        self.body = nn.Linear(40, 40)
        self.head = nn.Linear(40, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(ids)))


def saved(model: nn.Module, folder: Path, step: int = 1, **more: Any) -> Path:
    saver = Checkpointer(model)
    path = saver.save(folder, step=step, **more)
    saver.finish_saving()
    return path


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        ids = torch.randint(0, 50, (6,), generator=torch.Generator().manual_seed(step))

        def closure(ids: torch.Tensor = ids) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(ids).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def test_a_process_killed_at_any_instant_leaves_a_checkpoint_from_which_the_next_one_goes_on(tmp_path: Path):
    script = Path(__file__).parents[1] / "cases" / "retraining" / "checkpoint_kills.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(found) >= 15
    assert found == sorted(found, key=lambda each: each[0])  # once the new one is there, it stays
    assert {(2, 2), (3, 3), (3, 2)} <= set(found)  # before the rename; behind it; an old one is dropped


def test_training_goes_on_while_a_checkpoint_is_written_and_is_not_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    trained(model, optimizer, range(2))
    may_write, really = threading.Event(), checkpointer.write_tensors

    def waiting(*args: Any) -> Any:
        assert may_write.wait(60)
        return really(*args)

    monkeypatch.setattr(checkpointer, "write_tensors", waiting)
    saver = Checkpointer(model)
    saver.save(tmp_path, step=2, optimizer=optimizer)
    then = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trained(model, optimizer, range(2, 4))
    assert checkpoints_in(tmp_path) == ()
    may_write.set()
    saver.finish_saving()
    other = Tied()
    Checkpointer(other).load(tmp_path)
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, then[name])
        assert not torch.equal(tensor, model.state_dict()[name])


def test_training_by_closures_from_a_checkpoint_is_training_that_did_not_end(tmp_path: Path):
    model = Tied()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=2)
    trained(model, optimizer, range(3))
    saved(model, tmp_path, 3, optimizer=optimizer)
    trained(model, optimizer, range(3, 6))
    other = Tied()
    again = torch.optim.LBFGS(other.parameters(), lr=0.01, max_iter=2)
    assert Checkpointer(other).load(tmp_path, optimizer=again).step == 3
    trained(other, again, range(3, 6))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_weights_go_to_a_plain_file_and_come_from_one_or_several(tmp_path: Path):
    model = Tied()
    Checkpointer(model).export(tmp_path / "all.safetensors")
    plain = Tied()
    plain.load_state_dict(load_file(tmp_path / "all.safetensors"))
    save_model(model, str(tmp_path / "one_name.safetensors"))  # which drops one of two tied names
    parts = tmp_path / "parts"
    parts.mkdir()
    save_file({"body.weight": model.body.weight, "body.bias": model.body.bias.bfloat16()}, parts / "a.safetensors")
    save_file({"head.weight": model.head.weight}, parts / "b.safetensors")
    index = {
        "weight_map": {"body.weight": "a.safetensors", "body.bias": "a.safetensors", "head.weight": "b.safetensors"}
    }
    for with_index in (False, True):
        if with_index:
            (parts / "model.safetensors.index.json").write_text(json.dumps(index))
            save_file({"odd": torch.zeros(1)}, parts / "of_no_index.safetensors")
        for path in (tmp_path / "all.safetensors", tmp_path / "one_name.safetensors", parts):
            other = Tied()
            Checkpointer(other).load_weights(path)
            assert torch.equal(other.embed.weight, model.embed.weight)
            assert torch.equal(other.body.weight, model.body.weight)
            expected = model.body.bias.bfloat16().float() if path == parts else model.body.bias
            assert torch.equal(other.body.bias, expected)


def test_an_export_replaces_no_device_and_no_link_and_a_damaged_index_is_named(tmp_path: Path):
    pipe, link, target = tmp_path / "pipe", tmp_path / "link", tmp_path / "weights.safetensors"
    os.mkfifo(pipe)
    link.symlink_to(target)
    with pytest.raises(MosaicError, match="pipe: it is not a regular file"):
        Checkpointer(Tied()).export(pipe)
    Checkpointer(Tied()).export(link)
    assert pipe.is_fifo()
    assert link.is_symlink()
    for text in ("{}", "[1", '{"weight_map": 3}'):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(InvalidFileError, match="is not an index of weights"):
            Checkpointer(Tied()).load_weights(tmp_path)


def test_weights_of_another_model_are_refused_and_nothing_is_changed(tmp_path: Path):
    save_file({"body.weight": torch.zeros(3), "body.bias": torch.zeros(40), "odd": torch.zeros(1)}, tmp_path / "w")
    model = Tied()
    with pytest.raises(InvalidCheckpointError, match="is of another model") as raised:
        Checkpointer(model).load_weights(tmp_path / "w")
    for said in ("odd is only in the file", "embed.weight is only in the model", "body.weight is [3] in the file"):
        assert said in str(raised.value)
    assert model.body.bias.any()
    with pytest.raises(InvalidFileError, match="cannot read"):
        Checkpointer(model).load_weights(tmp_path / "nothing")
    with pytest.raises(InvalidCheckpointError, match=r"no \.safetensors file"):
        Checkpointer(model).load_weights(tmp_path)


def test_an_optimizer_that_does_not_fit_is_refused(tmp_path: Path):
    model = Tied()
    groups = [{"params": [model.embed.weight]}, {"params": list(model.body.parameters())}]
    saved(model, tmp_path, optimizer=torch.optim.AdamW(groups))

    def refused(optimizer: torch.optim.Optimizer, said: str) -> None:
        with pytest.raises(InvalidCheckpointError, match=said):
            Checkpointer(model).load(tmp_path, optimizer=optimizer)

    refused(torch.optim.SGD(groups, lr=0.1), "has the state of AdamW and the optimizer is SGD")
    refused(torch.optim.AdamW([model.embed.weight]), "differ in body.weight, body.bias: make the same groups")
    refused(torch.optim.AdamW(model.parameters()), "differ in body.weight, body.bias: make")
    saved(model, tmp_path, optimizer=torch.optim.AdamW([model.embed.weight]))
    refused(torch.optim.AdamW(groups), "of which there are 1; they differ in body.weight, body.bias")
    saved(model, tmp_path)
    refused(torch.optim.AdamW(groups), "was saved with optimizer= of none, not a single one")
    with pytest.raises(ValueError, match=r"shape \(7,\)\) is not the model's"):
        saved(model, tmp_path, optimizer=torch.optim.AdamW([nn.Parameter(torch.zeros(7))]))


def test_what_cannot_be_saved_is_refused_by_name(tmp_path: Path):
    model = Tied()
    for more, said in (({"step": -1}, "step=-1 is not a count"), ({"keep": 0}, "keep=0 would leave no checkpoint")):
        with pytest.raises(ValueError, match=said):
            saved(model, tmp_path, **more)
    with pytest.raises(TypeError, match=r"extra\['odd'\] is a builtins.set"):
        saved(model, tmp_path, extra={"odd": set()})
    with pytest.raises(TypeError, match="optimizer= has a int, without a state_dict"):
        saved(model, tmp_path, optimizer=3)

    class Odd(nn.Linear):
        def get_extra_state(self) -> str:
            return "more"

    with pytest.raises(UnsupportedModelError, match="'_extra_state', a str that is neither a parameter nor a buffer"):
        saved(Odd(2, 2), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_command_lists_verifies_and_exports(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = Tied()
    run = str(tmp_path / "run")
    assert mosaic(["checkpoints", run]) == 1
    assert "there is no complete checkpoint in" in " ".join(capsys.readouterr().err.split())
    saved(model, tmp_path / "run", 1)
    trained(model, torch.optim.SGD(model.parameters(), lr=1.0), range(2))
    newest = saved(model, tmp_path / "run", 2)
    assert mosaic(["checkpoints", run, "--json", str(tmp_path / "found.json")]) == 0
    assert [row["step"] for row in json.loads((tmp_path / "found.json").read_text())] == [2, 1]
    assert "ranks: 1, tensors: 4" in capsys.readouterr().out
    out = tmp_path / "weights.safetensors"
    assert mosaic(["checkpoints", run, "--export", str(out)]) == 0
    Tied().load_state_dict(load_file(out))
    assert torch.equal(load_file(out)["head.weight"], model.embed.weight)
    file = newest / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    capsys.readouterr()
    assert mosaic(["checkpoints", run]) == 0
    assert mosaic(["checkpoints", run, "--verify"]) == 1
    written = capsys.readouterr()
    assert "step 1: " in written.out
    assert ", whole" in written.out
    assert "bytes, and" in written.err
    assert mosaic(["checkpoints", run, "--export", str(tmp_path / "no.safetensors")]) == 1
    assert mosaic(["checkpoints", run, "--step", "1", "--verify", "--export", str(tmp_path / "old.safetensors")]) == 0
    assert not (tmp_path / "no.safetensors").exists()
