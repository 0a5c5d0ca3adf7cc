"""The list of all cases: the table of models of transformers, and the functions of each file of odd nets and loops."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import Any

from bench.sweep.models.pieces import Made, train_model
from bench.sweep.session import Session
from bench.sweep.verdict import Case

Files = Mapping[str, tuple[str, ...]]

MODELS: Files = MappingProxyType(
    {
        "transformers: towers beside each other": ("towers",),
        "transformers: language models that see and hear": ("seeing", "hearing", "qwen"),
        "transformers: speech": ("speech",),
        "transformers: text and series": ("text",),
        "transformers: images and videos": ("vision",),
    }
)
"""The files of models; each of their public functions makes a model."""
NETS: Files = MappingProxyType(
    {
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
)
"""The files of odd nets and loops; each of their public functions is a case."""

CHAINS: Files = MappingProxyType({"lists of layers": ("chains",)})
"""The same of models that pipelines alone are tried on."""

TOLD = MappingProxyType({"types_compared_exactly": "isinstance(m, T) holds, type(m) is T does not"})
"""Cases that differ, and what ``describe()`` says of that."""


def all_cases() -> list[Case]:
    """Returns all cases: the models, then the nets and loops."""
    models = [Case(name=name, kind=kind, run=partial(_trained, make)) for kind, name, make in functions(MODELS)]
    return models + [case for kind in NETS for case in nets_of(kind)]


def nets_of(kind: str) -> list[Case]:
    """Returns the nets and loops of a kind."""
    return [
        Case(name=name, kind=kind, run=run, told=TOLD.get(name, "")) for _, name, run in functions({kind: NETS[kind]})
    ]


def pipeline_cases() -> list[Case]:
    """Returns all cases whose models are cut into chunks."""
    return [
        Case(name=name, kind=kind, run=partial(_trained, make)) for kind, name, make in functions(CHAINS)
    ] + all_cases()


def _trained(make: Callable[[], Made], session: Session) -> None:
    train_model(session, make())


def functions(kinds: Files) -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """Yields the public functions of files, each with the kind of its file and its own name."""
    for kind, file in ((kind, file) for kind, files in kinds.items() for file in files):
        module = import_module(f"bench.sweep.{'nets' if kind in NETS else 'models'}.{file}")
        for name, found in vars(module).items():
            if inspect.isfunction(found) and found.__module__ == module.__name__ and not name.startswith("_"):
                yield kind, name, found
