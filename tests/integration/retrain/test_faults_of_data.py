"""Days whose data is missing, short, wrong, or changes under the run."""

from __future__ import annotations

import json
from collections.abc import Callable

from conftest import FAULTS, Node

from bench.retrain.small_folder import bits_of, write_day
from mosaic.retrain.recipe import read_recipe
from mosaic.retrain.workers import Workers

FIRST, SECOND, THIRD = "2026-11-20", "2026-11-21", "2026-11-22"
Make = Callable[..., Node]


def test_a_day_without_rows_fails_and_the_next_day_takes_its_place(make_node: Make):
    node = make_node()
    write_day(node.folder.path, FIRST, num_rows=0)
    assert node.run() == 1
    assert "no row of 2026-11-20 is left to train on" in node.report.reason
    assert node.run() == 1
    write_day(node.folder.path, SECOND)
    node.folder.day(FIRST).checkpoints.mkdir()
    assert node.run() == 0
    assert not node.folder.day(f"{FIRST}.1").checkpoints.exists()
    assert [day.path.name for day in node.folder.days()] == [SECOND]
    assert node.folder.days()[0].state.new == (FIRST, SECOND)


def test_rows_of_one_class_are_quarantined_until_a_person_releases_them(make_node: Make):
    node = make_node()
    assert node.run() == 0
    write_day(node.folder.path, SECOND)
    _edit(node, SECOND, lambda row: {**row, "label": 1})
    assert node.run() == 5
    assert node.report.outcome == "quarantined"
    assert "All 120 rows have the label 1" in node.report.reason
    assert f"quarantine/{SECOND}.json" in node.report.todo
    assert node.run() == 0
    assert "nothing new" in node.said[-1]
    (node.folder.quarantine / f"{SECOND}.json").unlink()
    (node.folder.path / "days" / f"{SECOND}.2").mkdir()  # the first free name is .1
    node.change(FAULTS, "")
    ended = Workers(node.folder, node.folder.day("check"), read_recipe(node.folder.recipe)).inspect("check")
    assert ended.reason == f"this data would be quarantined: {node.report.reason}"
    assert node.run() == 5  # a person released it, and the check says the same again
    assert node.folder.day(f"{SECOND}.1").has_begun


def test_a_missing_modality_replans(make_node: Make):
    node = make_node()
    assert node.run() == 0
    write_day(node.folder.path, SECOND, modality="left")
    assert node.run() == 0
    assert node.report.plan is not None
    assert "modalities was left, right and is left" in node.report.plan.why


def test_unreadable_rows_are_counted_and_too_many_end_the_day(make_node: Make):
    for num_broken, code, reason in (
        (2, 0, "There was no champion yet"),
        (7, 5, "7 of 120 rows could not be read: ValueError: this row is torn (7); max_unreadable = 5%"),
    ):
        node, rows = make_node(name=str(num_broken), sources={"fresh_share": 0.0}), iter(range(120))
        _edit(node, FIRST, lambda row, rows=rows, n=num_broken: {**row, "broken": True} if next(rows) < n else row)
        assert node.run() == code
        assert reason in node.report.reason
        assert code or node.report.data[0].rejected["ValueError"] > 0


def test_a_folder_that_cannot_be_opened_is_named(make_node: Make):
    node = make_node()
    (node.folder.path / "data" / "frozen" / "rows.jsonl").write_text("{")
    assert node.run() == 1
    assert node.report.reason.startswith("train.py:Rows cannot open data/frozen (JSONDecodeError: ")


def test_an_iterable_data_set_is_refused_with_the_way_out(make_node: Make):
    node = make_node()
    node.change("    def __len__(self):", "    def num_rows(self):")
    assert node.run() == 1
    assert "train.py:Rows returned a Rows, which cannot be indexed" in node.report.reason
    assert "return a map-style Dataset" in node.report.reason


def test_data_that_changes_under_a_day_is_an_error_that_names_the_file_and_put_back_it_goes_on(
    make_node: Make, quiet: dict[str, object]
):
    node = make_node()
    assert node.run(at_step=7, fault=node.stop) == 75
    for path in (FIRST, "frozen"):
        rows = node.folder.path / "data" / path / "rows.jsonl"
        before = rows.read_bytes()
        for change, said in (
            (before + b"\n", f"rows.jsonl had {len(before)} bytes and has {len(before) + 1}"),
            (before[::-1], "the last to change is rows.jsonl"),
        ):
            rows.write_bytes(change)
            assert node.run() == 1
            assert f"data/{path} changed since a day listed it ({said}), and" in node.report.reason
        rows.write_bytes(before)
    assert node.run() == 0
    assert bits_of(node.folder.days()[-1]) == quiet


def _edit(node: Node, day: str, change: Callable[[dict[str, object]], dict[str, object]]) -> None:
    path = node.folder.path / "data" / day / "rows.jsonl"
    rows = [change(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
