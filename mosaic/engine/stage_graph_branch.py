"""One captured branch: its static memory, its graphs, and the autograd node that stands for it."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from mosaic.backends.stream_api import StreamApi
from mosaic.engine.stage_graph_call import TakenCall
from mosaic.engine.stage_graph_copies import copies
from mosaic.engine.stage_graph_module import ModuleState
from mosaic.engine.structure import unflatten
from mosaic.errors import MosaicError


@dataclass(frozen=True, slots=True)
class Output:
    """One leaf of what a branch returns."""

    kind: Literal["made", "input", "own", "value"]
    what: Any
    """Index among the made tensors or the inputs; the module's own tensor; the value."""


@dataclass(frozen=True, slots=True)
class BackwardGraph:
    """A captured backward."""

    graph: Any
    grads: tuple[torch.Tensor | None, ...]
    """Where it leaves the gradient of each target."""


class Pass:
    """One forward by replay, until its backward is over or its results are gone."""

    def __init__(self) -> None:
        self.spent = False
        self._lent: list[tuple[weakref.ref[torch.Tensor], int]] = []

    def lend(self, tensors: Sequence[torch.Tensor]) -> None:
        """Notes results that are static memory, which a backward may still read."""
        self._lent = [(weakref.ref(tensor), tensor._version) for tensor in tensors]

    @property
    def is_spoilt(self) -> bool:
        """Whether somebody wrote into static memory."""
        return any((tensor := ref()) is not None and tensor._version != version for ref, version in self._lent)


class GraphedBranch:
    """A branch's share of a captured stage.

    Static memory is written by one replay and read by its backward; ``StageGraphs`` replays again only after both.
    All of it is used on the lane's stream, or on a stream that the lane was ordered before and after.

    Attributes:
        static: Leaves that the graph reads its inputs from.
        made: What it computes; in memory that the next replay writes to.
        outputs: What is returned.
        differentiable: Indices of those of ``made`` that have a gradient.
        targets: Leaves that gradients reach, stand-ins for inputs and parameters.
        sources: What the targets stand for: the index of an input, or a parameter.
        static_grads: Where the backward reads the gradients of the differentiable outputs.
        backwards: Captured backwards, by which outputs have a gradient.
        wanted: Patterns of that kind which came up and are not captured yet.
        seen: Those whose capture was tried.
    """

    def __init__(
        self, api: StreamApi, call: TakenCall, state: ModuleState, static: list[torch.Tensor], *, alias: bool
    ) -> None:
        self.call = call
        self.state = state
        self.lane = call.branch.lane
        self.static = static
        self.made: list[torch.Tensor] = []
        self.outputs: tuple[Output, ...] = ()
        self.spec: pytree.TreeSpec | None = None
        self.differentiable: tuple[int, ...] = ()
        self.targets: list[torch.Tensor] = []
        self.sources: list[int | torch.nn.Parameter] = []
        self.static_grads: list[torch.Tensor] = []
        self.backwards: dict[tuple[bool, ...], BackwardGraph] = {}
        self.wanted: set[tuple[bool, ...]] = set()
        self.seen: set[tuple[bool, ...]] = set()
        self.pool: Any = None
        self.closed = False
        self._api = api
        self._alias = alias
        self._reached_from: list[tuple[bool, ...]] = []
        self._memory = [tensor.data for tensor in static]  # writing through .data leaves autograd's versions alone
        self._passes: weakref.WeakSet[Pass] = weakref.WeakSet()

    @property
    def every_output(self) -> tuple[bool, ...]:
        """The pattern of a backward from all differentiable outputs."""
        return (True,) * len(self.differentiable)

    @property
    def in_flight(self) -> bool:
        """Whether a forward by replay still waits for its backward."""
        return any(not one.spent for one in self._passes)

    def take_targets(self, reached: Sequence[Mapping[int, torch.Tensor]]) -> None:
        """Notes which leaves the captured graph reaches from each differentiable output, by their ids."""
        stands_for: list[tuple[torch.Tensor, int | torch.nn.Parameter]] = [
            *((static, number) for number, static in enumerate(self.static)),
            *((alias, self.state.parameters[key]) for key, alias in self.state.aliases().items()),
        ]
        for leaf, source in stands_for:
            if any(id(leaf) in leaves for leaves in reached):
                self.targets.append(leaf)
                self.sources.append(source)
                self._reached_from.append(tuple(id(leaf) in leaves for leaves in reached))

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
            self._passes.add(one)
            sources = [tensors[source] if isinstance(source, int) else source for source in self.sources]
            made = _Replayed.apply(self, one, *sources)
            if self._alias:
                one.lend(made)
        else:
            made = self.handed_out()
        tree = []
        for output in self.outputs:
            if output.kind == "made":
                tree.append(made[output.what])
            else:
                tree.append(tensors[output.what] if output.kind == "input" else output.what)
        assert self.spec is not None
        return unflatten(tree, self.spec)

    def handed_out(self) -> tuple[torch.Tensor, ...]:
        """Returns the results: copies, or the static memory itself."""
        if self._alias:
            return tuple(tensor.data for tensor in self.made)  # a view would not be an autograd node's own result
        return tuple(copies([tensor.detach() for tensor in self.made]))

    # Backward.

    def backward(self, one: Pass, given: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """Replays the backward behind what the present stream was given, and orders that stream after it."""
        name = self.call.branch.name
        if self.closed:
            raise MosaicError(f"the stage graphs of {name!r} are closed; run backward before closing them")
        if one.spent:
            raise RuntimeError(
                f"trying to go backward a second time through {name!r}, whose activations may be overwritten by now; "
                "specify retain_graph=True for the first time"
            )
        if one.is_spoilt:
            raise RuntimeError(
                f"a result of {name!r} was written to, but it is its graph's own memory; use alias=False"
            )
        one.spent = not torch._C._autograd._get_current_graph_task_keep_graph()
        wanted = [given[index] for index in self.differentiable]
        pattern = tuple(grad is not None for grad in wanted)
        found = self.backwards.get(pattern)
        if found is None:
            self.wanted |= {pattern} - self.seen
            found = self.backwards[self.every_output]

        def launch() -> list[torch.Tensor | None]:
            for static, grad in zip(self.static_grads, wanted, strict=True):
                if grad is None:
                    static.zero_()
                else:
                    static.copy_(grad)
                    self._api.record_use(grad, self.lane.stream)
            found.graph.replay()
            return self._handed_back(self._reached(found.grads, pattern))

        return self.lane.launch(launch, timed=False).wait()

    def _reached(
        self, grads: Sequence[torch.Tensor | None], pattern: tuple[bool, ...]
    ) -> Sequence[torch.Tensor | None]:
        """Returns None for leaves that no gradient reaches: to an optimizer that is not the same as zeros."""
        return [
            grad if any(map(operator.and_, pattern, reached)) else None
            for grad, reached in zip(grads, self._reached_from, strict=True)
        ]

    def _handed_back(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Returns gradients that may be kept, or static ones where they are sure to be added to something at once."""
        result: list[torch.Tensor | None] = list(grads)
        copied = []
        for index, (source, grad) in enumerate(zip(self.sources, grads, strict=True)):
            if grad is None:
                continue
            if self._alias and isinstance(source, torch.nn.Parameter) and source.grad is not None:
                continue
            copied.append((index, grad))
        for (index, _), copy in zip(copied, copies([grad for _, grad in copied]), strict=True):
            result[index] = copy
        return result

    def close(self) -> None:
        """Lets graphs and memory go."""
        self.closed = True
        for found in self.backwards.values():
            found.graph.reset()
        self.backwards.clear()
        self.made.clear()
        self.static.clear()
        self.static_grads.clear()
        self._memory.clear()


class _Replayed(torch.autograd.Function):
    """A branch in the caller's autograd graph: inputs and parameters in, results out."""

    @staticmethod
    def forward(ctx: Any, branch: GraphedBranch, one: Pass, *sources: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.branch, ctx.one = branch, one
        ctx.set_materialize_grads(False)
        made = branch.handed_out()
        ctx.mark_non_differentiable(*(t for index, t in enumerate(made) if index not in branch.differentiable))
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: torch.Tensor | None) -> tuple[Any, ...]:
        return (None, None, *ctx.branch.backward(ctx.one, given))
