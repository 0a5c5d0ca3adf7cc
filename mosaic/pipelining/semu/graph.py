"""Operators and tensors on devices, grouped into reusable subgraphs (PipeWeaver, section 4).

Devices in a subgraph are roles, such as ``compute`` and ``tensor link``; each use maps roles to devices. A subgraph
starts when all its waits have ended and all of its devices are free, and holds them until it ends. So its times do not
depend on its context, and are simulated once and shifted as a whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNode:
    """A buffer: it lives from the start of its writer to the end of its last reader."""

    name: str
    """In its subgraph."""
    num_bytes: int
    """Its size."""
    device: str = "compute"
    """Role of the device whose memory it is in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorNode:
    """A kernel or a transfer. It waits for the writers of its inputs."""

    name: str
    """In its subgraph."""
    device: str = "compute"
    """Role of the device that runs it."""
    time_ns: int
    reads: tuple[str, ...] = ()
    """Tensors."""
    writes: tuple[str, ...] = ()
    """Tensors."""
    after: tuple[str, ...] = ()
    """Further nodes that it waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubgraphUse:
    """A subgraph within another one, on some of its devices."""

    name: str
    """In the outer subgraph."""
    subgraph: Subgraph
    devices: tuple[tuple[tuple[str, str], ...], ...]
    """Pairs of inner and outer roles, for each copy. Copies run at the same time, like tensor-parallel peers: one
    simulation covers all of them, and each holds its devices."""
    tensors: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Outer tensor of each copy, by inner input or output."""
    after: tuple[str, ...] = ()
    """Further nodes that it waits for."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Subgraph:
    """Nodes in topological order, in which nodes of one device run.

    Subgraphs compare by identity.

    Raises:
        ValueError: A name is missing or repeated, a size or time is negative or not whole, a tensor is written twice or
            read before it is written, or a node waits for a later one.
    """

    name: str
    """For messages."""
    nodes: tuple[OperatorNode | SubgraphUse, ...]
    tensors: tuple[TensorNode, ...] = ()
    inputs: frozenset[str] = frozenset()
    """Tensors that exist before it starts."""
    outputs: frozenset[str] = frozenset()
    """Tensors that exist after it has ended."""

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ValueError(f"{self.name}: a subgraph has at least one node; this one has none")
        for named in (self.nodes, self.tensors):
            twice = [name for name, count in Counter(each.name for each in named).items() if count > 1]
            if twice:
                raise ValueError(f"{self.name}: {twice[0]!r} is there twice; give each a name of its own")
        for tensor in self.tensors:
            _check_whole(f"{self.name}: num_bytes of {tensor.name!r}", tensor.num_bytes)
        known = {tensor.name for tensor in self.tensors}
        if unknown := sorted((self.inputs | self.outputs) - known):
            raise ValueError(f"{self.name}: input or output {unknown[0]!r} is none of its tensors")
        written, before = set(self.inputs), set[str]()
        for node in self.nodes:
            if isinstance(node, OperatorNode):
                _check_whole(f"{self.name}: time_ns of {node.name!r}", node.time_ns)
            else:
                self._check_use(node)
            self._check_order(node, known, written, before)
            before.add(node.name)

    def _check_use(self, node: SubgraphUse) -> None:
        ends = node.subgraph.inputs | node.subgraph.outputs
        for name, outers in node.tensors:
            if name not in ends or len(outers) != len(node.devices):
                raise ValueError(
                    f"{self.name}: {node.name!r} binds {name!r} to {len(outers)} tensors; bind inputs and outputs of "
                    f"{node.subgraph.name!r}, {', '.join(sorted(ends))}, one for each of {len(node.devices)} copies"
                )

    def _check_order(
        self, node: OperatorNode | SubgraphUse, known: set[str], written: set[str], before: set[str]
    ) -> None:
        reads, writes = touched(node)
        for name in (*reads, *writes):
            if name not in known:
                raise ValueError(f"{self.name}: {node.name!r} uses {name!r}, which is none of its tensors")
        for name in reads:
            if name not in written:
                raise ValueError(f"{self.name}: {node.name!r} reads {name!r} before it is written; write it first")
        for name in writes:
            if name in written:
                raise ValueError(f"{self.name}: {node.name!r} writes {name!r} again; name each result anew")
            written.add(name)
        for name in node.after:
            if name not in before:
                raise ValueError(f"{self.name}: {node.name!r} waits for {name!r}, which is not before it")

    @property
    def roles(self) -> tuple[str, ...]:
        """Its devices, in the order of first use."""
        return tuple(dict.fromkeys(role for node in self.nodes for role in devices_of(node)))


def devices_of(node: OperatorNode | SubgraphUse) -> tuple[str, ...]:
    """Returns the devices that a node holds while it runs."""
    if isinstance(node, OperatorNode):
        return (node.device,)
    held = node.subgraph.roles
    return tuple(dict.fromkeys(dict(copy).get(role, role) for copy in node.devices for role in held))


def touched(node: OperatorNode | SubgraphUse) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the tensors that a node reads, and those that it writes."""
    if isinstance(node, OperatorNode):
        return node.reads, node.writes
    inner = node.subgraph
    reads = tuple(outer for name, outers in node.tensors if name in inner.inputs for outer in outers)
    return reads, tuple(outer for name, outers in node.tensors if name not in inner.inputs for outer in outers)


def operators(subgraph: Subgraph) -> Iterable[OperatorNode]:
    """Yields all operators, those of inner subgraphs once for each use, copies once."""
    for node in subgraph.nodes:
        if isinstance(node, OperatorNode):
            yield node
        else:
            yield from operators(node.subgraph)


def _check_whole(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} is {value!r}; use a whole number, 0 or more")
