"""One call of a routed module on one rank: rows to its ranks, its own work there, results back; gradients likewise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from mosaic.engine.calls.thread_state import ThreadState
from mosaic.errors import ModuleContractError
from mosaic.find.structure import flatten, unflatten
from mosaic.ranks.calls.exchange import exchange, move
from mosaic.ranks.calls.executor import RankExecutor
from mosaic.ranks.calls.routed import CallRequest
from mosaic.ranks.rows.routing import RowRouting


class RoutedCall:
    """One call, from its forward to its backward.

    The module's own graph is apart from the caller's, in which the whole call is one node (``_Node``): its backward
    moves gradients to the members, runs the module's backward where its forward ran, and moves gradients home.

    Attributes:
        token: An empty tensor through which a backward reaches the call, whatever a loss is made of; None where no
            result takes a gradient.
    """

    def __init__(self, executor: RankExecutor, request: CallRequest, spec: pytree.TreeSpec) -> None:
        self._executor = executor
        self.token: torch.Tensor | None = None
        self.routed = routed = request.routed
        self._request: CallRequest | None = request
        self._routes = routed.routes  # otherwise each rank runs its own rows, and nothing is agreed
        # The nesting of arguments that are not the sample's, which are right where nothing is routed.
        self._spec = spec if request.error is not None and not routed.routes else None
        self._result_spec: pytree.TreeSpec = routed.template.spec
        self._routing: RowRouting | None = None
        self._inputs: list[torch.Tensor] = []  # leaves of the module's own graph
        self._roots: list[torch.Tensor] | None = None  # its results; None where this rank has no rows
        self._travels: list[bool] = []  # for each input, whether its rows do

    def forward(self, leaves: list[Any], anchor: torch.Tensor | None = None) -> list[Any]:
        """Returns the leaves of the result, each tensor one that nobody else has.

        A backward reaches ``anchor``, an empty tensor, after the call.
        """
        routed, request = self.routed, self._request
        assert request is not None, "a call ran twice"
        self._request = None
        batched = routed.batched if self._spec is None else (False,) * len(leaves)
        own, wants, rows = self._exchange(request, leaves)
        outside = [leaves[index] for index, wanted in enumerate(wants) if wanted]
        self._travels = [batched[index] for index, wanted in enumerate(wants) if wanted]
        for index, wanted in enumerate(wants):
            if wanted:
                own[index] = own[index].detach().requires_grad_()
                self._inputs.append(own[index])
        if rows:
            outputs = self._compute(request.run, own)
            if self._spec is None:
                self._check(outputs, rows)
        else:
            outputs = routed.template.of_rows(0)
        return self._home(outputs, routed.anchor if anchor is None else anchor, outside)

    def nested(self, leaves: Sequence[Any]) -> Any:
        return unflatten(list(leaves), self._result_spec)

    def backward(self, grads: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Returns the gradients of the inputs, from those of the results."""
        routed = self.routed
        self._executor.backward_reached(routed)
        grads = [_scaled(grad, routed.scale) for grad in move(routed, self._routing, grads, "backward")]
        if routed.is_reducing:  # an earlier call's gradients, before new ones are added to them
            routed.reduce()
        if self._roots is not None:
            roots, keep = self._roots, torch._C._autograd._get_current_graph_task_keep_graph()
            work = partial(torch.autograd.backward, roots, grads, retain_graph=keep)
            self._executor.compute(routed, work, "backward")
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

    def _exchange(self, request: CallRequest, leaves: list[Any]) -> tuple[list[Any], list[bool], int]:
        """Returns this rank's part of the arguments, which of them take a gradient, and how many rows it has.

        Exchanges how many rows each rank holds, who calls and which arguments want a gradient, and the rows.
        """
        routed, grad = self.routed, torch.is_grad_enabled()
        wants = [isinstance(leaf, torch.Tensor) and leaf.requires_grad and grad for leaf in leaves]
        if self._spec is not None:
            return list(leaves), wants, 1
        if self._routes:
            agreed, own = exchange(request, leaves, wants)
            self._routing, rows, wants = agreed.routing, agreed.routing.parts[routed.rank], agreed.wanted
            if any(agreed.there) and not all(agreed.there):
                self._share(own, leaves, agreed.there.index(True))
        else:
            own, rows = list(leaves), routed.rows_of(leaves)
        # What wanted one in the sample's step counts as wanting one: the results' kind was learned there.
        return own, [a or (grad and b) for a, b in zip(wants, routed.sample_wants, strict=True)], rows

    def _share(self, own: list[Any], leaves: list[Any], source: int) -> None:
        """Broadcasts the arguments that are not part of the batch to ranks that do not call the module."""
        routed = self.routed
        for index, (leaf, cut) in enumerate(zip(leaves, routed.batched, strict=True)):
            if isinstance(leaf, torch.Tensor) and not cut:
                value = leaf.detach().clone()
                with routed.waiting("forward"):
                    group = routed.carrier_of(value)
                    source_rank = dist.get_global_rank(group, source)
                    dist.broadcast(value, src=source_rank, group=group, async_op=True).wait()
                if routed.rank != source and not leaf.requires_grad:
                    own[index] = value

    def _compute(self, run: Callable[..., Any], own: list[Any]) -> list[Any]:
        """Runs the module on this rank's part, in a graph of its own."""
        routed, spec = self.routed, self._spec or self.routed.spec
        state, context = ThreadState.capture(), copy_context()

        def forward() -> tuple[list[Any], pytree.TreeSpec]:
            with state.applied(), routed.learning():
                args, kwargs = unflatten(own, spec)
                return flatten(context.run(run, *args, **kwargs))

        outputs: list[Any]
        outputs, made_spec = self._executor.compute(routed, forward, "forward")
        if self._spec is not None:
            self._result_spec = made_spec
        self._roots = []
        return outputs

    def _home(self, outputs: list[Any], anchor: torch.Tensor, outside: list[torch.Tensor]) -> list[Any]:
        """Moves results to the ranks whose rows they are, and makes the call a node of the caller's graph."""
        routed = self.routed
        tensors = {index: leaf for index, leaf in enumerate(outputs) if isinstance(leaf, torch.Tensor)}
        wanted = (
            routed.template.wanted()
            if self._spec is None
            else [index for index, tensor in tensors.items() if tensor.requires_grad]
        )
        if self._roots is not None:
            self._roots = [outputs[index] for index in wanted]
        moved = move(routed, self._routing, list(tensors.values()), "forward", is_back=True)
        home = dict(zip(tensors, moved, strict=True))
        if wanted:
            *results, self.token = _Node.apply(self, [home[index] for index in wanted], anchor, *outside)
            home.update(zip(wanted, results, strict=True))
        return [
            leaf if index not in home else home[index] if index in wanted else home[index].detach()
            for index, leaf in enumerate(outputs)
        ]

    def _check(self, outputs: list[Any], rows: int) -> None:
        """Holds the module to its template, on which ranks that do not run it rely."""
        routed, template = self.routed, self.routed.template
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


def _scaled(grad: torch.Tensor, factor: float) -> torch.Tensor:
    """Returns a gradient times a factor; itself, bit for bit, where that is 1."""
    return grad if factor == 1 else grad * factor
