"""Parameters that modules share with each other, or with the operations between them.

Such a parameter lives on every rank that runs one of its users. Each module's part of its gradient carries that
module's scale; here all parts get one scale, and their sum is averaged over its holders after the whole backward.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from mosaic.profiler import Subject

Members = tuple[int, ...]

_RUNNING = threading.local()


def running() -> str | None:
    """Returns the placed module whose forward or backward this thread runs; None outside of them."""
    return getattr(_RUNNING, "name", None)


@contextmanager
def marked(name: str) -> Iterator[None]:
    """Lets the thread that runs a module's work know whose work it is."""
    before, _RUNNING.name = running(), name
    try:
        yield
    finally:
        _RUNNING.name = before


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """The ranks that hold each tensor of a model."""

    by_name: Mapping[str, Members]
    """For each name of a parameter or buffer, the ranks that hold it."""
    by_id: Mapping[int, Members]
    """The same by the id that the tensor had before any was given up."""
    tied: Mapping[Members, tuple[nn.Parameter, ...]]
    """Parameters that train and have other users than one module alone, by the ranks that hold them."""
    loose: tuple[nn.Parameter, ...]
    """Parameters that train and are used between modules only; all ranks hold them."""
    names_of_tied: tuple[str, ...]
    """One name for each of ``tied``."""
    devices: Mapping[str, torch.device]
    """For each name of a parameter or buffer, where it is on ranks that hold it."""


def holdings_of(
    model: nn.Module,
    subjects: Iterable[Subject],
    members: Mapping[str, Members],
    users: Mapping[int, frozenset[str | None]],
    size: int,
) -> Holdings:
    """Decides which ranks hold what."""
    everyone = tuple(range(size))
    containers: dict[int, set[str]] = {}
    for subject in subjects:
        for tensor in (*subject.module.parameters(), *subject.module.buffers()):
            containers.setdefault(id(tensor), set()).add(subject.name)
    by_id: dict[int, Members] = {}
    tied: dict[Members, list[nn.Parameter]] = {}
    loose: list[nn.Parameter] = []
    named: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    named |= dict(model.named_buffers(remove_duplicate=False))
    for tensor in named.values():
        key = id(tensor)
        if key in by_id:
            continue
        inside, using = containers.get(key, set()), users.get(key, frozenset())
        modules = inside | {user for user in using if user is not None}
        ranks = {rank for module in modules for rank in members[module]}
        by_id[key] = tuple(sorted(ranks)) if inside and None not in using else everyone
        if not isinstance(tensor, nn.Parameter) or not tensor.requires_grad:
            continue
        if not modules:
            loose.append(tensor)
        elif len(modules) > 1 or not inside or None in using:
            tied.setdefault(by_id[key], []).append(tensor)
    ids = {id(parameter) for group in tied.values() for parameter in group}
    first = {id(tensor): name for name, tensor in reversed(named.items()) if id(tensor) in ids}
    return Holdings(
        by_name={name: by_id[id(tensor)] for name, tensor in named.items()},
        by_id=by_id,
        tied={group: tuple(parameters) for group, parameters in sorted(tied.items())},
        loose=tuple(loose),
        names_of_tied=tuple(sorted(first.values())),
        devices={name: tensor.device for name, tensor in named.items()},
    )


def even_out(parameter: nn.Parameter, holders: Members, members: Mapping[str, Members]) -> RemovableHandle:
    """Gives the gradients that modules send to a tied parameter one scale: that of its holders."""

    def scaled(grad: torch.Tensor) -> torch.Tensor:
        name = running()
        degree = len(holders) if name is None else len(members[name])
        return grad if degree == len(holders) else grad * (len(holders) / degree)

    hook: RemovableHandle = parameter.register_hook(scaled)
    return hook
