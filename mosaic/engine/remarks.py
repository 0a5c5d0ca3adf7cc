"""What a run of a model shows that its user should know: each with a line of the user's code and what to do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mosaic.engine.calls.caller import caller
from mosaic.engine.calls.structure import memory_of
from mosaic.engine.host.lane_tensor import operator_name, writes

_READS = {"item", "tolist", "numpy", "is_nonzero", "nonzero", "__bool__", "__int__", "__float__", "__index__"}
_HOOKS = {
    "_forward_pre_hooks": "a forward pre-hook",
    "_forward_hooks": "a forward hook",
    "_backward_hooks": "a backward hook",
    "_backward_pre_hooks": "a backward pre-hook",
}


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
        self.obstacles: dict[str, str] = {}
        self._candidates = candidates
        self._found: dict[tuple[str, str], Remark] = {}
        self._given: dict[int, tuple[str, torch.Tensor]] = {}  # by memory; kept so that none is given out twice
        self._buffers = {id(b): (name, path) for name, m in candidates.items() for path, b in m.named_buffers()}
        for name, module in candidates.items():
            self._note_structure(name, module)

    @property
    def found(self) -> tuple[Remark, ...]:
        """All remarks, in order of appearance."""
        return tuple(self._found.values())

    def enter(self, name: str, given: Sequence[torch.Tensor]) -> None:
        """A candidate begins to run on ``given``."""
        compiled = next((path for path, part in self._candidates[name].named_modules() if _is_compiled(part)), None)
        if compiled is not None:
            self._note(
                name,
                f"{compiled or 'it'} is compiled; it compiles on its lane",
                "torch.compile belongs there: on what is placed, as model.branch.compile(), not on the model",
            )
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
            name = operator_name(func)
            for tensor, version in versions:
                if tensor._version != version:
                    self._note_buffer(running, *self._buffers[id(tensor)])
            if writes(name, kwargs) and not sources:  # writes of what comes from a lane are ordered behind all lanes
                target = kwargs.get("out") if kwargs.get("out") is not None else next(iter(args), None)
                if isinstance(target, torch.Tensor):
                    self._note_write(running, name, target)

        return ran

    def note_read(self, func: Any, sources: frozenset[str], running: str | None) -> None:
        """A value that stems from modules ``sources`` was looked at."""
        name = operator_name(func)
        if name not in _READS:
            return
        if running is not None:
            self._note(
                running,
                f"its own course depends on values ({name})",
                "that is fine as long as shapes, dtypes and random numbers do not depend on them; else exclude it",
            )
            return
        for source in sources:
            self._note(
                source,
                f"the code between modules looks at a value of its result ({name}), and waits for its lane there",
                "move that behind the last module's call, or stay on tensors (torch.where)",
            )

    def _note(self, module: str, what: str, todo: str, where: str | None = None) -> None:
        self._found.setdefault((module, what), Remark(module=module, what=what, where=where or caller(), todo=todo))

    def _note_write(self, running: str | None, name: str, target: torch.Tensor) -> None:
        given = self._given.get(memory_of(target))
        if given is None or given[0] == running:
            return
        self.obstacles[given[0]] = (
            f"its input is written to in place ({name}, {caller()}) after it was called; write to a copy"
        )

    def _note_buffer(self, running: str | None, owner: str, path: str) -> None:
        if running == owner:
            self._note(
                owner,
                f"its forward updates buffers, such as {path}",
                "they are as in the plain loop; read them between modules only after the model's call",
            )
        else:
            self._note(
                owner, f"its buffer {path} is updated outside of it", "update it before the model's call, or exclude it"
            )

    def _note_structure(self, name: str, module: nn.Module) -> None:
        for path, part in module.named_modules():
            for attribute, text in _HOOKS.items():
                for hook in getattr(part, attribute).values():
                    self._note(
                        name,
                        f"{path or 'it'} has {text}, which will run on the lane's thread",
                        "let it touch nothing but its arguments, or exclude the module",
                        _place_of(hook),
                    )


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
