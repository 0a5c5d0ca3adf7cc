"""One call of a routed module on one rank: the steps of its forward, and the graph that takes its backward back.

The graph of a call is a chain, ``ToMembers -> Here or NoRows -> ToHolders``, so its backward has one order. The
module's own graph hangs below ``Here``: its backward runs where its forward ran.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mosaic.engine.calls.structure import flatten, unflatten
from mosaic.engine.calls.thread_state import ThreadState
from mosaic.errors import ModuleContractError
from mosaic.ranks.calls import steps
from mosaic.ranks.calls.agree import agree, said_by
from mosaic.ranks.calls.exchange import Exchange, Shared, ToHolders, ToMembers
from mosaic.ranks.rows.routing import routing_of
from mosaic.ranks.world.groups import carrier_of

if TYPE_CHECKING:
    from mosaic.ranks.calls.ranked import Ranked


class ForwardPass:
    """The forward of one call.

    Args:
        ranked: The module.
        run: Makes the module's own call.
        leaves: Its arguments.
        is_there: Whether this rank calls it, rather than taking part without rows.
        attributes: What was set in the module since it was colocated.
        trouble: Why the call cannot be routed: all ranks are told and raise.
        anchor: An empty tensor that hangs below the call in the graph, so that its backward is reached after the
            call's; by default a leaf.

    Attributes:
        made: The leaves of the result: each tensor one that nobody else has.
        token: An empty tensor through which a backward reaches the call, whatever a loss is made of; None where no
            result takes a gradient.
    """

    def __init__(
        self,
        ranked: Ranked,
        run: Callable[..., Any],
        leaves: list[Any],
        *,
        is_there: bool,
        attributes: str,
        trouble: ModuleContractError | None = None,
        anchor: torch.Tensor | None = None,
    ) -> None:
        self._anchor = ranked.anchor if anchor is None else anchor
        self.made: list[Any] = []
        self.token: torch.Tensor | None = None
        self._ranked = ranked
        self._run = run
        self._leaves = list(leaves)
        self._is_there = is_there
        self._attributes = attributes
        self._trouble = trouble
        self._there: tuple[bool, ...] = ()
        self._wanted: list[bool] = []
        self._exchange: Exchange
        self._num_rows = 0

    def go(self) -> ForwardPass:
        """Takes all steps; returns itself."""
        for step in steps.FORWARD:
            getattr(self, step.name)()
        return self

    def agree(self) -> None:
        """Tells all ranks how many rows this one holds, whether it calls, and which arguments want a gradient."""
        ranked, leaves = self._ranked, self._leaves
        ranked.note(steps.AGREE)
        grad = torch.is_grad_enabled()
        wants = [isinstance(leaf, torch.Tensor) and leaf.requires_grad and grad for leaf in leaves]
        try:
            agreed = agree(
                ranked.name,
                ranked.control,
                leaves,
                ranked.batched,
                is_there=self._is_there,
                wants=wants,
                added=said_by(self._run),
                attributes=self._attributes,
                members=ranked.members,
                trouble=self._trouble,
                waiting=ranked.waiting,
            )
        except ModuleContractError as error:
            ranked.refused = weakref.ref(error)
            raise
        self._there = agreed.there
        # What wanted one in the sample's step counts as wanting one, since the results' kind was learnt there.
        self._wanted = [a or (grad and b) for a, b in zip(agreed.wanted, ranked.sample_wants, strict=True)]
        routing = routing_of(agreed.held, ranked.members)
        self._num_rows = routing.parts[ranked.rank]
        self._exchange = Exchange(ranked, routing)

    def share(self) -> None:
        """Gives ranks that do not call the module the arguments that are no part of the batch."""
        ranked = self._ranked
        if all(self._there) or not any(self._there):
            return
        ranked.note(steps.SHARE)
        source = self._there.index(True)
        for index, (leaf, cut) in enumerate(zip(self._leaves, ranked.batched, strict=True)):
            if isinstance(leaf, torch.Tensor) and not cut:
                given = leaf.detach().clone()
                with ranked.waiting("forward"):
                    group = carrier_of(given, ranked.group, ranked.control)
                    source_rank = dist.get_global_rank(group, source)
                    dist.broadcast(given, src=source_rank, group=group, async_op=True).wait()
                if ranked.rank != source and not leaf.requires_grad:
                    self._leaves[index] = given

    def to_members(self) -> None:
        """Routes the arguments: this rank's part of those that are batched, the others as they are."""
        leaves, scale = self._leaves, self._ranked.scale
        routed = []
        self._exchange.begin(steps.TO_MEMBERS)
        for index, (leaf, cut) in enumerate(zip(leaves, self._ranked.batched, strict=True)):
            if cut and self._wanted[index]:
                leaves[index] = leaf if leaf.requires_grad else leaf.detach().requires_grad_()
                routed.append(index)
            elif cut:
                leaves[index] = self._exchange.to_members(leaf)
            elif self._wanted[index]:
                leaves[index] = Shared.apply(scale, leaf if leaf.requires_grad else leaf.detach().requires_grad_())
        if routed:
            moved = ToMembers.apply(self._exchange, scale, *(leaves[index] for index in routed))
            for index, tensor in zip(routed, moved, strict=True):
                leaves[index] = tensor

    def compute(self) -> None:
        """Runs the module on this rank's part, or makes results of no rows."""
        ranked = self._ranked
        tensors = [leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if self._num_rows:
            self.made = Here.run(ranked, self._run, self._leaves, [self._anchor, *tensors])
            self._check(self._num_rows)
            return
        self.made = ranked.template.of_no_rows()
        wanted = ranked.template.wanted_now()
        if wanted:
            stood_in = NoRows.apply(ranked, [self.made[index] for index in wanted], self._anchor, *tensors)
            for index, tensor in zip(wanted, stood_in, strict=True):
                self.made[index] = tensor

    def to_holders(self) -> None:
        """Routes the results back to the ranks whose rows they are."""
        ranked, made, exchange = self._ranked, self.made, self._exchange
        routed = ranked.template.wanted_now()
        home = list(made)
        exchange.begin(steps.TO_HOLDERS)
        if routed:
            *moved, self.token = ToHolders.apply(exchange, ranked.scale, *(made[index] for index in routed))
            for index, tensor in zip(routed, moved, strict=True):
                home[index] = tensor
        for index, leaf in enumerate(made):
            if isinstance(leaf, torch.Tensor) and index not in routed:
                home[index] = exchange.to_holders(leaf).detach()
        self.made = home

    def _check(self, rows: int) -> None:
        """Holds the module to its template, since ranks that do not run it rely on that."""
        ranked, template = self._ranked, self._ranked.template
        found = [
            (tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in self.made
        ]
        now = template.wanted_now()
        wanted = [
            ((rows, *leaf.shape[1:]), leaf.dtype, index in now) if isinstance(leaf, torch.Tensor) else leaf
            for index, leaf in enumerate(template.leaves)
        ]
        if found != wanted:
            raise ModuleContractError(
                f"{ranked.name!r} returned {found} for {rows} rows where {wanted} was expected (shape, dtype, whether "
                "it takes a gradient): each tensor needs a row for each row of the arguments, or it cannot be split, "
                "and has to take a gradient or not as in the sample's step, or ranks that do not run the module do "
                f"not know: colocate again, or leave it where it is: colocate(..., exclude=[{ranked.name!r}])"
            )


class NoRows(torch.autograd.Function):
    """Stands on a rank that has no rows for a module: results and gradients of no rows."""

    @staticmethod
    def forward(
        ctx: Any, ranked: Ranked, results: list[torch.Tensor], _anchor: torch.Tensor, *inputs: torch.Tensor
    ) -> Any:
        """Returns results of no rows."""
        ctx.ranked, ctx.inputs = ranked, [(tensor.shape, tensor.dtype, tensor.device) for tensor in inputs]
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *_grads: Any) -> Any:
        """Returns gradients of no rows."""
        ctx.ranked.backward_begins()
        ctx.ranked.backward_ends()  # as the other members do now
        return None, None, None, *(torch.zeros(shape, dtype=dtype, device=on) for shape, dtype, on in ctx.inputs)


class Here(torch.autograd.Function):
    """The module's own work, in a graph of its own, so that its backward runs where its forward ran."""

    @staticmethod
    def run(ranked: Ranked, run: Callable[..., Any], part: list[Any], outside: list[torch.Tensor]) -> list[Any]:
        """Runs the forward; returns the leaves of its result. ``outside`` are its anchor and what takes a gradient."""
        state, context = ThreadState.capture(), copy_context()
        inputs: list[torch.Tensor] = []

        def alias(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
                return leaf
            inputs.append(leaf.detach().requires_grad_())
            return inputs[-1]

        aliased = [alias(leaf) for leaf in part]

        def forward() -> list[Any]:
            with state.applied(), ranked.learning():
                args, kwargs = unflatten(aliased, ranked.spec)
                return flatten(context.run(run, *args, **kwargs))[0]

        ranked.note(steps.COMPUTE)
        made: list[Any] = ranked.compute(forward, "forward")
        roots = [leaf for leaf in made if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if not roots:
            return made
        found = iter(Here.apply(ranked, roots, inputs, *outside))
        return [next(found) if isinstance(leaf, torch.Tensor) and leaf.requires_grad else leaf for leaf in made]

    @staticmethod
    def forward(
        ctx: Any, ranked: Ranked, roots: list[torch.Tensor], inputs: list[torch.Tensor], *_outside: torch.Tensor
    ) -> Any:
        """Returns the results, cut from the graph inside."""
        ctx.ranked, ctx.roots, ctx.inputs = ranked, roots, inputs
        return tuple(root.detach() for root in roots)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Runs the backward inside, and has the parameters' gradients reduced."""
        ranked, inputs = ctx.ranked, ctx.inputs
        keep = torch._C._autograd._get_current_graph_task_keep_graph()

        def backward() -> list[torch.Tensor | None]:
            torch.autograd.backward(ctx.roots, grads, retain_graph=keep)
            found = [tensor.grad for tensor in inputs]
            for tensor in inputs:
                tensor.grad = None
            return found

        ranked.backward_begins()
        ranked.note(steps.COMPUTE)
        found = ranked.compute(backward, "backward")
        ranked.backward_ends()
        return None, None, None, None, *found
