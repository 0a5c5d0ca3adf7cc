"""The modules that may be placed, and those that cannot be, with the reason of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from mosaic.engine.calls.obstacles import Obstacle
from mosaic.engine.finding.choose import Choice
from mosaic.errors import UnsupportedModelError

_SCRIPTED = Obstacle(
    "is scripted by torch.jit, which shows neither its calls nor its parts",
    todo="colocate the module that it was made from, or leave it where it is",
)
UNTIE = "untie the weights if they need not be tied, or name parts without them: colocate(..., modules=[...])"


class Candidates:
    """Modules of a model that may be placed; an obstacle takes one away.

    Where the obstacle is one of a part alone (a layer norm that is called from outside, too; a tied table of
    embeddings), another part that does most of the module's work is a candidate in its stead. Layers of a stack are
    only where there is nothing else.

    Args:
        model: The model.
        seen: Obstacles that a run showed already.
        choice: Chooses modules; None for those that the caller names.
        exclude: Names or patterns of modules to leave where they are.

    Attributes:
        modules: Those that may be placed.
        left_out: Those that cannot.
    """

    def __init__(
        self, model: nn.Module, seen: Mapping[str, Obstacle], choice: Choice | None, exclude: Sequence[str]
    ) -> None:
        self.modules: dict[str, nn.Module] = {}
        self._model = model
        self._all = dict(model.named_modules())
        scripted = [name for name, module in self._all.items() if isinstance(module, torch.jit.ScriptModule)]
        self.left_out: dict[str, Obstacle] = dict.fromkeys(scripted, _SCRIPTED)
        self._seen = seen
        self._choice = choice
        self._exclude = exclude

    def add(self, names: Iterable[str]) -> None:
        """Adds modules, as far as nothing stands against them."""
        found: dict[str, Obstacle] = {}
        for name in names:
            obstacle = self._obstacle(name)
            if obstacle is None:
                self.modules[name] = self._all[name]
            else:
                found[name] = obstacle
        if found:
            self.drop(found)

    def drop(self, obstacles: Mapping[str, Obstacle]) -> None:
        """Takes modules away, and adds parts of theirs in their stead."""
        self.left_out |= obstacles
        self.modules = {name: module for name, module in self.modules.items() if name not in obstacles}
        self._add_parts([name for name, obstacle in obstacles.items() if obstacle.is_of_a_part], layers=False)

    def add_layers(self) -> bool:
        """Adds layers of stacks where there is nothing else to place; says whether there are any."""
        if not self.modules:
            self._add_parts([name for name, why in self.left_out.items() if why.is_of_a_part], layers=True)
        return bool(self.modules)

    def finish(self) -> dict[str, Obstacle]:
        """Returns what is left out: neither modules of which parts are placed, nor parts that were tried in vain."""
        gone = {name for name in self.left_out if any(placed.startswith(f"{name}.") for placed in self.modules)}
        whole = self.left_out.keys() - gone
        return {
            name: obstacle
            for name, obstacle in self.left_out.items()
            if name in whole and not any(name.startswith(f"{other}.") for other in whole)
        }

    def _add_parts(self, names: Sequence[str], *, layers: bool) -> None:
        if self._choice is not None:
            parts = [part for name in names for part in self._choice.in_stead_of(name, self._all[name], layers=layers)]
            self.add([part for part in parts if part not in self.left_out])

    def _obstacle(self, name: str) -> Obstacle | None:
        """Returns what stands against a module before it is followed."""
        if matches(name, self._exclude):
            return Obstacle("excluded by the caller")
        if isinstance(self._all[name], torch.jit.ScriptModule):
            return _SCRIPTED
        whole = next((other for other in self.modules if name.startswith(f"{other}.")), None)
        if whole is not None:
            todo = "to place the parts, name them without the whole: colocate(..., modules=[...])"
            return Obstacle(f"is a part of {whole}, which is placed as a whole", todo=todo)
        if name in self._seen:
            return self._seen[name]
        buffer = _shared_buffer(self._model, self._all[name])
        if buffer is not None:
            return Obstacle(f"shares {buffer} with the rest of the model", todo=UNTIE, is_of_a_part=True)
        return None


def named(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Returns the modules that the caller names.

    Raises:
        UnsupportedModelError: There are none.
    """
    names = [name for name, _ in model.named_modules() if name]
    wanted = [name for name in names if matches(name, patterns)]
    if not wanted:
        raise UnsupportedModelError(
            f"no module is named {', '.join(patterns)}; the model's modules include {', '.join(names[:8])}"
        )
    return wanted


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name is among names or patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def outside(model: nn.Module, module: nn.Module) -> list[nn.Module]:
    """Returns the parts of a model that are no parts of ``module``."""
    inside = {id(part) for part in module.modules()}
    return [part for part in model.modules() if id(part) not in inside]


def _shared_buffer(model: nn.Module, module: nn.Module) -> str | None:
    """Returns the name of a buffer that a module shares with something outside of it, or None."""
    others = {id(b) for part in outside(model, module) for b in part.buffers(recurse=False)}
    return next((path for path, buffer in module.named_buffers() if id(buffer) in others), None)
