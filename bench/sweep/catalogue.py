"""The list of all cases: the table of models of transformers, and the functions of each file of odd nets and loops."""

from __future__ import annotations

import inspect
from types import MappingProxyType, ModuleType

from bench.sweep.nets import (
    gradients,
    hooks,
    machinery,
    precision,
    randomness,
    results,
    shapes,
    state,
    training,
    weights,
)
from bench.sweep.verdict import Case

KINDS: MappingProxyType[str, ModuleType] = MappingProxyType(
    {
        "hidden state": state,
        "random numbers": randomness,
        "hooks": hooks,
        "weights and norms": weights,
        "gradients": gradients,
        "number formats": precision,
        "branches and shapes": shapes,
        "arguments and results": results,
        "loops": training,
        "compilers, threads, modes": machinery,
    }
)
"""The files of odd nets and loops; each of their public functions is a case."""


def all_cases() -> list[Case]:
    """Returns all cases."""
    return [
        Case(name=name, kind=kind, run=run)
        for kind, module in KINDS.items()
        for name, run in vars(module).items()
        if inspect.isfunction(run) and run.__module__ == module.__name__ and not name.startswith("_")
    ]
