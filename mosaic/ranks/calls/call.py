"""One call of a routed module on one rank: rows to its ranks, its own work there, results back; gradients likewise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from mosaic.engine.calls.structure import flatten, unflatten
from mosaic.engine.calls.thread_state import ThreadState
from mosaic.errors import ModuleContractError
from mosaic.ranks.calls.exchange import exchange, move
from mosaic.ranks.calls.executor import RankExecutor
from mosaic.ranks.calls.routed import RoutedModule
from mosaic.ranks.rows.routing import RowRouting
from mosaic.ranks.world.groups import carrier_of


class RoutedCall:
    """One call, from its forward to its backward.

    The module's own graph is apart from the caller's, in which the whole call is one node (``_Node``): its backward
    moves gradients to the members, runs the module's backward where its forward ran, and moves gradients home.

    Args:
        executor: Runs the calls of this rank.
        routed: The module.
        run: Makes the module's own call.
        is_there: Whether this rank calls it, rather than taking part without rows.
        added: A digest of arguments that the sample's step had not.
        attributes: Attributes that were set in the module since it was colocated.
        routes: Whether rows travel to the module's ranks; otherwise each rank runs its own, and nothing is agreed.
        error: Why the call cannot be routed: all ranks raise.
        spec: The nesting of arguments, where that is not the sample's; for calls that are not routed.

    Attributes:
        token: An empty tensor through which a backward reaches the call, whatever a loss is made of; None where no
            result takes a gradient.
    """

    def __init__(
        self,
        executor: RankExecutor,
        routed: RoutedModule,
        run: Callable[..., Any],
        *,
        is_there: bool,
        added: str,
        attributes: str,
        routes: bool = True,
        error: ModuleContractError | None = None,
        spec: pytree.TreeSpec | None = None,
    ) -> None:
        self.token: torch.Tensor | None = None
        self._executor = executor
        self._routed = routed
        self._run: Callable[..., Any] | None = run
        self._options: dict[str, Any] = {
            **{"is_there": is_there, "added": added},
            **{"attributes": attributes, "error": error},
        }
        self._routes = routes
        self._spec = spec
        self._result_spec: pytree.TreeSpec = routed.template.spec
        self._routing: RowRouting | None = None
        self._inputs: list[torch.Tensor] = []  # leaves of the module's own graph
        self._roots: list[torch.Tensor] | None = None  # its results; None where this rank has no rows
        self._travels: list[bool] = []  # for each input, whether its rows do

    def forward(self, leaves: list[Any], anchor: torch.Tensor | None = None) -> list[Any]:
        """Returns the leaves of the result, each tensor one that nobody else has.

        Args:
            leaves: Those of the arguments.
            anchor: An empty tensor below the call in the graph; a backward reaches it after the call.
        """
        routed, run = self._routed, self._run
        assert run is not None, "a call ran twice"
        self._run = None
        batched = routed.batched if self._spec is None else (False,) * len(leaves)
        own, wants, rows = self._exchange(leaves)
        outside = [leaves[index] for index, wanted in enumerate(wants) if wanted]
        self._travels = [batched[index] for index, wanted in enumerate(wants) if wanted]
        for index, wanted in enumerate(wants):
            if wanted:
                own[index] = own[index].detach().requires_grad_()
                self._inputs.append(own[index])
        if rows:
            outputs = self._compute(run, own)
            if self._spec is None:
                self._check(outputs, rows)
        else:
            outputs = routed.template.of_rows(0)
        return self._home(outputs, routed.anchor if anchor is None else anchor, outside)

    def nested(self, leaves: Sequence[Any]) -> Any:
        return unflatten(list(leaves), self._result_spec)

    def backward(self, grads: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Returns the gradients of the inputs, from those of the results."""
        routed = self._routed
        self._executor.backward_reached(routed)
        grads = [_scaled(grad, routed.scale) for grad in move(routed, self._routing, grads, "backward")]
        if routed.is_reducing:  # an earlier call's gradients, before new ones are added to them
            routed.reduce()
        if self._roots is not None:
            self._backward_here(self._roots, grads)
        routed.start_reduction()
        self._executor.backward_done(routed)
        input_grads: list[torch.Tensor | None] = []
        for tensor in self._inputs:
            grad, tensor.grad = tensor.grad, None
            input_grads.append(_scaled(torch.zeros_like(tensor) if grad is None else grad, 1 / routed.scale))
        places = [place for place, travels in enumerate(self._travels) if travels]
        moving = [grad for place, grad in enumerate(input_grads) if self._travels[place] and grad is not None]
        for place, grad in zip(places, move(routed, self._routing, moving, "backward", is_back=True), strict=True):
            input_grads[place] = grad
        return input_grads

    # Parts.

    def _exchange(self, leaves: list[Any]) -> tuple[list[Any], list[bool], int]:
        """Returns this rank's part of the arguments, which of them take a gradient, and how many rows it has.

        Exchanges how many rows each rank holds, who calls and which arguments want a gradient, and the rows.
        """
        routed, grad = self._routed, torch.is_grad_enabled()
        wants = [isinstance(leaf, torch.Tensor) and leaf.requires_grad and grad for leaf in leaves]
        if self._spec is not None:
            return list(leaves), wants, 1
        if self._routes:
            agreed, own = exchange(routed, leaves, wants=wants, **self._options)
            self._routing, rows, wants = agreed.routing, agreed.routing.parts[routed.rank], list(agreed.wanted)
            if any(agreed.there) and not all(agreed.there):
                self._share(own, leaves, agreed.there.index(True))
        else:
            own, rows = list(leaves), routed.rows_of(leaves)
        # What wanted one in the sample's step counts as wanting one: the results' kind was learned there.
        return own, [a or (grad and b) for a, b in zip(wants, routed.sample_wants, strict=True)], rows

    def _share(self, own: list[Any], leaves: list[Any], source: int) -> None:
        """Broadcasts the arguments that are not part of the batch to ranks that do not call the module."""
        routed = self._routed
        for index, (leaf, cut) in enumerate(zip(leaves, routed.batched, strict=True)):
            if isinstance(leaf, torch.Tensor) and not cut:
                value = leaf.detach().clone()
                with routed.waiting("forward"):
                    group = carrier_of(value, routed.group, routed.control)
                    source_rank = dist.get_global_rank(group, source)
                    dist.broadcast(value, src=source_rank, group=group, async_op=True).wait()
                if routed.rank != source and not leaf.requires_grad:
                    own[index] = value

    def _compute(self, run: Callable[..., Any], own: list[Any]) -> list[Any]:
        """Runs the module on this rank's part, in a graph of its own."""
        routed, spec = self._routed, self._spec or self._routed.spec
        state, context = ThreadState.capture(), copy_context()

        def forward() -> tuple[list[Any], pytree.TreeSpec]:
            with state.applied(), routed.learning():
                args, kwargs = unflatten(own, spec)
                return flatten(context.run(run, *args, **kwargs))

        outputs: list[Any]
        outputs, made_spec = routed.compute(forward, "forward")
        if self._spec is not None:
            self._result_spec = made_spec
        self._roots = []
        return outputs

    def _home(self, outputs: list[Any], anchor: torch.Tensor, outside: list[torch.Tensor]) -> list[Any]:
        """Moves results to the ranks whose rows they are, and makes the call a node of the caller's graph."""
        routed = self._routed
        wanted = routed.template.wanted() if self._spec is None else _differentiable(outputs)
        if self._roots is not None:
            self._roots = [outputs[index] for index in wanted]
        places = [index for index, leaf in enumerate(outputs) if isinstance(leaf, torch.Tensor)]
        moved = move(routed, self._routing, [outputs[index] for index in places], "forward", is_back=True)
        home = dict(zip(places, moved, strict=True))
        if wanted:
            *tensors, self.token = _Node.apply(self, [home[index] for index in wanted], anchor, *outside)
            home.update(zip(wanted, tensors, strict=True))
        return [
            leaf if index not in home else home[index] if index in wanted else home[index].detach()
            for index, leaf in enumerate(outputs)
        ]

    def _backward_here(self, roots: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        self._routed.compute(lambda: torch.autograd.backward(roots, grads, retain_graph=keep), "backward")

    def _check(self, outputs: list[Any], rows: int) -> None:
        """Holds the module to its template, on which ranks that do not run it rely."""
        routed, template = self._routed, self._routed.template
        returned = [
            (tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in outputs
        ]
        now = template.wanted()
        expected = [
            ((rows, *leaf.shape[1:]), leaf.dtype, index in now) if isinstance(leaf, torch.Tensor) else leaf
            for index, leaf in enumerate(template.leaves)
        ]
        if returned != expected:
            raise ModuleContractError(
                f"{routed.name!r} returned {returned} for {rows} rows where {expected} was expected (shape, dtype, "
                "whether it takes a gradient): each tensor needs a row for each row of the arguments, and takes a "
                "gradient or not as in the sample's step, since other ranks rely on that; colocate again, or leave it "
                f"where it is: colocate(..., exclude=[{routed.name!r}])"
            )


class _Node(torch.autograd.Function):
    """A call in the caller's graph; returns its results, and its token."""

    @staticmethod
    def forward(ctx: Any, call: RoutedCall, results: list[torch.Tensor], anchor: torch.Tensor, *_: Any) -> Any:
        ctx.call = call
        return *(result.detach() for result in results), anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, None, *ctx.call.backward(grads[:-1])


def _differentiable(leaves: Sequence[Any]) -> list[int]:
    return [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def _scaled(grad: torch.Tensor, factor: float) -> torch.Tensor:
    """Returns a gradient times a factor; itself, bit for bit, where that is 1."""
    return grad if factor == 1 else grad * factor
