"""Devices for what modules keep: every answer against all ways there are, and plans made slower until they fit."""

from __future__ import annotations

import itertools
import random

import pytest
from test_held_memory import kept, planned
from test_instance import instance, module

from bench.solver.generate import Recipe, generate
from mosaic import _search
from mosaic.solver.instances.checker import check_plan
from mosaic.solver.memory import search as held_search

SLOTS, MEMORY = 4, 12
Row = tuple[int, int, int, int]
Item = tuple[int, list[Row]]


def drawn(draw: random.Random) -> tuple[list[Item], int]:
    num_devices = draw.randint(1, 3)
    items = []
    for _ in range(draw.randint(1, 4)):
        options = [
            (draw.randint(1, num_devices), draw.randint(1, SLOTS), draw.randint(0, 7), draw.randint(0, 5))
            for _ in range(draw.randint(1, 2))
        ]
        items.append((draw.randrange(2), options))
    return items, num_devices


def fits(items: list[Item], places: list[tuple[int, tuple[int, ...]]], num_devices: int) -> bool:
    for device in range(num_devices):
        here = [
            (stage, options[option])
            for (stage, options), (option, devices) in zip(items, places, strict=True)
            if device in devices
        ]
        of_stage = [[row for at, row in here if at == stage] for stage in range(2)]
        working = max(sum(row[3] for row in rows) for rows in of_stage)
        if sum(row[2] for _, row in here) + working > MEMORY or any(
            sum(r[1] for r in rows) > SLOTS for rows in of_stage
        ):
            return False
    return True


def any_fits(items: list[Item], num_devices: int) -> bool:
    ways = [
        [
            (option, devices)
            for option, row in enumerate(options)
            for devices in itertools.combinations(range(num_devices), row[0])
        ]
        for _, options in items
    ]
    return any(fits(items, list(places), num_devices) for places in itertools.product(*ways))


def hold(items: list[Item], num_devices: int, *, max_nodes: int = 10**6) -> tuple[str, list[tuple[int, list[int]]]]:
    return _search.hold(
        items,
        num_devices=num_devices,
        num_slots=SLOTS,
        memory_bytes=MEMORY,
        num_stages=2,
        max_nodes=max_nodes,
        seconds=60,
    )


def test_devices_are_found_exactly_where_there_are_some():
    draw = random.Random(1)
    answers = set()
    for _ in range(400):
        items, num_devices = drawn(draw)
        answer, places = hold(items, num_devices)
        answers.add(answer)
        assert answer == ("yes" if any_fits(items, num_devices) else "no")
        assert answer == "no" or fits(items, [(option, tuple(devices)) for option, devices in places], num_devices)
    assert answers == {"yes", "no"}


def test_without_effort_the_question_stays_open_and_nonsense_is_refused():
    assert hold([(0, [(1, 1, 1, 0)])], 1, max_nodes=0) == ("open", [])
    for items in ([(2, [(1, 1, 1, 0)])], [(0, [])], [(0, [(0, 1, 1, 0)])]):
        with pytest.raises(ValueError, match="an item has"):
            hold(items, 1)


def test_stages_that_fit_on_no_devices_are_made_slower_until_they_do():
    """Side by side on two slots each, a and b fill a device that does not hold both; c keeps one from the other."""
    made = instance(
        module("a", kept(1, 2, 6, quota=4), kept(1, 3, 6, quota=2), kept(2, 1, 6, quota=4)),
        module("b", kept(1, 2, 6, quota=4), kept(1, 3, 6, quota=2), kept(2, 1, 6, quota=4)),
        module("c", kept(2, 1, 3, quota=2), after=("a", "b")),
        memory_bytes=9,
    )
    plan = planned(made)
    assert check_plan(made, plan).is_valid
    assert plan.search.status == "optimal"


def test_what_stayed_open_is_looked_at_again_until_it_is_proven(monkeypatch):
    made = generate(Recipe(shape="align", num_modules=5, num_devices=4, tight_memory=True, held_memory=True, seed=1))
    proven = planned(made)
    assert proven.search.status == "optimal"
    monkeypatch.setattr(held_search, "PARTITION_NODES", 1)
    again = planned(made)
    assert again.search.status == "optimal"
    assert again.predicted_ms == pytest.approx(proven.predicted_ms)
