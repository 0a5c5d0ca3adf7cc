"""Choosing the modules that a person would place, by one run that all of them are followed in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import combinations
from typing import Any

import torch
from torch import nn
from torch.nested._internal.nested_tensor import NestedTensor

from mosaic.cost.counting.operators import count_flops, kind_of
from mosaic.cost.counts import OperatorKind
from mosaic.engine.calls.obstacles import Obstacle
from mosaic.engine.calls.thread_state import TRANSFORMED, is_transformed
from mosaic.errors import UnsupportedModelError
from mosaic.find.trace import Operation, Tracer, caller

SUBSTANCE = 0.02
"""Share of the whole from which a module is worth placing."""
_SMALL = 0.001
_TENTH = 0.1
_WRAPPER = 0.9

_SCRIPTED = Obstacle(
    "is scripted by torch.jit, which shows neither its calls nor its parts",
    todo="colocate the module that it was made from, or leave it where it is",
)
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
        often = {name: _called_often(places) for name, places in self.called.items() if len(places) != 1}
        return often | dict.fromkeys(self._transformed, _TRANSFORMED)

    def work(self, name: str) -> float:
        """Returns the share of a module in the operations of all; 0 where none were counted."""
        return self._flops[name] / max(1, self._flops[_ALL])

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


def _called_often(places: Sequence[str]) -> Obstacle:
    where = f" ({', '.join(dict.fromkeys(places))})" if places else ""
    return Obstacle(
        f"called {len(places)} times in a step{where}; a placed module is called once, on all its inputs",
        todo="call it once on a concatenated batch, or leave it where it is",
    )


class Choice:
    """Chooses among the modules of a model.

    Boundaries are the model's own: its named children, and theirs. Lists and dicts of modules, which nobody calls, are
    looked through. From the model downwards, a module is opened

    * that is a wrapper: it has 90 % of the work and several parts worth placing, and no more than heads are beside it;
    * in which two parts, each with a tenth of its work, are independent of each other and need nothing in common from
      within. (Two are independent if no value goes from one into the other.)

    All else stays whole; above all a stack, modules of one class in one list, which run one after the other: cutting it
    gains nothing.

    Worth placing is what has 2 % of the work or of the parameters; or, however large the rest is (0.1 % suffices), what
    waits for none as large and has a tenth of the work of the largest module that is independent of it. So two small
    encoders are placed beside each other before a large language model, and a projection beside a tower is not.
    """

    def __init__(self, model: nn.Module, course: Course) -> None:
        self._model = model
        self._course = course
        self._total = max(1, _size(model))
        self._works = course.work("") > 0

    def of_model(self) -> list[str]:
        cut = self._cut(self._parts("", self._model))
        return [node.name for node in cut if self._is_worth(node, cut)]

    def in_stead_of(self, path: str, module: nn.Module) -> list[str]:
        """Returns the part with at least half of the work of a module that cannot be placed itself."""
        whole = sum(node.work for node in self._parts(path, module))
        stacks = self._stacks(self._cut(self._parts(path, module)))
        return [s[0].name for s in stacks if s[0].is_compound and len(s) == 1 and s[0].work >= whole / 2 > 0]

    def _cut(self, level: Sequence[_Node]) -> list[_Node]:
        """Returns the parts of a module, with its wrappers opened."""
        layers = {node for stack in self._stacks(level) if len(stack) > 1 for node in stack}
        cut: list[_Node] = []
        for node in level:
            inner = self._cut(self._parts(node.name, node.module)) if node.is_compound and node not in layers else []
            cut.extend(inner if self._opens(node, inner, level) else [node])
        return cut

    def _opens(self, node: _Node, inner: Sequence[_Node], level: Sequence[_Node]) -> bool:
        stacks = self._stacks(inner)
        single = [stack[0] for stack in stacks if len(stack) == 1 and stack[0].is_compound and stack[0].work > 0]
        rivals = [each for each in level if each is not node and each.is_compound and each.work >= SUBSTANCE]
        heads = all(self._reaches([node], [each]) for each in rivals)
        if node.work >= _WRAPPER and heads and sum(self._is_worth(part, inner) for part in single) > 1:
            return True
        heavy = [s for s in stacks if s[0].is_compound and _work(s) >= max(SUBSTANCE, _TENTH * node.work)]
        return any(
            not self._reaches(a, b)
            and not self._reaches(b, a)
            and not any(self._reaches(c, a) and self._reaches(c, b) for c in stacks if c is not a and c is not b)
            for a, b in combinations(heavy, 2)
        )

    def _stacks(self, level: Sequence[_Node]) -> list[list[_Node]]:
        """Groups the layers of each stack; every other module is a group of its own."""
        stacks: list[list[_Node]] = []
        for node in level:
            for stack in stacks:
                if node.is_listed_with(stack[0]) and self._reaches(stack, [node]):
                    stack.append(node)
                    break
            else:
                stacks.append([node])
        return stacks

    def _reaches(self, first: Sequence[_Node], second: Sequence[_Node]) -> bool:
        return any(self._course.reaches(a.name, b.name) for a in first for b in second)

    def _is_worth(self, node: _Node, cut: Sequence[_Node]) -> bool:
        if node.weight >= SUBSTANCE:
            return True
        others = [other for other in cut if other is not node and other.is_compound]
        before = [other for other in others if other.work >= node.work and self._reaches([other], [node])]
        if not node.is_compound or node.weight < _SMALL or before:
            return False
        beside = [other.work for other in others if not self._reaches([node], [other])]
        return node.work >= _TENTH * max(beside, default=1.0) > 0

    def _parts(self, path: str, module: nn.Module) -> list[_Node]:
        """Returns the called modules with parameters right below a module, or below containers in it."""
        parts: list[_Node] = []
        for name, child in module.named_children():
            inside = f"{path}.{name}" if path else name
            if not (size := _size(child)):
                continue
            if not self._course.called.get(inside):
                parts += self._parts(inside, child)
                continue
            share = size / self._total
            work = self._course.work(inside) if self._works else share
            is_compound = any(_size(part) for part in child.children())
            parts.append(_Node(inside, child, work=work, weight=max(work, share), is_compound=is_compound))
        return parts


@dataclass(frozen=True, slots=True, eq=False)
class _Node:
    """A module that may be placed."""

    name: str
    module: nn.Module
    work: float
    """Its share of the work."""
    weight: float
    """That, or its share of the parameters if it is larger."""
    is_compound: bool
    """True if it has children with parameters; a single layer gains nothing from company."""

    def is_listed_with(self, other: _Node) -> bool:
        """Returns True if both stand in one list and are of one class."""
        where, _, own = self.name.rpartition(".")
        return own.isdigit() and where == other.name.rpartition(".")[0] and type(self.module) is type(other.module)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _work(stack: Sequence[_Node]) -> float:
    return sum(node.work for node in stack)


class Candidates:
    """Modules of a model that may be placed; an obstacle takes a module away.

    Where the obstacle is one of a part alone (a layer norm that is called from outside, too; a tied table of
    embeddings), another part that does most of the module's work is a candidate in its stead. Without ``include``,
    names or patterns, ``Choice`` chooses.

    Raises:
        UnsupportedModelError: ``include`` names no module.
    """

    def __init__(
        self, model: nn.Module, course: Course, *, exclude: Sequence[str], include: Sequence[str] | None
    ) -> None:
        self.modules: dict[str, nn.Module] = {}  # that may be placed
        self._all = dict(model.named_modules())
        scripted = [name for name, module in self._all.items() if isinstance(module, torch.jit.ScriptModule)]
        self._left_out: dict[str, Obstacle] = dict.fromkeys(scripted, _SCRIPTED)
        self._obstacles = course.obstacles
        self._choice = Choice(model, course) if include is None else None
        self._exclude = exclude
        names = [name for name in self._all if name and matches(name, include or ())]
        if include is not None and not names:
            raise UnsupportedModelError(
                f"no module is named {', '.join(include)}; the model's modules include {', '.join([*self._all][1:9])}"
            )
        self._add(names if self._choice is None else self._choice.of_model())

    def drop(self, obstacles: Mapping[str, Obstacle]) -> None:
        """Takes modules away, and adds parts of theirs in their stead."""
        self._left_out |= obstacles
        self.modules = {name: module for name, module in self.modules.items() if name not in obstacles}
        if self._choice is not None:
            of_parts = [name for name, obstacle in obstacles.items() if obstacle.is_of_a_part]
            parts = [part for name in of_parts for part in self._choice.in_stead_of(name, self._all[name])]
            self._add([part for part in parts if part not in self._left_out])

    def left_out(self) -> dict[str, Obstacle]:
        """Returns the obstacles of modules without a placed part, except those of parts of other such modules."""
        whole = [name for name in self._left_out if not any(placed.startswith(f"{name}.") for placed in self.modules)]
        return {
            name: self._left_out[name] for name in whole if not any(name.startswith(f"{other}.") for other in whole)
        }

    def _add(self, names: Iterable[str]) -> None:
        obstacles: dict[str, Obstacle] = {}
        for name in names:
            obstacle = self._obstacle(name)
            if obstacle is None:
                self.modules[name] = self._all[name]
            else:
                obstacles[name] = obstacle
        if obstacles:
            self.drop(obstacles)

    def _obstacle(self, name: str) -> Obstacle | None:
        whole = next((other for other in self.modules if name.startswith(f"{other}.")), None)
        if matches(name, self._exclude):
            return Obstacle("excluded by the caller")
        if isinstance(self._all[name], torch.jit.ScriptModule):
            return _SCRIPTED
        if whole is not None:
            todo = "to place the parts, name them without the whole: colocate(..., modules=[...])"
            return Obstacle(f"is a part of {whole}, which is placed as a whole", todo=todo)
        return self._obstacles.get(name)


def matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
