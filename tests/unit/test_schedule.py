"""Schedules as data: actions as text, rows, files with a hash."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mosaic.artifact import load, parse, save, to_json
from mosaic.errors import InvalidFileError, InvalidGraphError, InvalidScheduleError
from mosaic.graph import Part
from mosaic.schedule import Action, ActionKind, Schedule

HALF = Part(module="text.layers", first=4, count=4, total=8)
MADE = Schedule(plan="0123456789abcdef", rows=(("F0:vision", "B0:vision"), ("F0:text.layers[4:8/8]",)))


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (Action(rank=2, kind=ActionKind.FORWARD, part=Part(module="vision")), "2/F0:vision"),
        (Action(rank=0, kind=ActionKind.BACKWARD, part=HALF, microbatch=12), "0/B12:text.layers[4:8/8]"),
        (Action(rank=1, kind=ActionKind.FORWARD, part=Part(module="a/b:c[0]")), "1/F0:a/b:c[0]"),
    ],
)
def test_an_action_is_text_both_ways(action: Action, text: str) -> None:
    assert str(action) == text
    assert Action.parse(text) == action


@pytest.mark.parametrize("text", ["F0:vision", "x/F0:vision", "0/X0:vision", "0/F:vision", "0/F0", "0/F0:"])
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(InvalidScheduleError, match=r"names no rank|is no action"):
        Action.parse(text)


def test_layers_behind_the_last_one_are_refused() -> None:
    with pytest.raises(InvalidGraphError, match="layers 4 to 12 of 'text'; it has 8"):
        Part(module="text", first=4, count=8, total=8)


def test_actions_are_put_into_the_rows_of_their_ranks() -> None:
    actions = [action for rank in (1, 0) for action in MADE.actions(rank)]
    assert Schedule.of(actions, plan=MADE.plan, num_ranks=2) == MADE
    assert [action.part for action in MADE.actions(1)] == [HALF]


def test_a_bad_cell_is_named_with_its_grid() -> None:
    with pytest.raises(InvalidScheduleError, match=r"rank 1, action 0 \(G0:text\): 'G0:text' is no action") as caught:
        Schedule(plan="", rows=(("F0:vision",), ("G0:text",)))
    assert caught.value.cell == (1, 0)
    assert caught.value.grid == "rank 0: F0:vision\nrank 1: G0:text"


def test_a_schedule_survives_a_file_and_a_changed_one_is_refused(tmp_path: Path) -> None:
    save(MADE, tmp_path / "schedule.json")
    assert load(Schedule, tmp_path / "schedule.json") == MADE
    text = to_json(MADE)
    with pytest.raises(InvalidScheduleError, match=f"the schedule's hash is {MADE.hash}, and its content has"):
        parse(Schedule, text.replace("F0:vision", "F1:vision"), source="changed.json")
    by_hand = '{"schema_version": 1, "plan": "0123456789abcdef", "rows": [["F0:vision"]]}'
    assert parse(Schedule, by_hand, source="by_hand.json").hash == replace(MADE, rows=(("F0:vision",),), hash="").hash
    with pytest.raises(InvalidFileError, match="schema_version=2 is newer"):
        parse(Schedule, text.replace('"schema_version": 1', '"schema_version": 2'), source="newer.json")
