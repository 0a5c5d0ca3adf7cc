"""Simulation of a subgraph: times of operators and lifetimes of tensors.

Each node starts when its waits have ended and its devices are free, in the order of the subgraph. With reuse a subgraph
is simulated once, from time 0, and each use shifts the result; without, every use is simulated in place. Both give
exactly the same times, because a subgraph holds its devices while it runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mosaic.pipelining.semu.graph import OperatorNode, Subgraph, SubgraphUse, devices_of, touched
from mosaic.pipelining.semu.timeline import Lifetime, MemoryTimeline, changes_of, timeline_of


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpan:
    """Start and end of a node."""

    name: str
    """In its subgraph."""
    start_ns: int
    """From the start of the subgraph."""
    end_ns: int
    """From the start of the subgraph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A subgraph's times, from its start."""

    length_ns: int
    """End of its last node."""
    spans: tuple[NodeSpan, ...]
    """Times of its nodes, in order."""
    written_ns: Mapping[str, int]
    """Start of the writer of each written tensor."""
    read_ns: Mapping[str, int]
    """End of the last reader of each tensor, or of its writer if it is never read, without unread inputs."""
    lifetimes: tuple[Lifetime, ...]
    """Lifetimes of internal tensors, including those of inner subgraphs."""

    def timelines(self, subgraph: Subgraph, kept: frozenset[str] = frozenset()) -> dict[str, MemoryTimeline]:
        """Returns the memory in use by role, including inputs and outputs.

        An input lives from the start to its last reader, an output from its writer to the end; inputs in ``kept`` live
        to the end.
        """
        lifetimes = list(self.lifetimes)
        for tensor in subgraph.tensors:
            is_input = tensor.name in subgraph.inputs
            if is_input or tensor.name in subgraph.outputs:
                stays = tensor.name in subgraph.outputs or tensor.name in kept
                lifetimes.append(
                    Lifetime(
                        device=tensor.device,
                        num_bytes=tensor.num_bytes,
                        start_ns=0 if is_input else self.written_ns[tensor.name],
                        end_ns=self.length_ns if stays else self.read_ns.get(tensor.name, self.length_ns),
                    )
                )
        return {device: timeline_of(changes) for device, changes in changes_of(lifetimes).items()}


class Simulator:
    """Simulates subgraphs, and caches the results."""

    def __init__(self, *, with_reuse: bool = True) -> None:
        """Begins; ``with_reuse=False`` is for comparison only."""
        self._with_reuse = with_reuse
        self._known: dict[Subgraph, Simulated] = {}

    def run(self, subgraph: Subgraph) -> Simulated:
        """Returns the times of a subgraph."""
        if not self._with_reuse:
            return _Run(self, 0).of(subgraph)
        known = self._known.get(subgraph)
        if known is None:
            known = self._known[subgraph] = _Run(self, 0).of(subgraph)
        return known

    def at(self, subgraph: Subgraph, start_ns: int) -> Simulated:
        """Returns the times of a subgraph that starts at ``start_ns``, shifted or simulated there."""
        return self.run(subgraph) if self._with_reuse else _Run(self, start_ns).of(subgraph)


class _Run:
    """One simulation of one subgraph that starts at ``origin_ns``."""

    def __init__(self, simulator: Simulator, origin_ns: int) -> None:
        self._simulator = simulator
        self._origin_ns = origin_ns
        self._free_ns: dict[str, int] = {}
        self._end_ns: dict[str, int] = {}
        self._written: dict[str, tuple[int, int]] = {}
        self._read_ns: dict[str, int] = {}
        self._lifetimes: list[Lifetime] = []

    def of(self, subgraph: Subgraph) -> Simulated:
        spans = []
        for node in subgraph.nodes:
            start = self._start_of(node)
            end = self._operator(node, start) if isinstance(node, OperatorNode) else self._use(node, start)
            for device in devices_of(node):
                self._free_ns[device] = end
            self._end_ns[node.name] = end
            spans.append(NodeSpan(name=node.name, start_ns=start - self._origin_ns, end_ns=end - self._origin_ns))
        return self._result(subgraph, tuple(spans))

    def _start_of(self, node: OperatorNode | SubgraphUse) -> int:
        reads, _ = touched(node)
        bounds = [self._end_ns[name] for name in node.after]
        bounds += [self._written[name][1] for name in reads if name in self._written]
        bounds += [self._free_ns.get(device, self._origin_ns) for device in devices_of(node)]
        return max(bounds, default=self._origin_ns)

    def _operator(self, node: OperatorNode, start: int) -> int:
        end = start + node.time_ns
        for name in node.reads:
            self._read_ns[name] = max(end, self._read_ns.get(name, end))
        for name in node.writes:
            self._written[name] = (start, end)
            self._read_ns.setdefault(name, end)
        return end

    def _use(self, node: SubgraphUse, start: int) -> int:
        """Runs a subgraph: tensors keep their inner times, but waits are for its end."""
        inner = self._simulator.at(node.subgraph, start)
        end = start + inner.length_ns
        for name, outers in node.tensors:
            for outer in outers:
                if name in inner.written_ns:
                    self._written[outer] = (start + inner.written_ns[name], end)
                    self._read_ns.setdefault(outer, end)
                elif name in inner.read_ns:
                    read = start + inner.read_ns[name]
                    self._read_ns[outer] = max(read, self._read_ns.get(outer, read))
        for copy in node.devices:
            roles = dict(copy)
            for lifetime in inner.lifetimes:
                self._lifetimes.append(
                    Lifetime(
                        device=roles.get(lifetime.device, lifetime.device),
                        num_bytes=lifetime.num_bytes,
                        start_ns=lifetime.start_ns + start,
                        end_ns=lifetime.end_ns + start,
                    )
                )
        return end

    def _result(self, subgraph: Subgraph, spans: tuple[NodeSpan, ...]) -> Simulated:
        origin = self._origin_ns
        outside = subgraph.inputs | subgraph.outputs
        for tensor in subgraph.tensors:
            if tensor.name in self._written and tensor.name not in outside:
                self._lifetimes.append(
                    Lifetime(
                        device=tensor.device,
                        num_bytes=tensor.num_bytes,
                        start_ns=self._written[tensor.name][0],
                        end_ns=self._read_ns[tensor.name],
                    )
                )
        return Simulated(
            length_ns=max(span.end_ns for span in spans),
            spans=spans,
            written_ns={name: at[0] - origin for name, at in self._written.items()},
            read_ns={name: at - origin for name, at in self._read_ns.items()},
            lifetimes=tuple(
                Lifetime(
                    device=lifetime.device,
                    num_bytes=lifetime.num_bytes,
                    start_ns=lifetime.start_ns - origin,
                    end_ns=lifetime.end_ns - origin,
                )
                for lifetime in self._lifetimes
            ),
        )
