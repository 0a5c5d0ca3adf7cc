"""Placing the modules of a stage: against every placement, with and without memory."""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from mosaic import _search

NUM_DEVICES = 4
Row = tuple[int, int, int, int, int]
Rows = list[list[Row]]
Places = Sequence[tuple[int, int, Sequence[int]]]


def fits(rows: Rows, *, num_slots: int, memory: int) -> bool:
    """Every option on every set of devices, one by one; rooms in any order, since devices are alike."""

    @functools.cache
    def place(left: int, rooms: tuple[tuple[int, int], ...]) -> bool:
        if left == len(rows):
            return True
        for degree, quota, _, _, need in rows[left]:
            for chosen in itertools.combinations(range(NUM_DEVICES), degree):
                after = list(rooms)
                for device in chosen:
                    after[device] = (rooms[device][0] - quota, rooms[device][1] - need)
                if min(min(room) for room in after) >= 0 and place(left + 1, tuple(sorted(after))):
                    return True
        return False

    return place(0, ((num_slots, memory),) * NUM_DEVICES)


def check(rows: Rows, placed: Places, *, num_slots: int, memory: int) -> None:
    """Every module with different devices; no more slots or memory than a device has."""
    slots, used = Counter[int](), Counter[int]()
    for module, option, devices in placed:
        degree, quota, _, _, need = rows[module][option]
        assert len(devices) == len(set(devices)) == degree
        assert set(devices) <= set(range(NUM_DEVICES))
        slots.update(dict.fromkeys(devices, quota))
        used.update(dict.fromkeys(devices, need))
    assert max(slots.values()) <= num_slots
    assert not memory or max(used.values()) <= memory


def draw_rows(draw: random.Random, num_slots: int, most_memory: int) -> Rows:
    """More devices with fewer slots each, mostly; all take as long."""
    rows = []
    for _ in range(draw.randint(2, 7)):
        quotas = sorted(draw.sample(range(1, num_slots + 1), 3), reverse=True)
        options = [
            (degree, quota, 1, 0, draw.randint(0, most_memory))
            for degree, quota in zip((1, draw.randint(2, 3), 4), quotas, strict=True)
        ]
        rows.append(options)
    return rows


@pytest.mark.parametrize("memory", [0, 6, 9])
def test_modules_share_a_stage_just_where_some_placement_does(memory):
    answers = set()
    for seed in range(100 if memory else 300):
        draw = random.Random(seed)
        num_slots = 6 if memory else draw.choice([4, 6, 10])
        rows = draw_rows(draw, num_slots, memory)
        if any(min(need for *_, need in options) > memory for options in rows):
            continue  # that module fits nowhere
        modules = [_search.Module(options, []) for options in rows]
        problem = _search.Problem(modules, num_devices=NUM_DEVICES, num_slots=num_slots, memory_bytes=memory)
        answer = _search.plan(problem, effort=60.0)
        possible = fits(rows, num_slots=num_slots, memory=memory)
        assert (answer.status, answer.cost_ns == 1) == ("optimal", possible)
        for stage in answer.stages:
            check(rows, stage.rows, num_slots=num_slots, memory=memory)
        answers.add(possible)
        if possible:
            assert sorted(module for module, *_ in answer.stages[0].rows) == list(range(len(rows)))
    assert answers == {True, False}
