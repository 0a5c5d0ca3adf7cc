"""Changes of a model after it was colocated; its plan is for the model of then."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from itertools import chain

import torch
from torch import nn

_TODO = "call handle.replan(reason=...)"


class Makeup:
    """The parts of a model and the dtypes and devices of its parameters, at one time."""

    def __init__(self, model: nn.Module) -> None:
        self._parts = {name: weakref.ref(part) for name, part in model.named_modules()}
        self._kinds = _kinds(model)

    def changes(self, model: nn.Module, placed: Iterable[str]) -> Iterator[str]:
        """Yields a sentence for each change of the same model, whose modules ``placed`` have a plan."""
        parts, kinds = dict(model.named_modules()), _kinds(model)
        changed = {
            name: "replaced" if name in parts and name in self._parts else "added" if name in parts else "removed"
            for name in chain(parts, self._parts.keys() - parts.keys())
            if name not in parts or name not in self._parts or self._parts[name]() is not parts[name]
        }
        for module in placed:
            inside = [name for name in changed if name.startswith(f"{module}.")]
            if module in changed:
                yield f"{module} was {changed.pop(module)} after colocating, so that no lane runs it: {_TODO}"
            elif inside:
                more = f" and {len(inside) - 1} more" if len(inside) > 1 else ""
                yield (
                    f"{module} was changed after colocating ({inside[0]} was {changed[inside[0]]}{more}) and still "
                    f"runs on the lane of a plan for what it was: {_TODO}"
                )
            changed = {name: what for name, what in changed.items() if name not in inside}
            before, now = self._kind_of(module, self._kinds), self._kind_of(module, kinds)
            if before != now and now:
                yield (f"{module} was {before} when it was colocated and is {now} now; its plan is of then: {_TODO}")
        outermost = [name for name in changed if name.rpartition(".")[0] not in changed]
        yield from (f"{name} was {changed[name]} after colocating; no plan knows of it" for name in outermost)

    @staticmethod
    def _kind_of(module: str, kinds: dict[str, tuple[torch.dtype, torch.device]]) -> str:
        own = {kind for name, kind in kinds.items() if name.startswith(f"{module}.")}
        return " and ".join(sorted(f"{str(dtype).removeprefix('torch.')} on {device}" for dtype, device in own))


def _kinds(model: nn.Module) -> dict[str, tuple[torch.dtype, torch.device]]:
    return {name: (parameter.dtype, parameter.device) for name, parameter in model.named_parameters()}
