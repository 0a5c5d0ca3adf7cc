"""Choosing the modules that a person would place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Protocol

from torch import nn

SUBSTANCE = 0.02
"""Share of the whole from which a module is worth placing."""
_SMALL = 0.001
_OF_PARTNER = 0.1
_OF_WHOLE = 0.1
_WRAPPER = 0.9


class Watched(Protocol):
    """What one run showed of a model's modules."""

    called: dict[str, list[str]]

    def work(self, name: str) -> float:
        """Returns the share of a module in the work of all."""

    def reaches(self, first: str, second: str) -> bool:
        """Whether a value goes from one module into another."""


class Choice:
    """Chooses among the modules of a model.

    Boundaries are the model's own: its named children, and theirs. Lists and dicts of modules, which nobody calls, are
    looked through. From the model downwards,

    * a wrapper is opened: a module in which several are worth placing, and beside which there are no more than heads;
    * another module is opened where more runs at the same time thereby: two of its parts, each with a tenth of its
      work, are independent of each other and need nothing in common from within; or one is independent of a module that
      the whole waits for. (Two are independent if no value goes from one into the other.)
    * all else stays whole; above all a stack, modules of one class in one list, which run one after the other: cutting
      it gains nothing.

    Worth placing is what has 2 % of the work or of the parameters; or, however large the rest is (0.1 % suffices), what
    waits for none as large and has a tenth of the work of the largest module that is independent of it. So two small
    encoders are placed beside each other before a large language model, and a projection beside a tower is not.

    Args:
        model: The model.
        watched: One run of it.
    """

    def __init__(self, model: nn.Module, watched: Watched) -> None:
        self._model = model
        self._watched = watched
        self._total = max(1, _size(model))
        self._works = watched.work("") > 0

    def of_model(self) -> list[str]:
        """Returns the names of the modules to place."""
        found = self._cut(self._parts("", self._model))
        return [node.name for node in found if self._is_worth(node, found)]

    def in_stead_of(self, path: str, module: nn.Module, *, layers: bool) -> list[str]:
        """Returns the names of what does at least half of the work of a module that cannot be placed itself.

        Args:
            path: Its name.
            module: It.
            layers: Whether the layers of a stack may stand for it.
        """
        whole = sum(node.work for node in self._parts(path, module))
        stacks = self._stacks(self._cut(self._parts(path, module)))
        wanted = [s for s in stacks if s[0].is_compound and (layers or len(s) == 1) and _work(s) >= whole / 2 > 0]
        return [node.name for stack in wanted for node in stack]

    def _cut(self, level: Sequence[_Node]) -> list[_Node]:
        """Returns what stands for a module's parts once those are opened that should be."""
        layers = {node for stack in self._stacks(level) if len(stack) > 1 for node in stack}
        cut: list[_Node] = []
        for node in level:
            inner = self._cut(self._parts(node.name, node.module)) if node.is_compound and node not in layers else []
            others = [other for other in level if other is not node and other.is_compound]
            opened = self._gains(node, inner, others) or self._is_wrapper(node, inner, others)
            cut.extend(inner if opened else [node])
        return cut

    def _gains(self, node: _Node, inner: Sequence[_Node], others: Sequence[_Node]) -> bool:
        """Whether more runs at the same time if a module is replaced by what is in it."""
        enough = max(SUBSTANCE, _OF_WHOLE * node.work)
        inside = self._stacks(inner)
        heavy = [stack for stack in inside if stack[0].is_compound and _work(stack) >= enough]
        before = [[other] for other in others if other.work >= enough and self._reaches([other], [node])]
        return any(
            not self._reaches(a, b)
            and not self._reaches(b, a)
            and not any(self._reaches(c, a) and self._reaches(c, b) for c in inside if c is not a and c is not b)
            for a, b in (*combinations(heavy, 2), *product(heavy, before))
        )

    def _is_wrapper(self, node: _Node, inner: Sequence[_Node], others: Sequence[_Node]) -> bool:
        """Whether a module holds several that are worth placing, and nothing but heads is beside it."""
        single = [stack[0] for stack in self._stacks(inner) if len(stack) == 1]
        rivals = [other for other in others if other.work >= SUBSTANCE]
        heads = node.work >= _WRAPPER and all(self._reaches([node], [rival]) for rival in rivals)
        worth = [part for part in single if part.is_compound and part.work > 0 and self._is_worth(part, inner)]
        return len(worth) > 1 and (not rivals or heads)

    def _stacks(self, level: Sequence[_Node]) -> list[list[_Node]]:
        """Puts the layers of each stack together; others are by themselves."""
        found: list[list[_Node]] = []
        for node in level:
            for stack in found:
                if node.listed is not None and node.listed == stack[0].listed and self._reaches(stack, [node]):
                    stack.append(node)
                    break
            else:
                found.append([node])
        return found

    def _reaches(self, first: Sequence[_Node], second: Sequence[_Node]) -> bool:
        return any(self._watched.reaches(a.name, b.name) for a in first for b in second)

    def _is_worth(self, node: _Node, cut: Sequence[_Node]) -> bool:
        if node.weight >= SUBSTANCE:
            return True
        others = [other for other in cut if other is not node and other.is_compound]
        before = [other for other in others if other.work >= node.work and self._reaches([other], [node])]
        if not node.is_compound or node.weight < _SMALL or before:
            return False
        beside = [other.work for other in others if not self._reaches([node], [other])]
        return node.work >= _OF_PARTNER * max(beside, default=1.0) > 0

    def _parts(self, path: str, module: nn.Module) -> list[_Node]:
        """Returns the called modules with parameters right below one, looking through containers."""
        return list(self._called_below(path, module))

    def _called_below(self, path: str, module: nn.Module) -> Iterator[_Node]:
        for name, child in module.named_children():
            inside = f"{path}.{name}" if path else name
            if not (size := _size(child)):
                continue
            if not self._watched.called.get(inside):
                yield from self._called_below(inside, child)
                continue
            share = size / self._total
            work = self._watched.work(inside) if self._works else share
            is_compound = any(_size(part) for part in child.children())
            yield _Node(inside, child, work=work, weight=max(work, share), is_compound=is_compound)


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
    """Whether it has children with parameters; a single layer gains nothing from company."""

    @property
    def listed(self) -> tuple[str, type] | None:
        """The list that it stands in, and its class; None if it stands in no list."""
        where, _, own = self.name.rpartition(".")
        return (where, type(self.module)) if own.isdigit() else None


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _work(stack: Sequence[_Node]) -> float:
    return sum(node.work for node in stack)
