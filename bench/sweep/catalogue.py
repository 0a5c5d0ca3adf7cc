"""The list of all cases: the table of models of transformers, and the functions of each file of odd nets and loops."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from types import MappingProxyType, ModuleType
from typing import Any

from bench.sweep.models import multimodal, speech, text, vision
from bench.sweep.models.pieces import Made, train_model
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
from bench.sweep.session import Session
from bench.sweep.verdict import Case

MODELS: MappingProxyType[str, ModuleType] = MappingProxyType(
    {
        "transformers: several modalities": multimodal,
        "transformers: speech": speech,
        "transformers: text and series": text,
        "transformers: images and videos": vision,
    }
)
"""The files of models; each of their public functions makes a model."""
NETS: MappingProxyType[str, ModuleType] = MappingProxyType(
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
    """Returns all cases: the models, then the nets and loops."""
    models = [(kind, name, partial(_trained, make)) for kind, name, make in _functions(MODELS)]
    return [Case(name=name, kind=kind, run=run) for kind, name, run in (*models, *_functions(NETS))]


def _trained(make: Callable[[], Made], session: Session) -> None:
    train_model(session, make())


def _functions(kinds: MappingProxyType[str, ModuleType]) -> Iterator[tuple[str, str, Callable[..., Any]]]:
    for kind, module in kinds.items():
        for name, found in vars(module).items():
            if inspect.isfunction(found) and found.__module__ == module.__name__ and not name.startswith("_"):
                yield kind, name, found
