"""The list of all cases: models of transformers, and files of unusual nets and loops."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from bench.sweep.session import Case

NETS: Mapping[str, str] = {
    "hidden state, random numbers and hooks": "state",
    "weights and number formats": "weights",
    "gradients": "gradients",
    "arguments, results and shapes": "calls",
    "loops": "loops",
    "compilers, threads, modes": "machinery",
}
"""The files of odd nets and loops; their public functions and the rows of their ``CASES`` are cases."""
TOLD = {"types_compared_exactly": "isinstance(m, T) holds, type(m) is T does not"}
"""Cases that differ, and the line of ``describe()`` on it."""


def all_cases() -> list[Case]:
    """Returns all cases: the models, then the nets and loops."""
    from bench.sweep.models import TRANSFORMERS  # a machine with a GPU may be without transformers

    models = [case for kind, table in TRANSFORMERS.items() for case in _models(kind, table)]
    return models + [case for kind in NETS for case in nets_of(kind)]


def nets_of(kind: str) -> list[Case]:
    file = import_module(f"bench.sweep.nets.{NETS[kind]}")
    runs = {
        name: value
        for name, value in vars(file).items()
        if inspect.isfunction(value) and value.__module__ == file.__name__ and not name.startswith("_")
    } | getattr(file, "CASES", {})
    return [Case(name=name, kind=kind, run=run, told=TOLD.get(name, "")) for name, run in runs.items()]


def pipeline_cases() -> list[Case]:
    """Returns all cases with different models, those with lists of layers first, without loops round one model."""
    from bench.sweep.models import LISTS

    return _models("lists of layers", LISTS) + [
        case for case in all_cases() if case.kind != "loops" and not getattr(case.run, "is_loop", False)
    ]


def _models(kind: str, table: Mapping[str, Callable[..., Any]]) -> list[Case]:
    from bench.sweep.models import train_model

    return [Case(name=name, kind=kind, run=partial(train_model, make=make)) for name, make in table.items()]
