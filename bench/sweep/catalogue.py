"""The list of all cases: the models of transformers, and the functions of each file of odd nets and loops."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from bench.sweep.session import Case

NETS: Mapping[str, tuple[str, ...]] = {
    "hidden state": ("state", "buffers"),
    "random numbers": ("randomness",),
    "hooks": ("hooks",),
    "weights and norms": ("weights",),
    "gradients": ("gradients", "tensors"),
    "number formats": ("precision",),
    "branches and shapes": ("shapes",),
    "arguments and results": ("arguments", "results"),
    "loops": ("training", "interruptions"),
    "compilers, threads, modes": ("machinery",),
    "libraries": ("libraries",),
}
"""The files of odd nets and loops; each of their public functions is a case."""
TOLD = {"types_compared_exactly": "isinstance(m, T) holds, type(m) is T does not"}
"""Cases that differ, and what ``describe()`` says of that."""


def all_cases() -> list[Case]:
    """Returns all cases: the models, then the nets and loops."""
    from bench.sweep.models import TRANSFORMERS  # a machine with a GPU may be without transformers

    models = [case for kind, table in TRANSFORMERS.items() for case in _models(kind, table)]
    return models + [case for kind in NETS for case in nets_of(kind)]


def nets_of(kind: str) -> list[Case]:
    """Returns the nets and loops of a kind."""
    named = [pair for file in NETS[kind] for pair in _functions(f"bench.sweep.nets.{file}")]
    return [Case(name=name, kind=kind, run=run, told=TOLD.get(name, "")) for name, run in named]


def pipeline_cases() -> list[Case]:
    """Returns all cases whose models are cut into chunks: those with lists of layers, and all others."""
    from bench.sweep.models import LISTS

    return _models("lists of layers", LISTS | dict(_functions("bench.sweep.chains"))) + all_cases()


def _models(kind: str, table: Mapping[str, Callable[..., Any]]) -> list[Case]:
    from bench.sweep.models import train_model

    return [Case(name=name, kind=kind, run=partial(train_model, make=make)) for name, make in table.items()]


def _functions(module: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yields the public functions of a module, by name."""
    for name, value in vars(import_module(module)).items():
        if inspect.isfunction(value) and value.__module__ == module and not name.startswith("_"):
            yield name, value
