"""The methods of planning, one line each: what the command line, files, comparisons and benchmarks offer.

To add one, write a function from a ``Task`` to what was ``Found`` in a file of its own, or, for a planner that draws
waves of jobs on whole devices, one from a ``Sheet`` to drafts of waves; then name it here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from mosaic.errors import unknown
from mosaic.solver.planners import distmm, megatron, optimus, spindle
from mosaic.solver.planners.draft import Draw
from mosaic.solver.planners.waves import plan_waves
from mosaic.solver.searches import (
    find_automatically,
    find_by_brute_force,
    find_by_clustering,
    find_exactly,
    find_in_turn,
)
from mosaic.solver.task import Found, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """Who plans, and what it can do. The plan of each can be run, unless it was told of layers to slice between."""

    name: str
    """As people give it."""
    phrase: str
    """What it does."""
    find: Callable[[Task], Found]
    """Makes the plan."""
    gives_bound: bool = False
    """Whether it says what no plan can be below."""
    slices: bool = False
    """Whether it cuts modules between layers, where it is told how many they have."""
    can_be_stopped: bool = False
    """Whether it has a plan at any time, and gives the best so far where somebody stops it."""
    starts_from_plan: bool = False
    """Whether it can start from the stages of an earlier plan."""
    is_compared: bool = True
    """Whether it is compared with the others where nobody names methods."""


def _planner(name: str, draw: Draw, phrase: str, *, slices: bool = False, is_compared: bool = True) -> Method:
    find = partial(plan_waves, draw=draw)
    return Method(name=name, phrase=phrase, find=find, slices=slices, is_compared=is_compared)


_ALL = (
    Method(
        name="auto",
        phrase="exact where that can search the problem, otherwise gahc; over a known network what simulates best",
        find=find_automatically,
        gives_bound=True,
        can_be_stopped=True,
        starts_from_plan=True,
        is_compared=False,
    ),
    Method(name="sequential", phrase="every module in turn, at its own best degree and quota", find=find_in_turn),
    Method(
        name="megatron",
        phrase="every module in turn, all at the best one data-parallel degree",
        find=partial(plan_waves, draw=megatron.draw, draws_all=True),
    ),
    Method(
        name="distmm",
        phrase="parallel modules on disjoint whole devices, the best such plan that exact finds; a reconstruction",
        find=distmm.find,
    ),
    _planner("distmm-mt", distmm.draw_by_task, "distmm for each task by itself", is_compared=False),
    _planner("spindle", spindle.draw, "modules sliced over waves", slices=True),
    _planner("spindle-seq", megatron.draw_on_all, "tasks in turn, every module on all devices", is_compared=False),
    _planner("spindle-optimus", optimus.draw, "devices to the task with the largest marginal gain"),
    Method(name="gahc", phrase="the paper's Algorithm 1", find=find_by_clustering, can_be_stopped=True),
    Method(
        name="exact",
        phrase="proves its plan best, or gives a bound",
        find=find_exactly,
        gives_bound=True,
        can_be_stopped=True,
        starts_from_plan=True,
    ),
    Method(
        name="brute_force",
        phrase="everything; at most six modules on two devices",
        find=find_by_brute_force,
        gives_bound=True,
        is_compared=False,
    ),
)

METHODS = {method.name: method for method in _ALL}
"""By name."""


def compared_methods() -> tuple[str, ...]:
    """Returns the names of the methods that are compared unless others are named."""
    return tuple(method.name for method in METHODS.values() if method.is_compared)


def describe_methods() -> str:
    """Returns all methods on one line, each with its phrase."""
    return "; ".join(f"{method.name} ({method.phrase})" for method in METHODS.values())


def method_of(name: str) -> Method:
    """Returns a method by name.

    Raises:
        ValueError: There is none of that name; lists all.
    """
    if name not in METHODS:
        raise ValueError(unknown("method", name, METHODS))
    return METHODS[name]
