"""Days whose checkpoints, model, machine or clock are not as they were."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Node

from bench.retrain.small_folder import bits_of, write_day
from mosaic.checkpoint.folder import checkpoints_in
from mosaic.errors import MosaicError
from mosaic.retrain import steering, versions
from mosaic.retrain.folder import DayFolder
from mosaic.retrain.records import DayNotes

FIRST, SECOND, THIRD = "2026-11-20", "2026-11-21", "2026-11-22"
Make = Callable[..., Node]


def stopped(make_node: Make, **changed: object) -> Node:
    """A node whose day was told to stop in its twelfth step."""
    node = make_node(**changed)
    assert node.run(at_step=12, fault=node.stop) == 75
    assert "stopped by SIGTERM at step 12" in node.report.reason
    assert node.report.data[0].drawn == 12 * 16
    assert len(checkpoints_in(day_of(node).checkpoints)) == 2
    return node


def day_of(node: Node) -> DayFolder:
    return node.folder.days()[-1]


def notes_of(node: Node) -> DayNotes:
    assert node.report.trained is not None
    return node.report.trained.notes


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)


def test_a_damaged_or_torn_checkpoint_falls_back_to_the_one_before(make_node: Make, quiet: dict[str, object]):
    for name, spoil in (
        ("damaged", lambda checkpoint: damage(checkpoint.path / "rank-00000.safetensors")),
        ("torn", lambda checkpoint: (checkpoint.path / "manifest.json").write_text('{"step": 1')),
        ("missing", lambda checkpoint: shutil.rmtree(checkpoint.path)),
    ):
        node = stopped(make_node, name=name)
        spoil(checkpoints_in(day_of(node).checkpoints)[0])
        assert node.run() == 0
        assert bits_of(day_of(node)) == quiet


def test_where_no_checkpoint_or_log_is_whole_the_day_begins_anew_with_the_same_bits(
    make_node: Make, quiet: dict[str, object]
):
    node = stopped(make_node)
    for checkpoint in checkpoints_in(day_of(node).checkpoints):
        damage(checkpoint.path / "rank-00000.safetensors")
    node.folder.history.write_text('{"at": "2026-')
    with day_of(node).metrics.open("a") as file:
        file.write('{"step": 13, "lo')
    assert node.run() == 0
    assert bits_of(day_of(node)) == quiet
    assert notes_of(node).differs_from_step is None


def test_a_champion_whose_checkpoint_is_damaged_lends_its_weights_and_no_earlier_checkpoint(make_node: Make):
    node = make_node(FIRST)
    assert node.run() == 0
    first = day_of(node)
    damage(checkpoints_in(first.checkpoints)[0].path / "rank-00000.safetensors")
    assert len(checkpoints_in(first.checkpoints)) > 1
    for path in (first.figures, first.gate, first.plan, first.trained):  # nor is anything else of an earlier day needed
        path.write_text(path.read_text()[:40])
    write_day(node.folder.path, SECOND)
    assert node.run() == 0
    assert notes_of(node).loaded == "weights of the champion"


def test_a_file_that_changes_after_training_is_refused_and_made_again_once_it_is_removed(
    make_node: Make, quiet: dict[str, object]
):
    node = make_node()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(versions, "add", lambda *_: (_ for _ in ()).throw(MosaicError("no room")))
        assert node.run() == 1
    day = day_of(node)
    for path, spoil in ((day.model, damage), (day.scores, lambda path: path.write_text("{"))):
        spoil(path)
        assert node.run() == 1
        assert str(path) in node.report.reason
        assert "remove it: the next run makes it again" in node.report.reason
        assert versions.linked(node.folder, "champion") is None
        path.unlink()
    (day.path / ".model.safetensors.1a2b3c4d").mkdir()  # of a killed process
    day.environment.write_text("{")  # only the report reads it
    assert node.run() == 0
    assert bits_of(day) == quiet
    assert node.report.environment is None
    assert not list(day.path.glob(".*"))


def test_a_day_that_lost_its_state_begins_anew_and_uses_none_of_its_files(make_node: Make):
    node = make_node()
    node.folder.day(FIRST).path.mkdir(parents=True)  # which a killed run only began
    assert node.run() == 0
    (day_of(node).path / "state.json").unlink()
    assert node.run() == 0
    assert node.report.state.version == "0002"
    assert [path.name for path in day_of(node).path.parent.glob("*.*")] == [f"{FIRST}.1"]


def test_a_program_that_changed_within_a_day_is_reported(make_node: Make):
    node = stopped(make_node)
    node.change("weights", "weights of all")
    assert node.run() == 0
    assert notes_of(node).differs_from_step == 12
    assert "program was" in notes_of(node).differs_because


def test_a_person_who_promotes_during_a_day_is_not_overruled(make_node: Make):
    node = make_node()
    for day, undo in ((SECOND, ""), (THIRD, f"mosaic retrain rollback {node.folder.path}")):
        assert node.run() == 0
        assert node.report.undo == undo
        assert node.report.scores.keys() >= {"frozen"}
        assert ("Score on frozen rows" in day_of(node).page.read_text()) == (day == SECOND)
        write_day(node.folder.path, day)
    assert node.run(at_step=3, fault=node.stop) == 75
    steering.rollback(node.folder.path)
    assert node.run() == 0
    gate = node.report.gate
    assert gate is not None
    assert {each.against for each in gate.comparisons} == {"0001"}
    card = versions.champion(node.folder.path).card
    assert (card.version, card.parent) == ("0003", "0002")


def test_the_status_has_the_step_of_a_day_that_trains(make_node: Make):
    node, lines = make_node(), list[str]()
    assert node.run(at_step=12, fault=lambda: lines.extend(steering.status_of(node.folder.path))) == 0
    assert any(line.startswith(f"{FIRST}: training: step 1") for line in lines)  # 10, or 11 after a save


def test_hold_stops_promotions_until_it_is_taken_off(make_node: Make):
    node = make_node()
    steering.hold(node.folder.path, off=False)
    assert node.run() == 0
    assert node.report.outcome == "held"
    assert f"mosaic retrain promote {node.folder.path} 0001" in node.report.todo
    assert versions.linked(node.folder, "champion") is None
    steering.hold(node.folder.path, off=True)
    write_day(node.folder.path, SECOND)
    assert node.run() == 0
    assert versions.linked(node.folder, "champion") == "0002"
