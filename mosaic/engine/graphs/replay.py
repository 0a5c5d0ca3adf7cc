"""Launching what was captured: static memory, the graphs that use it, and the autograd nodes that stand for them."""

from __future__ import annotations

import operator
import weakref
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

from mosaic.backends.streams.api import StreamApi
from mosaic.engine.calls.structure import flatten, unflatten
from mosaic.engine.calls.thread_state import as_lane
from mosaic.engine.graphs.branches import TakenCall
from mosaic.engine.graphs.module_state import ModuleChange, ModuleState
from mosaic.errors import MosaicError
from mosaic.find.random_numbers import torch_state


class Pass:
    """One forward by replay, until its backward is over or its results are gone."""

    spent = False


class CapturedBranch:
    """A branch's share of a captured stage.

    Static memory is written by one replay and read by its backward; ``StageGraphs`` replays again only after both.
    All of it is used on the lane's stream, or on a stream that the lane was ordered before and after.

    Attributes:
        static: Leaves that the graph reads its inputs from.
        made: What it computes; in memory that the next replay writes to.
        outputs: For each leaf of the result its place among the made tensors or the inputs, or itself.
        differentiable: Indices of those of ``made`` that have a gradient.
        targets: Leaves that gradients reach, stand-ins for inputs and parameters.
        static_grads: Where the backward reads the gradients of the differentiable outputs.
        backwards: By which outputs have a gradient, a graph and where it leaves the gradient of each target.
        wanted: Patterns of that kind which came up and are not captured yet.
        is_differentiated_twice: Whether gradients of its gradients were asked for, which no graph has.
    """

    def __init__(self, api: StreamApi, call: TakenCall, state: ModuleState, static: list[torch.Tensor]) -> None:
        self.call = call
        self.state = state
        self.lane = call.branch.lane
        self.static = static
        self.made: list[torch.Tensor] = []
        self.outputs: list[tuple[Literal["made", "input", "value"], Any]] = []
        self.spec: pytree.TreeSpec | None = None
        self.differentiable: tuple[int, ...] = ()
        self.targets: list[torch.Tensor] = []
        self.static_grads: list[torch.Tensor] = []
        self.backwards: dict[tuple[bool, ...], tuple[Any, Sequence[torch.Tensor | None]]] = {}
        self.wanted: set[tuple[bool, ...]] = set()
        self.is_differentiated_twice = False
        self._api = api
        self._sources: list[int | torch.nn.Parameter] = []
        self._reached_from: list[tuple[bool, ...]] = []
        self._memory = [tensor.data for tensor in static]  # writing through .data leaves autograd's versions alone
        self._latest: weakref.ref[Pass] | None = None
        self._closed = False

    @property
    def every_output(self) -> tuple[bool, ...]:
        """The pattern of a backward from all differentiable outputs."""
        return (True,) * len(self.differentiable)

    @property
    def in_flight(self) -> bool:
        """Whether a forward by replay still waits for its backward."""
        latest = self._latest() if self._latest is not None else None
        return latest is not None and not latest.spent

    def take_targets(self, reached: Sequence[Mapping[int, torch.Tensor]]) -> None:
        """Notes which leaves the captured graph reaches from each differentiable output, by their ids."""
        stands_for: list[tuple[torch.Tensor, int | torch.nn.Parameter]] = [
            *((static, number) for number, static in enumerate(self.static)),
            *((alias, self.state.parameters[key]) for key, alias in self.state.aliases.items()),
        ]
        for leaf, source in stands_for:
            if any(id(leaf) in leaves for leaves in reached):
                self.targets.append(leaf)
                self._sources.append(source)
                self._reached_from.append(tuple(id(leaf) in leaves for leaves in reached))

    def make_memory_for_gradients(self) -> None:
        """Makes memory that a backward reads the gradients of results from."""
        self.static_grads = [torch.zeros_like(self.made[index].detach()) for index in self.differentiable]

    # Forward.

    def copy_in(self, tensors: Sequence[torch.Tensor]) -> None:
        """Launches the copies of a call's inputs to where the graph reads them, on the lane's stream."""
        with torch.no_grad():
            for memory, tensor in zip(self._memory, tensors, strict=True):
                memory.copy_(tensor)
                self._api.record_use(tensor, self.lane.stream)

    def results(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Returns what the replayed graph computed, as part of the caller's autograd graph; on the lane's stream."""
        if self.targets and torch.is_grad_enabled():
            one = Pass()
            self._latest = weakref.ref(one)
            sources = [tensors[source] if isinstance(source, int) else source for source in self._sources]
            made = _Replayed.apply(self, one, *sources)
        else:
            made = copies([tensor.detach() for tensor in self.made])
        found = {"made": made, "input": tensors}
        assert self.spec is not None
        return unflatten([what if kind == "value" else found[kind][what] for kind, what in self.outputs], self.spec)

    # Backward.

    def backward(self, one: Pass, given: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """Replays the backward behind what the present stream was given, and orders that stream after it."""
        name = self.call.branch.name
        self._check_open()
        if one.spent:
            raise RuntimeError(
                f"trying to go backward a second time through {name!r}, whose activations may be overwritten by now; "
                "specify retain_graph=True for the first time"
            )
        one.spent = not torch._C._autograd._get_current_graph_task_keep_graph()
        wanted = [given[index] for index in self.differentiable]
        pattern = tuple(grad is not None for grad in wanted)
        if pattern not in self.backwards:
            self.wanted.add(pattern)
        graph, grads = self.backwards.get(pattern, self.backwards[self.every_output])

        def launch() -> list[torch.Tensor | None]:
            for static, grad in zip(self.static_grads, wanted, strict=True):
                if grad is None:
                    static.zero_()
                else:
                    static.copy_(grad)
                    self._api.record_use(grad, self.lane.stream)
            graph.replay()
            return self._handed_back(grads, pattern)

        return self.lane.launch(launch, timed=False).wait()

    def backward_twice(
        self, autocast: torch.dtype | None, sources: Sequence[torch.Tensor], given: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor | None]:
        """Makes the call again, eagerly, and goes backward through that, so that gradients have gradients."""
        self._check_open()
        self.is_differentiated_twice = True
        tensors, device = list(self.static), self._api.device
        for place, source in zip(self._sources, sources, strict=True):
            if isinstance(place, int):
                tensors[place] = source
        context = torch.autocast(device.type, dtype=autocast, enabled=autocast is not None)
        with self.state.without_trace(), context, as_lane():
            before = torch_state(device)
            leaves = flatten(self.call.run_on(tensors))[0]
            if not before.is_same(torch_state(device)):
                raise MosaicError(
                    f"{self.call.branch.name!r} draws random numbers in a CUDA graph, which has no gradients of "
                    "gradients (create_graph=True); colocate with Options(cuda_graphs=False)"
                )
        made = {what: leaf for (kind, what), leaf in zip(self.outputs, leaves, strict=True) if kind == "made"}
        chosen = [index for index in self.differentiable if given[index] is not None]
        if not chosen:
            return [None] * len(sources)
        grads = [given[index] for index in chosen]
        return torch.autograd.grad(
            [made[index] for index in chosen], sources, grads, create_graph=True, allow_unused=True
        )

    def _check_open(self) -> None:
        if self._closed:
            name = self.call.branch.name
            raise MosaicError(f"the stage graphs of {name!r} are closed; run backward before closing them")

    def _handed_back(
        self, grads: Sequence[torch.Tensor | None], pattern: tuple[bool, ...]
    ) -> list[torch.Tensor | None]:
        """Returns copies; None for leaves that no gradient reaches: to an optimizer that is not the same as zeros."""
        reached = [any(map(operator.and_, pattern, outputs)) for outputs in self._reached_from]
        found = [grad if is_reached else None for grad, is_reached in zip(grads, reached, strict=True)]
        copied = iter(copies([grad for grad in found if grad is not None]))
        return [None if grad is None else next(copied) for grad in found]

    def close(self) -> None:
        """Lets graphs and memory go."""
        self._closed = True
        for graph in {graph for graph, _ in self.backwards.values()}:
            graph.reset()
        self.backwards.clear()
        self.made.clear()
        self.static.clear()
        self.static_grads.clear()
        self._memory.clear()


class _Replayed(torch.autograd.Function):
    """A branch in the caller's autograd graph: inputs and parameters in, results out."""

    @staticmethod
    def forward(ctx: Any, branch: CapturedBranch, one: Pass, *sources: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.branch, ctx.one = branch, one
        kind = branch.lane.api.device.type
        ctx.autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        ctx.save_for_backward(*sources)
        ctx.set_materialize_grads(False)
        made = tuple(copies([tensor.detach() for tensor in branch.made]))
        ctx.mark_non_differentiable(*(t for index, t in enumerate(made) if index not in branch.differentiable))
        return made

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            return (None, None, *ctx.branch.backward_twice(ctx.autocast, ctx.saved_tensors, given))
        return (None, None, *ctx.branch.backward(ctx.one, given))


def copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns copies, made by few kernels: a launch for each parameter would cost more than it copies."""
    made: list[torch.Tensor] = []
    grouped: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = defaultdict(lambda: ([], []))
    for tensor in tensors:
        if tensor.is_contiguous():
            made.append(torch.empty_like(tensor))
            grouped[tensor.dtype][0].append(made[-1])
            grouped[tensor.dtype][1].append(tensor)
        else:
            made.append(tensor.clone())
    for into, source in grouped.values():
        torch._foreach_copy_(into, source)
    return made


class CapturedStage:
    """One capture. Autograd nodes of results that are still in use keep their branch alive.

    Args:
        key: What calls must share to be replayed by it.
        forward: The graph of all forwards.
        branches: What each call's results and backward are made of.
    """

    def __init__(self, key: Hashable, forward: Any, branches: list[CapturedBranch]) -> None:
        self.key = key
        self.branches = branches
        self._forward = forward

    @property
    def in_flight(self) -> bool:
        """Whether a replay would overwrite what a backward still needs."""
        return any(branch.in_flight for branch in self.branches)

    def change(self) -> ModuleChange | None:
        """Returns how a module differs from what was captured, or None."""
        return next((c for branch in self.branches if (c := branch.state.change()) is not None), None)

    def replay(self, calls: Sequence[TakenCall]) -> Iterator[Any]:
        """Launches everything; yields the results.

        Each lane's stream is behind the caller's when it copies the inputs in, the graph is behind all lanes, and each
        lane is behind the graph when it copies the results out. So static memory has one user after another, on
        whatever streams this is called; and lanes keep their promises to those who share slots with them.
        """
        pairs = list(zip(self.branches, calls, strict=True))
        if len(pairs) == 1:
            branch, call = pairs[0]

            def whole() -> Any:
                branch.copy_in(call.tensors)
                self._forward.replay()
                return branch.results(call.tensors)

            yield branch.lane.launch(whole, timed=False).wait()
            return
        ready = [branch.lane.launch(partial(branch.copy_in, call.tensors), timed=False) for branch, call in pairs]
        for ticket in ready:
            ticket.wait()
        self._forward.replay()
        tickets = [branch.lane.launch(partial(branch.results, call.tensors), timed=False) for branch, call in pairs]
        for ticket in tickets:
            yield ticket.wait()

    def close(self) -> None:
        """Lets graphs and memory go; the device must have come to rest."""
        for branch in self.branches:
            branch.close()
        self._forward.reset()
