"""The seven days of the demo: their data, their events, and the expected outcomes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mosaic.demo.days.acts import (
    Check,
    Stage,
    new_people,
    new_task,
    no_audio,
    other_ranks,
    short_window,
    three_kills,
    wrong_labels,
)
from mosaic.demo.days.digits import DayKind, Hand

MIX_WITH_MOTION = {"image": 0.25, "audio": 0.25, "image+audio": 0.2, "imu": 0.3}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoryDay:
    """One day of the demo."""

    change: str
    """Change since the day before."""
    expected: str
    """Expected outcome."""
    data: DayKind
    """Kind of its rows."""
    act: Callable[[Stage], Iterator[Check]]
    """Plays the day and yields its checks."""


STORY = (
    StoryDay(
        change="none; three kills",
        expected="promoted, bits of an undisturbed run",
        data=DayKind(),
        act=three_kills,
    ),
    StoryDay(
        change="new voices and strokes",
        expected="promoted",
        data=DayKind(new_voices=0, hand=Hand(slant=0.2, ink=0.8)),
        act=new_people,
    ),
    StoryDay(
        change="no audio",
        expected="re-planned, audio kept by replay",
        data=DayKind(mix={"image": 1.0}),
        act=no_audio,
    ),
    StoryDay(
        change="a new task, motion",
        expected="partial load, old weights equal at step 0",
        data=DayKind(mix=MIX_WITH_MOTION),
        act=new_task,
    ),
    StoryDay(
        change="half of the labels wrong",
        expected="alarm, refused",
        data=DayKind(mix=MIX_WITH_MOTION, wrong_site="south"),
        act=wrong_labels,
    ),
    StoryDay(
        change="two ranks, full disk",
        expected="same samples, losses as on one rank",
        data=DayKind(mix=MIX_WITH_MOTION),
        act=other_ranks,
    ),
    StoryDay(
        change="strong drift, short window",
        expected="ends in time, judged as it is",
        data=DayKind(mix=MIX_WITH_MOTION, new_voices=1, hand=Hand(slant=0.3, turn=0.2, contrast=0.8), noise=0.5),
        act=short_window,
    ),
)
"""The days in order, from index 0."""
