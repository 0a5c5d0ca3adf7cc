"""The graph of a model's modules, and the parts that a plan places."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from typing import Annotated

from mosaic.artifact import Ge, StrictFile, fingerprint
from mosaic.errors import InvalidPlanError, unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Part(StrictFile):
    """A module, or layers ``first`` to ``end`` of its ``total``; as a string ``name`` or ``name[4:8/12]``."""

    module: str
    first: Annotated[int, Ge(0)] = 0
    count: Annotated[int, Ge(1)] = 1
    total: Annotated[int, Ge(1)] = 1

    def __post_init__(self) -> None:
        if self.first < 0 or self.count < 1 or self.end > self.total:
            raise InvalidPlanError(f"layers {self.first} to {self.end} of {self.module!r}; it has {self.total}")

    @property
    def end(self) -> int:
        return self.first + self.count

    @property
    def share(self) -> float:
        return self.count / self.total

    def __str__(self) -> str:
        return self.module if self.total == 1 else f"{self.module}[{self.first}:{self.end}/{self.total}]"

    @classmethod
    def parse(cls, text: str) -> Part:
        """Parses the result of ``str``."""
        match = re.fullmatch(r"(.+)\[(\d+):(\d+)/(\d+)\]", text)
        if match is None:
            return cls(module=text)
        first, end, total = map(int, match.groups()[1:])
        return cls(module=match[1], first=first, count=end - first, total=total)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleNode(StrictFile):
    """A module that can be placed."""

    name: str
    """Qualified name in the user's model, as in ``named_modules``."""
    num_parameters: Annotated[int, Ge(0)] = 0
    trainable: bool = True
    """True if any of its parameters is trainable."""
    inputs: tuple[str, ...] = ()
    """Shapes and dtypes of its tensor inputs, such as ``96x1x8x24 float32``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge(StrictFile):
    """A dependency: ``source``'s output reaches an input of ``target``, directly or through glue."""

    source: str
    target: str
    num_bytes: Annotated[int, Ge(0)] | None = field(default=None, compare=False)
    """Bytes per batch in forward, and the same in backward; None if unknown. Not compared."""


@dataclass(frozen=True, kw_only=True)
class ModuleGraph(StrictFile):
    """A directed acyclic graph of modules, in the order in which the model calls them."""

    modules: tuple[ModuleNode, ...]
    edges: tuple[Edge, ...] = ()

    def __post_init__(self) -> None:
        if not self.modules:
            raise ValueError("a module graph needs at least one module")
        if twice := [name for name, count in Counter(self.names).items() if count > 1]:
            raise ValueError(f"repeated modules: {', '.join(twice)}; use each name once")
        for edge in self.edges:
            for end in sorted({edge.source, edge.target}.difference(self.names)):
                raise ValueError(f"edge {edge.source} -> {edge.target}: {unknown('module', end, self.names)}")
        _ = self.levels  # which refuses a cycle

    def __str__(self) -> str:
        return f"graph {self.fingerprint} of {', '.join(self.names)} and their input shapes"

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(module.name for module in self.modules)

    @cached_property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that identify this graph with its sizes and input shapes."""
        edges = [{"source": edge.source, "target": edge.target} for edge in self.edges]
        return fingerprint({"modules": self.modules, "edges": edges})

    def predecessors(self, name: str) -> tuple[str, ...]:
        return tuple(edge.source for edge in self.edges if edge.target == name)

    @cached_property
    def ancestors(self) -> dict[str, frozenset[str]]:
        """All direct and indirect predecessors of each module."""
        ancestors: dict[str, frozenset[str]] = {}
        for name in self.topological_order():
            sources = self.predecessors(name)
            ancestors[name] = frozenset(sources).union(*map(ancestors.__getitem__, sources))
        return ancestors

    def independent(self, first: str, second: str) -> bool:
        """Returns True if neither module depends on the other."""
        return first != second and first not in self.ancestors[second] and second not in self.ancestors[first]

    @cached_property
    def levels(self) -> tuple[tuple[str, ...], ...]:
        """The names by the length of their longest incoming path, in call order within a level."""
        sorter, levels = TopologicalSorter({name: self.predecessors(name) for name in self.names}), []
        try:
            sorter.prepare()
        except CycleError as error:
            raise ValueError(f"modules depend on their own output in a cycle: {' -> '.join(error.args[1])}") from None
        while ready := sorter.get_ready():
            levels.append(tuple(sorted(ready, key=self.names.index)))
            sorter.done(*ready)
        return tuple(levels)

    def topological_order(self) -> tuple[str, ...]:
        """The names in topological order: level after level."""
        return tuple(chain(*self.levels))
