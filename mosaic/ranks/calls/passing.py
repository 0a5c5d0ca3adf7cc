"""One call of a routed module on one rank: the steps of its forward, and the graph that takes its backward back.

The graph of a call is a chain, ``ToMembers -> Here or NoRows -> ToHolders``, so its backward has one order. The
module's own graph hangs below ``Here``: its backward runs where its forward ran.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from mosaic.engine.calls.structure import flatten, unflatten
from mosaic.engine.calls.thread_state import ThreadState
from mosaic.errors import ModuleContractError
from mosaic.ranks.calls.exchange import digest_of, exchange, move
from mosaic.ranks.rows.routing import RowRouting
from mosaic.ranks.world.groups import carrier_of

if TYPE_CHECKING:
    from mosaic.ranks.calls.ranked import Ranked


@dataclass(slots=True)
class ForwardPass:
    """The forward of one call."""

    ranked: Ranked
    run: Callable[..., Any]
    """Makes the module's own call."""
    leaves: list[Any]
    """Its arguments."""
    _: KW_ONLY
    is_there: bool
    """True if this rank calls it, rather than taking part without rows."""
    attributes: str
    """Attributes that were set in the module since it was colocated."""
    routes: bool = True
    """True if rows go to the module's ranks; otherwise each rank runs its own, and nothing is agreed."""
    error: ModuleContractError | None = None
    """Why the call cannot be routed: all ranks are told and raise."""
    spec: pytree.TreeSpec | None = None
    """The nesting of arguments that are not those of the sample's step; for calls that are not routed."""
    anchor: torch.Tensor | None = None
    """An empty tensor that hangs below the call in the graph, whose backward is reached after the call's."""
    made: list[Any] = field(init=False, default_factory=list)
    """The leaves of the result: each tensor one that nobody else has."""
    token: torch.Tensor | None = field(init=False, default=None)
    """An empty tensor through which a backward reaches the call, whatever a loss is made of; None where no result takes
    a gradient."""
    _there: tuple[bool, ...] = field(init=False, default=())
    _wanted: list[bool] = field(init=False, default_factory=list)
    _routing: RowRouting | None = field(init=False, default=None)
    _moved: list[Any] = field(init=False)
    _num_rows: int = field(init=False, default=0)
    _result_spec: pytree.TreeSpec = field(init=False)

    def __post_init__(self) -> None:
        self.leaves = list(self.leaves)
        self._moved, self._result_spec = self.leaves, self.ranked.template.spec

    def go(self) -> ForwardPass:
        """Takes all steps; returns itself."""
        self.agree()
        self._share()
        self._to_members()
        self._compute()
        self._to_holders()
        return self

    def agree(self) -> None:
        """Exchanges how many rows each rank holds, who calls and which arguments want a gradient, and the rows."""
        ranked, leaves = self.ranked, self.leaves
        grad = torch.is_grad_enabled()
        wants = [isinstance(leaf, torch.Tensor) and leaf.requires_grad and grad for leaf in leaves]
        if not self.routes and self.spec is not None:
            self._wanted, self._num_rows = wants, 1
            return
        if self.routes:
            agreed, self._moved = exchange(
                ranked,
                leaves,
                is_there=self.is_there,
                wants=wants,
                added=digest_of(self.run),
                attributes=self.attributes,
                error=self.error,
            )
            self._there, self._routing = agreed.there, agreed.routing
            self._num_rows = agreed.routing.parts[ranked.rank]
            wants = list(agreed.wanted)
        else:
            self._num_rows = ranked.rows_of(leaves)
        # What wanted one in the sample's step counts as wanting one, since the results' kind was learnt there.
        self._wanted = [a or (grad and b) for a, b in zip(wants, ranked.sample_wants, strict=True)]

    def _share(self) -> None:
        """Gives ranks that do not call the module the arguments that are no part of the batch."""
        ranked = self.ranked
        if not self.routes or all(self._there) or not any(self._there):
            return
        source = self._there.index(True)
        for index, (leaf, cut) in enumerate(zip(self.leaves, ranked.batched, strict=True)):
            if isinstance(leaf, torch.Tensor) and not cut:
                given = leaf.detach().clone()
                with ranked.waiting("forward"):
                    group = carrier_of(given, ranked.group, ranked.control)
                    source_rank = dist.get_global_rank(group, source)
                    dist.broadcast(given, src=source_rank, group=group, async_op=True).wait()
                if ranked.rank != source and not leaf.requires_grad:
                    self.leaves[index] = given

    def _to_members(self) -> None:
        """Takes this rank's part of the arguments that are batched, and the others as they are, into the graph."""
        ranked, leaves = self.ranked, self.leaves
        routed = []
        batched = ranked.batched if self.spec is None else (False,) * len(leaves)
        for index, cut in enumerate(batched):
            if self._wanted[index]:
                leaf = leaves[index]
                leaves[index] = leaf if leaf.requires_grad else leaf.detach().requires_grad_()
                if cut:
                    routed.append(index)
                else:
                    leaves[index] = Shared.apply(ranked.scale, leaves[index])
            elif cut:
                leaves[index] = self._moved[index]
        if routed:
            moved = [self._moved[index] for index in routed]
            parts = ToMembers.apply(ranked, self._routing, moved, *(leaves[index] for index in routed))
            for index, tensor in zip(routed, parts, strict=True):
                leaves[index] = tensor

    def _compute(self) -> None:
        """Runs the module on this rank's part, or makes results of no rows."""
        ranked = self.ranked
        anchor = ranked.anchor if self.anchor is None else self.anchor
        tensors = [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if self._num_rows:
            spec = self.spec or ranked.spec
            self.made, made_spec = Here.run(ranked, self.run, self.leaves, spec, [anchor, *tensors])
            if self.spec is None:
                self._check(self._num_rows)
            else:
                self._result_spec = made_spec
            return
        self.made = ranked.template.of_no_rows()
        wanted = ranked.template.wanted_now()
        if wanted:
            stood_in = NoRows.apply(ranked, [self.made[index] for index in wanted], anchor, *tensors)
            for index, tensor in zip(wanted, stood_in, strict=True):
                self.made[index] = tensor

    def _to_holders(self) -> None:
        """Routes the results back to the ranks whose rows they are."""
        ranked, made = self.ranked, self.made
        routed = ranked.template.wanted_now() if self.spec is None else _differentiable(made)
        places = [index for index, leaf in enumerate(made) if isinstance(leaf, torch.Tensor)]
        moved = move(ranked, self._routing, [made[index] for index in places], "forward", is_back=True)
        home = dict(zip(places, moved, strict=True))
        if routed:
            results = [home[index] for index in routed]
            *tensors, self.token = ToHolders.apply(ranked, self._routing, results, *(made[index] for index in routed))
            home.update(zip(routed, tensors, strict=True))
        self.made = [
            leaf if index not in home else home[index] if index in routed else home[index].detach()
            for index, leaf in enumerate(made)
        ]

    def nested(self, leaves: Sequence[Any]) -> Any:
        return unflatten(list(leaves), self._result_spec)

    def _check(self, rows: int) -> None:
        """Holds the module to its template, since ranks that do not run it rely on that."""
        ranked, template = self.ranked, self.ranked.template
        returned = [
            (tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in self.made
        ]
        now = template.wanted_now()
        wanted = [
            ((rows, *leaf.shape[1:]), leaf.dtype, index in now) if isinstance(leaf, torch.Tensor) else leaf
            for index, leaf in enumerate(template.leaves)
        ]
        if returned != wanted:
            raise ModuleContractError(
                f"{ranked.name!r} returned {returned} for {rows} rows where {wanted} was expected (shape, dtype, "
                "whether it takes a gradient): each tensor needs a row for each row of the arguments, and takes a "
                "gradient or not as in the sample's step, since other ranks rely on that; colocate again, or leave it "
                f"where it is: colocate(..., exclude=[{ranked.name!r}])"
            )


def _differentiable(leaves: Sequence[Any]) -> list[int]:
    return [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


class NoRows(torch.autograd.Function):
    """Stands on a rank that has no rows for a module: results and gradients of no rows."""

    @staticmethod
    def forward(
        ctx: Any, ranked: Ranked, results: list[torch.Tensor], _anchor: torch.Tensor, *inputs: torch.Tensor
    ) -> Any:
        ctx.ranked, ctx.inputs = ranked, [(tensor.shape, tensor.dtype, tensor.device) for tensor in inputs]
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *_grads: Any) -> Any:
        ctx.ranked.backward_begins()
        ctx.ranked.backward_ends()  # as the other members do now
        return None, None, None, *(torch.zeros(shape, dtype=dtype, device=on) for shape, dtype, on in ctx.inputs)


class Here(torch.autograd.Function):
    """The module's own work, in a graph of its own, so that its backward runs where its forward ran."""

    @staticmethod
    def run(
        ranked: Ranked, run: Callable[..., Any], part: list[Any], spec: pytree.TreeSpec, outside: list[torch.Tensor]
    ) -> tuple[list[Any], pytree.TreeSpec]:
        """Runs the forward; returns the leaves of its result, and how they nest."""
        state, context = ThreadState.capture(), copy_context()
        inputs: list[torch.Tensor] = []

        def alias(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
                return leaf
            inputs.append(leaf.detach().requires_grad_())
            return inputs[-1]

        aliased = [alias(leaf) for leaf in part]

        def forward() -> tuple[list[Any], pytree.TreeSpec]:
            with state.applied(), ranked.learning():
                args, kwargs = unflatten(aliased, spec)
                return flatten(context.run(run, *args, **kwargs))

        made, made_spec = ranked.compute(forward, "forward")
        roots = [leaf for leaf in made if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if not roots:
            return made, made_spec
        results = iter(Here.apply(ranked, roots, inputs, *outside))
        home = [next(results) if isinstance(leaf, torch.Tensor) and leaf.requires_grad else leaf for leaf in made]
        return home, made_spec

    @staticmethod
    def forward(
        ctx: Any, ranked: Ranked, roots: list[torch.Tensor], inputs: list[torch.Tensor], *_outside: torch.Tensor
    ) -> Any:
        ctx.ranked, ctx.roots, ctx.inputs = ranked, roots, inputs
        return tuple(root.detach() for root in roots)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ranked, inputs = ctx.ranked, ctx.inputs
        keep = torch._C._autograd._get_current_graph_task_keep_graph()

        def backward() -> list[torch.Tensor | None]:
            torch.autograd.backward(ctx.roots, grads, retain_graph=keep)
            input_grads = [tensor.grad for tensor in inputs]
            for tensor in inputs:
                tensor.grad = None
            return input_grads

        ranked.backward_begins()
        input_grads = ranked.compute(backward, "backward")
        ranked.backward_ends()
        return None, None, None, None, *input_grads


class ToMembers(torch.autograd.Function):
    """Rows of several tensors to the members; their gradients, divided by the module's scale, back."""

    @staticmethod
    def forward(
        ctx: Any, ranked: Ranked, routing: RowRouting | None, moved: list[torch.Tensor], *tensors: torch.Tensor
    ) -> Any:
        ctx.ranked, ctx.routing = ranked, routing
        return tuple(map(_fresh, tensors, moved))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        moved = move(ctx.ranked, ctx.routing, grads, "backward", is_back=True)
        return None, None, None, *(scaled(grad, 1 / ctx.ranked.scale) for grad in moved)


class ToHolders(torch.autograd.Function):
    """Results to the holders; their gradients, times the module's scale, back to the members.

    Besides the results it returns an empty tensor that nobody uses: a way into the backward for a rank whose loss is
    made of something else.
    """

    @staticmethod
    def forward(
        ctx: Any, ranked: Ranked, routing: RowRouting | None, moved: list[torch.Tensor], *tensors: torch.Tensor
    ) -> Any:
        ctx.ranked, ctx.routing = ranked, routing
        return *map(_fresh, tensors, moved), tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        moved = move(ctx.ranked, ctx.routing, grads[:-1], "backward")
        return None, None, None, *(scaled(grad, ctx.ranked.scale) for grad in moved)


class Shared(torch.autograd.Function):
    """An argument that is no part of the batch and the same on all ranks; its gradients are divided by ``scale``."""

    @staticmethod
    def forward(ctx: Any, scale: float, tensor: torch.Tensor) -> torch.Tensor:
        ctx.scale = scale
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, scaled(grads[0], 1 / ctx.scale)


def scaled(grad: torch.Tensor, factor: float) -> torch.Tensor:
    """Returns a gradient times a factor; itself, bit for bit, where that is 1."""
    return grad if factor == 1 else grad * factor


def _fresh(given: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    return made.detach() if made is given else made  # a view could not be changed in place
