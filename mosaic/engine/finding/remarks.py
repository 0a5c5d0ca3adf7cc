"""Remarks for a model's user from one run of it: each with a line of the user's code and what to do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mosaic.engine.calls.caller import caller
from mosaic.engine.calls.obstacles import Obstacle
from mosaic.engine.calls.structure import memory_of
from mosaic.engine.calls.torch_functions import look_up

_READS = {"item", "tolist", "numpy", "is_nonzero", "nonzero", "__bool__", "__int__", "__float__", "__index__"}
_HOOKS = {
    "_forward_pre_hooks": "a forward pre-hook",
    "_forward_hooks": "a forward hook",
    "_backward_hooks": "a backward hook",
    "_backward_pre_hooks": "a backward pre-hook",
}
_KEEPS_TO_ITSELF = ("transformers.utils.output_capturing",)
"""Libraries whose hooks use their arguments and a context variable alone, in every model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """One thing about one module; the module is placed nevertheless."""

    module: str
    """Its name in the graph."""
    what: str
    """What was seen."""
    where: str
    """File, line and function of the user's code; empty where ``what`` has it."""
    todo: str
    """What to do about it."""
    matters: bool = False
    """Whether it costs speed or puts numbers at risk, so that it is logged."""

    def __str__(self) -> str:
        return f"{self.seen}; {self.todo}"

    @property
    def seen(self) -> str:
        """What was seen, and where."""
        return f"{self.module}: {self.what}" + (f" ({self.where})" if self.where else "")


class Remarks:
    """Collects remarks while a model runs.

    Attributes:
        obstacles: Candidates that cannot be placed, with the reason.
    """

    def __init__(self, candidates: Mapping[str, nn.Module]) -> None:
        self.obstacles: dict[str, Obstacle] = {}
        self._candidates = candidates
        self._found: dict[tuple[str, str], Remark] = {}
        self._before: dict[str, frozenset[str]] = {}  # all that each candidate waits for
        self._reads: dict[str, Remark] = {}  # that nobody waits for unless another module is called after them
        self._given: dict[int, tuple[str, torch.Tensor]] = {}  # by memory; kept so that none is given out twice
        self._buffers = {id(b): (name, path) for name, m in candidates.items() for path, b in m.named_buffers()}
        for name, module in candidates.items():
            self._note_structure(name, module)

    @property
    def found(self) -> tuple[Remark, ...]:
        """All remarks, in order of appearance."""
        return tuple(self._found.values())

    def enter(self, name: str, given: Sequence[torch.Tensor], sources: Collection[str]) -> None:
        """A candidate begins to run on ``given``, which stems from candidates ``sources``."""
        self._before[name] = frozenset(sources).union(*(self._before[source] for source in sources))
        for source in [source for source in self._reads if source not in self._before[name]]:
            self._add(self._reads.pop(source))
        compiled = next((path for path, part in self._candidates[name].named_modules() if _is_compiled(part)), None)
        if compiled is not None:
            what = f"{compiled or 'it'} is compiled; it compiles on its lane"
            todo = "torch.compile belongs there: on what is placed, as model.branch.compile(), not on the model"
            self._add(Remark(module=name, what=what, where=caller(), todo=todo))
        for tensor in given:
            self._given[memory_of(tensor)] = (name, tensor)
        self._given.pop(0, None)

    def watching(
        self, running: str | None, args: Any, inputs: Sequence[torch.Tensor], sources: Collection[str]
    ) -> Callable[[Any, Any], None]:
        """An operator is about to run in ``running``, or between modules; returns what to call once it has run.

        What is returned takes the operator's function and its named arguments.
        """
        versions = [(tensor, tensor._version) for tensor in inputs if id(tensor) in self._buffers]

        def ran(func: Any, kwargs: Any) -> None:
            does = look_up(func)
            for tensor, version in versions:
                if tensor._version != version:
                    self._note_buffer(running, *self._buffers[id(tensor)])
            if does.replaces(kwargs) and not sources:  # writes of what comes from a lane are ordered behind all lanes
                target = kwargs.get("out") if kwargs.get("out") is not None else next(iter(args), None)
                if isinstance(target, torch.Tensor):
                    self._note_write(running, does.name, target)

        return ran

    def note_read(self, func: Any, sources: frozenset[str], running: str | None) -> None:
        """A value that stems from modules ``sources`` was looked at."""
        name = look_up(func).name
        if name not in _READS or running is not None:
            return
        what = f"the code between modules looks at a value of its result ({name}), and waits for its lane there"
        todo = "move that behind the last module's call, or stay on tensors (torch.where)"
        for source in sources:
            remark = Remark(module=source, what=what, where=caller(), todo=todo, matters=True)
            self._reads.setdefault(source, remark)

    def _add(self, remark: Remark) -> None:
        self._found.setdefault((remark.module, remark.what), remark)

    def _note_write(self, running: str | None, name: str, target: torch.Tensor) -> None:
        given = self._given.get(memory_of(target))
        if given is None or given[0] == running:
            return
        self.obstacles[given[0]] = Obstacle(
            f"its input is written to in place ({name}, {caller()}) after it was called; write to a copy",
            todo="write to a copy: x = x + 1 instead of x += 1",
        )

    def _note_buffer(self, running: str | None, owner: str, path: str) -> None:
        if running != owner:
            what = f"its buffer {path} is updated outside of it"
            todo = "update it before the model's call, or exclude the module: colocate(..., exclude=[...])"
            self._add(Remark(module=owner, what=what, where=caller(), todo=todo, matters=True))

    def _note_structure(self, name: str, module: nn.Module) -> None:
        paths: dict[tuple[str, str], list[str]] = {}
        for path, part in module.named_modules():
            for attribute, text in _HOOKS.items():
                for hook in getattr(part, attribute).values():
                    if getattr(hook, "__module__", None) not in _KEEPS_TO_ITSELF:
                        paths.setdefault((text, _place_of(hook)), []).append(path or "it")
        for (text, where), (first, *others) in paths.items():
            having = f"{first} and {len(others)} more have" if others else f"{first} has"
            what = f"{having} {text}, which will run on the lane's thread"
            todo = "let it touch nothing but its arguments, or exclude the module"
            self._add(Remark(module=name, what=what, where=where, todo=todo))


def _is_compiled(part: nn.Module) -> bool:
    return getattr(part, "_compiled_call_impl", None) is not None or type(part).__name__ == "OptimizedModule"


def _place_of(function: Any) -> str:
    """Returns file, line and name of a function's definition, looking into partials and bound methods."""
    inner = getattr(function, "func", function)
    inner = getattr(inner, "__func__", inner)
    code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    if code is None:
        return f"{type(inner).__module__}.{type(inner).__qualname__}"
    return f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"
