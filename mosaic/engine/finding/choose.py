"""Choosing the modules that a person would place, by one run that all of them are followed in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import nn
from torch.nested._internal.nested_tensor import NestedTensor

from mosaic.cost.counting.operators import count_flops, kind_of
from mosaic.cost.counts import OperatorKind
from mosaic.engine.calls.obstacles import Obstacle
from mosaic.engine.calls.thread_state import TRANSFORMED, is_transformed
from mosaic.find.trace import Operation, Tracer, caller

_SUBSTANCE, _TENTH, _WRAPPER = 0.02, 0.1, 0.9
_CALL_ONCE = "call it once on a concatenated batch, or leave it where it is"
_TRANSFORMED = Obstacle(TRANSFORMED, todo="call it on the whole batch, or leave it where it is")
_ALL = "all modules"  # which is no name
_HEAVY = (OperatorKind.MATMUL, OperatorKind.CONV, OperatorKind.ATTENTION)


class Course(Tracer[int]):
    """Follows one run; labels are the modules that computed a tensor, a bit each, with all modules around them.

    Work is the forward operations of matrix products, convolutions and attention. Others are left out: they are bound
    by memory, and a module of nothing else is glue. The work of a part counts for all that it is part of.

    Attributes:
        called: For each module the lines that call it.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(0)
        self.called: dict[str, list[str]] = {name: [] for name, _ in model.named_modules()}
        self._bits = {name: 1 << index for index, name in enumerate(self.called)}
        self._around = [0]  # with each running module, its bit and those of all around it
        self._reading = [0]
        self._read = dict.fromkeys(self.called, 0)
        self._transformed: set[str] = set()
        self._flops: Counter[str] = Counter()

    @property
    def obstacles(self) -> dict[str, Obstacle]:
        obstacles = {}
        for name, places in self.called.items():
            where = f" ({', '.join(dict.fromkeys(places))})" if places else ""
            often = f"called {len(places)} times in a step{where}; a placed module is called once, on all its inputs"
            if len(places) != 1:
                obstacles[name] = Obstacle(often, todo=_CALL_ONCE)
        return obstacles | dict.fromkeys(self._transformed, _TRANSFORMED)

    def work(self, name: str, otherwise: float) -> float:
        """Returns the share of a module in the operations of all, or ``otherwise`` where none were counted."""
        return self._flops[name] / self._flops[_ALL] if self._flops[_ALL] else otherwise

    def reaches(self, first: str, second: str) -> bool:
        """Returns True if a value that ``first`` computed goes into ``second``, through whatever is between them."""
        return bool(self._bits[first] & self._read[second])

    def end(self, operation: Operation, labels: int) -> int:
        """Counts an operator for every running module; what it makes stems from its inputs and from these."""
        self._reading[-1] |= labels
        is_plain = isinstance(operation.operator, torch._ops.OpOverload)
        is_ragged = any(isinstance(tensor, NestedTensor) for tensor in operation.inputs)  # whose sizes are no numbers
        if self.running and is_plain and not is_ragged and kind_of(operation.operator) in _HEAVY:
            result = operation.results[0] if len(operation.results) == 1 else operation.results
            flops = count_flops(operation.operator, operation.args, operation.kwargs, result)
            self._flops.update(dict.fromkeys((_ALL, *self.running), flops))
        return labels | self._around[-1]

    def enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.called[name].append(caller())
        self._around.append(self._around[-1] | self._bits[name])
        self._reading.append(0)
        if is_transformed():
            self._transformed.add(name)

    def leave(self, name: str, result: Any) -> None:
        self._around.pop()
        labels = self._reading.pop()
        self._read[name] |= labels
        self._reading[-1] |= labels


class Choice:
    """Chooses among the modules of a model.

    Boundaries are the model's own: its named children, and theirs. Lists and dicts of modules, which nobody calls, are
    looked through. Worth placing is a module with 2 % of the work or of the parameters. From the model downwards, a
    module is opened

    * that is a wrapper: it has 90 % of the work and several parts worth placing, which are no layers of one list;
    * in which two parts, each with a tenth of its work, are independent of each other and need nothing in common from
      within. (Two are independent if no value goes from one into the other.)

    All else stays whole; above all a stack of layers, because cutting it gains nothing.
    """

    def __init__(self, model: nn.Module, course: Course) -> None:
        self._model = model
        self._course = course
        self._total = max(1, _size(model))

    def of_model(self) -> list[str]:
        return [part.name for part in self._cut("", self._model) if part.weight >= _SUBSTANCE]

    def in_stead_of(self, path: str, module: nn.Module) -> list[str]:
        """Returns the part with most of the work of a module that cannot be placed itself."""
        cut = self._cut(path, module)
        half = sum(part.work for part in cut) / 2
        return [part.name for part in cut if part.is_compound and part.work > half]

    def _cut(self, path: str, module: nn.Module) -> list[_Part]:
        """Returns the parts of a module, the opened ones replaced by theirs."""
        cut: list[_Part] = []
        for part in self._parts(path, module):
            inner = self._cut(part.name, part.module) if part.is_compound else []
            cut += inner if self._opens(part, inner) else [part]
        return cut

    def _opens(self, part: _Part, inner: Sequence[_Part]) -> bool:
        compound = [each for each in inner if each.is_compound]
        apart = [a for a in compound if not any(a.is_listed_with(b) for b in compound if b is not a)]
        if part.work >= _WRAPPER and sum(each.weight >= _SUBSTANCE for each in apart) > 1:
            return True
        heavy = [each for each in compound if each.work >= max(_SUBSTANCE, _TENTH * part.work)]
        return any(self._are_independent(a, b, inner) for a, b in combinations(heavy, 2))

    def _are_independent(self, a: _Part, b: _Part, inner: Sequence[_Part]) -> bool:
        """Returns True if neither feeds the other, and no other part feeds both."""
        reaches = self._course.reaches
        others = [part.name for part in inner if part is not a and part is not b]
        is_between = reaches(a.name, b.name) or reaches(b.name, a.name)
        return not is_between and not any(reaches(other, a.name) and reaches(other, b.name) for other in others)

    def _parts(self, path: str, module: nn.Module) -> list[_Part]:
        """Returns the called modules with parameters right below a module, or below containers in it."""
        parts: list[_Part] = []
        for name, child in module.named_children():
            inside = f"{path}.{name}" if path else name
            if not (size := _size(child)):
                continue
            if not self._course.called.get(inside):
                parts += self._parts(inside, child)
                continue
            share = size / self._total
            work = self._course.work(inside, share)
            is_compound = any(map(_size, child.children()))
            parts.append(_Part(inside, child, work=work, weight=max(work, share), is_compound=is_compound))
        return parts


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """A module that may be placed."""

    name: str
    module: nn.Module
    work: float  # its share of the work
    weight: float  # that, or its share of the parameters if it is larger
    is_compound: bool  # it has children with parameters; a single layer gains nothing from company

    def is_listed_with(self, other: _Part) -> bool:
        """Returns True if both stand in one list and are of one class."""
        where, _, own = self.name.rpartition(".")
        return own.isdigit() and where == other.name.rpartition(".")[0] and type(self.module) is type(other.module)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
