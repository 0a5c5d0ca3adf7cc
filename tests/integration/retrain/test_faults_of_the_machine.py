"""Programs that fail, memory and disks that run out, windows that end, hooks that fail, networks that are not there."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import Node

from bench.retrain.small_folder import bits_of, write_recipe
from mosaic.artifact import load, save
from mosaic.backends.host.backend import HostBackend
from mosaic.checkpoint.folder import checkpoints_in
from mosaic.engine import find_modules
from mosaic.plan import plan_from_quotas
from mosaic.retrain import versions
from mosaic.retrain.folder import DayFolder
from mosaic.retrain.records import StoredPlan
from mosaic.retrain.worker import main as worker
from mosaic.user_file import import_file

FIRST, SECOND = "2026-11-20", "2026-11-21"
Make = Callable[..., Node]


def fail() -> None:
    raise ZeroDivisionError("of the user's")


def run_out() -> None:
    raise MemoryError("no memory for a tensor")


def at(text: str) -> timedelta:
    return datetime.fromisoformat(text) - datetime.now(UTC)


class FullDisk:
    """Writes below a folder fail as on a full disk, for so many times."""

    def __init__(self, patch: pytest.MonkeyPatch, part: str, times: int) -> None:
        self.left = times
        flush, links = os.fsync, Path("/proc/self/fd")

        def fsync(handle: int) -> None:
            if self.left and part in str((links / str(handle)).readlink()):
                self.left -= 1
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            flush(handle)

        patch.setattr(os, "fsync", fsync)


def test_an_error_of_the_users_code_fails_the_day_and_the_next_run_goes_on(make_node: Make, quiet: dict[str, object]):
    node = make_node()
    assert node.run(at_step=20, fault=fail) == 1
    assert node.report.reason == "ZeroDivisionError: of the user's"
    assert "goes on from the last checkpoint" in node.report.todo
    assert node.run() == 0
    assert bits_of(node.folder.days()[-1]) == quiet


def test_memory_that_runs_out_once_is_another_start_and_without_end_a_failure(make_node: Make):
    node = make_node()
    assert node.run(at_step=20, fault=run_out) == 0
    assert [start.ended for start in node.report.state.starts] == ["out of memory", "done"]
    other = make_node(name="other")
    other.change("sys.modules['node_faults'].before_loss()", "raise MemoryError('never enough')")
    assert other.run() == 1
    assert other.report.reason == "training ended early again (out of memory), at step 0: never enough"
    assert len(other.folder.days()[-1].state.starts) == 3


def test_a_loss_that_is_not_finite_fails_the_day_and_a_few_at_its_end_are_refused(make_node: Make):
    scaler = "init_scale=4.0, growth_interval=3"
    for num_steps, code, said in ((40, 1, "the loss of step 20 and of the 19 before it is nan"), (10, 5, "not finite")):
        node = make_node(name=str(num_steps), budget={"steps": num_steps, "save": "0.001s"})
        node.change("nn.functional.cross_entropy(", "float('nan') * nn.functional.cross_entropy(")
        node.change(scaler, "enabled=False")
        assert node.run() == code
        assert said in node.report.reason
        assert ("promote it by hand" in node.report.todo) == (code == 5)
        checkpoints = checkpoints_in(node.folder.days()[-1].checkpoints)
        assert {each.step for each in checkpoints} <= {0, 10}  # none is from between


def test_a_disk_that_is_full_for_one_checkpoint_is_reported_and_for_two_ends_the_day(
    make_node: Make, quiet: dict[str, object]
):
    node, other = make_node(), make_node(name="other")
    with pytest.MonkeyPatch.context() as patch:
        FullDisk(patch, "/checkpoints/", times=1)
        assert node.run() == 0
    assert any("the disk was full when a checkpoint was written" in message for message in node.report.messages)
    assert bits_of(node.folder.days()[-1]) == quiet
    with pytest.MonkeyPatch.context() as patch:
        FullDisk(patch, "/checkpoints/", times=1000)
        assert other.run() == 1
    assert "No space left on device" in other.report.reason
    assert other.run() == 0
    assert bits_of(other.folder.days()[-1]) == quiet


def test_a_disk_that_is_full_after_training_fails_the_day_until_there_is_room(make_node: Make):
    node = make_node(promote={"hooks": ["true"]})
    for part in ("model.safetensors", "/versions/"):
        with pytest.MonkeyPatch.context() as patch:
            FullDisk(patch, part, times=1)
            assert node.run() == 1
        assert "No space left on device" in node.report.reason
    with pytest.MonkeyPatch.context() as patch:
        FullDisk(patch, "report.html", times=1000)
        assert node.run() == 0
    assert versions.linked(node.folder, "champion") == "0001"
    assert node.report.outcome != "promoted"  # of the run before
    assert node.run() == 0
    assert node.report.outcome == "promoted"


def test_outside_of_its_window_nothing_begins(make_node: Make):
    node = make_node(budget={"after": "01:00Z", "until": "05:30Z"})
    assert node.run(at("2026-11-22T00:30Z")) == 0
    assert node.said == ["the window is closed until 2026-11-22T01:00:00+00:00; nothing was begun"]
    assert node.folder.days() == ()


def test_a_window_that_ends_lets_the_day_be_judged_as_it_is_or_in_the_next_window(make_node: Make):
    node, judge, late_s = make_node(budget={"until": "05:30Z", "judging": "10min"}), worker.score_versions, [0.0]

    def late(*arguments: object) -> None:
        late_s[0] = 3600.0
        judge(*arguments)  # type: ignore[arg-type]

    assert node.run(at("2026-11-22T03:00Z"), at_step=9, fault=node.stop) == 75
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "score_versions", late)
        patch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + late_s[0]))
        assert node.run(at("2026-11-22T05:25Z")) == 75
    assert "the window ended before the day was judged" in node.report.reason
    assert node.run(at("2026-11-23T03:00Z"), at_step=1, fault=fail) == 0  # no step is made again
    assert (node.report.steps, node.report.num_steps, node.report.outcome) == (9, 40, "promoted")


def side_by_side(day: DayFolder) -> StoredPlan:
    """The day's plan with both towers at the same time."""
    towers = import_file(day.path.parents[1] / "train.py").Towers()
    graph = find_modules(towers, lambda: towers(torch.ones(8, 4), torch.ones(8, 4))).graph
    stages = [{"left": 1, "right": 1}, {"head": 1}]
    plan = plan_from_quotas(stages, graph=graph, device=HostBackend().device)
    stored = load(StoredPlan, day.plan)
    return replace(stored, plan=plan, key=replace(stored.key, colocate=True))


def begin_again(day: DayFolder) -> None:
    """Leaves of a day what it had before its first step."""
    for path in (day.metrics, day.trained, day.model, day.facts, day.scores, day.gate):
        path.unlink(missing_ok=True)
    shutil.rmtree(day.checkpoints)
    root = day.path.parents[1]
    (root / "champion").unlink()
    shutil.rmtree(root / "versions")
    day.set(day.state, outcome=None)


def test_a_day_goes_on_by_its_stored_plan_with_the_bits_of_an_undisturbed_one(make_node: Make):
    node, lanes = make_node(), list[str]()
    assert node.run() == 0
    write_recipe(node.folder.path, budget={"colocate": True})
    day = node.folder.days()[-1]
    plain, before = bits_of(day), set(threading.enumerate())
    save(side_by_side(day), day.plan)
    stored = json.loads(day.plan.read_text())["plan"]
    begin_again(day)

    def stop() -> None:
        lanes.extend(each.name for each in threading.enumerate() if each not in before)
        node.stop()

    assert node.run(at_step=12, fault=stop) == 75, node.report.reason
    assert node.run() == 0
    assert len(lanes) >= 2, "the plan ran nothing side by side"
    assert json.loads(day.plan.read_text())["plan"] == stored
    assert bits_of(day) == plain
