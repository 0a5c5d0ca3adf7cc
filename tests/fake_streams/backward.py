"""Backward as torch's engine runs it on a device, on the CPU, where the engine knows of no streams.

The rules are those of ``torch/csrc/autograd/engine.cpp`` and ``input_buffer.cpp`` of torch 2.8 and newer, quoted below:
a node's stream is the one that was current when its forward made its outputs; that of ``AccumulateGrad`` the
one that was current when a graph first needed it, and it lives as long as such a graph does.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from fake_streams.events import FakeEvent, FakeStream
    from fake_streams.runtime import FakeStreams

_AUTOGRAD = (torch._C.DispatchKey.AutogradCPU, torch._C.DispatchKey.AutogradFunctionality)


class Origins:
    """The stream on which a thread made each node: the engine numbers nodes in the order of their making."""

    def __init__(self, runtime: FakeStreams) -> None:
        self._runtime = runtime
        self._first: list[int] = []
        self._streams: list[FakeStream] = []

    def note(self, stream: FakeStream, *, made_already: int = 0) -> None:
        """From now on nodes are made on ``stream``."""
        number = torch._C._autograd._get_sequence_nr() - made_already
        while self._first and self._first[-1] >= number:
            self._first.pop()
            self._streams.pop()
        self._first.append(number)
        self._streams.append(stream)

    def note_leaf(self, leaf: torch.Tensor) -> None:
        """Notes the stream of the ``AccumulateGrad`` of a leaf that an operator is given, unless it has one."""
        if type(leaf).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            return  # it has no memory of a device
        with torch._C._PreserveDispatchKeyGuard(), torch._C._DisableTorchDispatch():
            for key in _AUTOGRAD:
                torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
            function = leaf.view_as(leaf).grad_fn
        if function is not None:
            function.next_functions[0][0].metadata.setdefault(self._runtime, self._runtime.current_stream())

    def of(self, node: Any, users: Sequence[Any]) -> FakeStream:
        """Returns the stream of a node; a leaf that no operator was given has that of the first of its users."""
        if node.name() == "torch::autograd::AccumulateGrad":
            if self._runtime not in node.metadata:
                first = min(users, key=lambda one: one._sequence_nr(), default=None)
                node.metadata[self._runtime] = self._runtime.current_stream() if first is None else self.of(first, ())
            return node.metadata[self._runtime]  # type: ignore[no-any-return]
        index = bisect_right(self._first, node._sequence_nr()) - 1
        return self._streams[index] if index >= 0 else self._runtime.main


class _Slot:
    """One gradient that a node is given, as far as it is summed up."""

    def __init__(self, event: FakeEvent, stream: FakeStream) -> None:
        self.event = event
        self.stream = stream


class _Node:
    def __init__(self, node: Any, stream: FakeStream) -> None:
        self.node = node
        self.stream = stream
        self.edges = node.next_functions
        self.slots: dict[int, _Slot] = {}
        self.is_needed = True
        self.has_begun = False
        self.has_ended = False


class _Sum:
    """One gradient that is to be added to another in a node's buffer."""

    def __init__(self, consumer: _Node, position: int, producer: FakeStream, ready: FakeEvent) -> None:
        self._consumer = consumer
        self._position = position
        self._producer = producer
        self._ready = ready
        self.stream = consumer.stream

    def begin(self) -> None:
        """torch: "Accumulation operates on both the new incoming gradient and the existing gradient"."""
        slot = self._consumer.slots[self._position]
        if self.stream != self._producer:
            self._ready.wait(self.stream)
        if self.stream != slot.stream:
            slot.event.wait(self.stream)

    def end(self, runtime: FakeStreams) -> None:
        """torch: "Update the ready event and stream for the current position"."""
        self._consumer.slots[self._position] = _Slot(runtime.recorded(self.stream), self.stream)


class Backward:
    """One run of the engine.

    Args:
        runtime: The runtime.
        roots: Where it begins: nodes and the positions of their gradients.
        given: Those gradients.
        wanted: Nodes whose gradients are asked for; None for all leaves.
    """

    def __init__(
        self,
        runtime: FakeStreams,
        roots: Sequence[tuple[Any, int]],
        given: Sequence[torch.Tensor | None],
        wanted: Sequence[Any] | None,
    ) -> None:
        self._runtime = runtime
        self._caller = runtime.current_stream()
        self._leaf_streams: dict[FakeStream, None] = {}
        self._sums: deque[_Sum] = deque()
        self._nodes: dict[Any, _Node] = {}
        self._is_over = False
        self._wanted = [] if wanted is None else list(wanted)
        self._walk([node for node, _ in roots])
        if wanted is not None:
            self._find_needed()
        self._hooks = [hook for known in self._nodes.values() for hook in self._hook(known)]
        self._send(self._caller, roots, given)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._nodes.clear()

    def finish(self) -> None:
        """torch: "Syncs caller_current_stream with leaf streams, so final_callbacks may use any grad"."""
        if self._is_over:
            return
        self._is_over = True
        for node in self._wanted:  # a node that is not run itself has its gradient taken out of its buffer
            if (known := self._nodes.get(node)) is not None and known.slots:
                self._begin(known)
                self._leaf_streams[known.stream] = None
        for stream in self._leaf_streams:
            if stream != self._caller:
                self._runtime.recorded(stream).wait(self._caller)

    def stream(self) -> FakeStream:
        """torch: "Locally set the current stream to func's associated stream"."""
        known = self._current()
        if known is not None:
            self._begin(known)
            return known.stream
        if any(known.has_begun for known in self._nodes.values()):
            self.finish()
        return self._caller

    def next_sum(self) -> _Sum | None:
        """Returns what the engine adds up now, if no node is at work."""
        known = self._current()
        if not self._sums or (known is not None and not known.has_ended):
            return None
        return self._sums.popleft()

    def _current(self) -> _Node | None:
        node = torch._C._current_autograd_node()
        return None if node is None else self._nodes.get(node)

    def _walk(self, roots: Sequence[Any]) -> None:
        users: dict[Any, list[Any]] = {node: [] for node in roots if node is not None}
        waiting = list(users)
        while waiting:
            node = waiting.pop()
            for following, _ in node.next_functions:
                if following is None:
                    continue
                if following not in users:
                    users[following] = []
                    waiting.append(following)
                users[following].append(node)
        for node, before in users.items():
            self._nodes[node] = _Node(node, self._runtime.origins.of(node, before))

    def _find_needed(self) -> None:
        """torch: "Skip functions that aren't supposed to be executed": from which nothing wanted is reached."""
        before: dict[Any, list[_Node]] = {}
        for known in self._nodes.values():
            known.is_needed = False
            for following, _ in known.edges:
                before.setdefault(following, []).append(known)
        waiting = [self._nodes[node] for node in self._wanted if node in self._nodes]
        while waiting:
            known = waiting.pop()
            if not known.is_needed:
                known.is_needed = True
                waiting += before.get(known.node, [])

    def _hook(self, known: _Node) -> tuple[Any, Any]:
        return (
            known.node.register_prehook(lambda _: self._begin(known) if self._is_innermost else None),
            known.node.register_hook(lambda made, _: self._end(known, made) if self._is_innermost else None),
        )

    @property
    def _is_innermost(self) -> bool:
        """False while a node runs a backward of its own, which may go through a leaf of this one."""
        entries = reversed(self._runtime._stack)
        return next((entry for entry in entries if isinstance(entry, Backward)), None) is self

    def _begin(self, known: _Node) -> None:
        """torch: "Ensure that the incoming gradients are ready"."""
        if known.has_begun:
            return
        known.has_begun = True
        while self._sums:  # of gradients for which the engine launched nothing
            left = self._sums.popleft()
            left.begin()
            left.end(self._runtime)
        for slot in known.slots.values():
            if slot.stream != known.stream:
                slot.event.wait(known.stream)
        self._runtime.origins.note(known.stream)

    def _end(self, known: _Node, made: Sequence[torch.Tensor | None]) -> None:
        self._begin(known)
        known.has_ended = True
        if not known.edges:
            self._leaf_streams[known.stream] = None  # "Records leaf stream (if applicable)"
        self._send(known.stream, known.edges, made)

    def _send(
        self, producer: FakeStream, edges: Sequence[tuple[Any, int]], made: Sequence[torch.Tensor | None]
    ) -> None:
        """Puts gradients into the buffers of the nodes that take them."""
        for (following, position), gradient in zip(edges, made, strict=False):
            if following is None or gradient is None:
                continue
            consumer = self._nodes[following]
            if not consumer.is_needed:
                continue
            if consumer.stream != producer:  # "We will end up doing record_stream on the accumulation stream"
                self._runtime.record_use(gradient, consumer.stream)
            ready = self._runtime.recorded(producer)
            if position in consumer.slots:
                self._sums.append(_Sum(consumer, position, producer, ready))
            else:
                consumer.slots[position] = _Slot(ready, producer)


class Engine:
    """Stands before torch's engine while a runtime is watched."""

    def __init__(self, runtime: FakeStreams, engine: Any) -> None:
        self.runtime = runtime
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def run_backward(
        self,
        tensors: Sequence[Any],
        grad_tensors: Sequence[torch.Tensor | None],
        keep_graph: bool,
        create_graph: bool,
        inputs: Sequence[Any] = (),
        allow_unreachable: bool = False,
        accumulate_grad: bool = False,
    ) -> Any:
        roots = [_edge(tensor) for tensor in tensors]
        wanted = [_edge(tensor)[0] for tensor in inputs] if inputs else None
        backward = Backward(self.runtime, roots, grad_tensors, wanted)
        try:
            with self.runtime.running(backward):
                result = self.engine.run_backward(
                    tensors, grad_tensors, keep_graph, create_graph, inputs, allow_unreachable, accumulate_grad
                )
                backward.finish()
        finally:
            backward.close()
        return result


def _edge(value: Any) -> tuple[Any, int]:
    if not isinstance(value, torch.Tensor):
        return value.node, value.output_nr
    with torch._C.DisableTorchFunctionSubclass():
        if value.requires_grad and value.grad_fn is None:
            with torch.enable_grad(), torch._C._DisableTorchDispatch():
                return value.view_as(value).grad_fn.next_functions[0]  # type: ignore[union-attr]
        return value.grad_fn, value.output_nr
