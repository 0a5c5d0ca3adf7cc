"""One module on some of the ranks: inputs to its members, its own work there, results back, and gradients likewise.

Every rank calls the module, in the same order as the other modules; a rank that does not run it takes part in the
exchange all the same. A call is an ordinary differentiable function, so whatever runs a module (a lane, the caller's
own thread) runs a ranked one too.

Why it cannot deadlock. A module's messages go over a communicator of its own, from one thread at a time, in the order
in which the program calls and backwards it, which is the same on all ranks. They wait for the program's earlier work
on that module's inputs and for nothing later. Computing holds slots and waits for no message; sending and receiving
waits for messages and holds no slots. So of all that has not ended, the piece that comes first in the program's order
can always go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mosaic.engine.structure import flatten, unflatten
from mosaic.engine.thread_state import ThreadState
from mosaic.errors import ModuleContractError, UnsupportedModelError
from mosaic.ranks.agree import agree, trouble_of
from mosaic.ranks.exchange import Exchange, Shared, ToHolders, ToMembers
from mosaic.ranks.progress import Waiting, unwatched
from mosaic.ranks.reduce import GradientReducer
from mosaic.ranks.rows import RowRouting
from mosaic.ranks.traffic import Phase, Traffic

Compute = Callable[[Callable[[], Any], Phase], Any]
"""Runs work of a phase where the module's quota is, and returns its result."""


@dataclass(frozen=True, slots=True)
class Template:
    """What a call returns, but for the number of rows: for ranks that do not run the module."""

    spec: Any
    """How results nest."""
    leaves: tuple[Any, ...]
    """A tensor on the meta device for each tensor, anything else as it is."""
    differentiable: tuple[bool, ...]
    """For each leaf, whether it wants a gradient when the module trains."""
    device: torch.device
    """Where its tensors are."""

    @staticmethod
    def of(result: Any) -> Template:
        """Returns the template of what a module returned for a sample; keeps nothing of its graph."""
        leaves, spec = flatten(result)
        return Template(
            spec,
            tuple(torch.empty_like(leaf, device="meta") if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves),
            tuple(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves),
            next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), torch.device("cpu")),
        )

    def of_no_rows(self) -> list[Any]:
        """Returns the leaves of a result of no rows."""
        return [
            torch.empty((0, *leaf.shape[1:]), dtype=leaf.dtype, device=self.device)
            if isinstance(leaf, torch.Tensor)
            else leaf
            for leaf in self.leaves
        ]


class Ranked:
    """A module on ``members`` of the ranks.

    Args:
        name: Its name in the graph.
        module: The module; its parameters may have been given up on ranks that are no members.
        members: Ranks that run it.
        group: All ranks; its own communicator.
        sample: The arguments of a call, with the batch in their leading dimensions.
        template: What it returns.
        compute: Runs its forward and its backward.
        reducer: Reduces its parameters' gradients over the members; None on other ranks, and where nothing trains.
        traffic: Where to count what is sent.
        waiting: Notes that a thread waits for other ranks.
        batched: For each argument whether it has a row for each sample; by default those of one leading dimension.

    Raises:
        UnsupportedModelError: No argument has a batch.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        *,
        members: tuple[int, ...],
        group: dist.ProcessGroup,
        sample: tuple[tuple[Any, ...], dict[str, Any]],
        template: Template,
        compute: Compute,
        reducer: GradientReducer | None = None,
        traffic: Traffic | None = None,
        waiting: Waiting = unwatched,
        batched: tuple[bool, ...] | None = None,
    ) -> None:
        self.name = name
        self.members = members
        self.group = group
        self.template = template
        self.compute = compute
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._reducer = reducer
        self._waiting = waiting
        self._traffic = traffic if traffic is not None else Traffic()
        self._plain = partial(nn.Module.__call__, module)
        leaves, self._spec = flatten(sample)
        self._batched = batched_leaves(name, leaves) if batched is None else batched
        self._sample = [leaf.detach()[:0] if cut else leaf for leaf, cut in zip(leaves, self._batched, strict=True)]
        self._anchor = torch.zeros(0, requires_grad=True)
        self.backward_begins: Callable[[], None] = lambda: None

    def __call__(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls the module on this rank's rows and returns what became of these rows.

        Raises:
            ModuleContractError: The arguments are not those of the sample's call.
        """
        leaves, spec = flatten((args, kwargs))
        trouble = trouble_of(self.name, spec, leaves, self._batched, self._spec)
        return self._call(run, leaves, is_there=True, trouble=trouble)

    def without_rows(self) -> Any:
        """Takes part in a call for which this rank has no rows; returns results of none."""
        return self._call(self._plain, list(self._sample), is_there=False)

    def reduce(self) -> None:
        """Ends the reduction of its parameters' gradients; on members, after each backward."""
        if self._reducer is not None:
            self._reducer.finish()
            self._traffic.add(self.name, "reduce", self._reducer.num_bytes)

    def close(self) -> None:
        """Takes its hooks off the parameters."""
        if self._reducer is not None:
            self._reducer.close()

    @property
    def scale(self) -> float:
        """What gradients are multiplied with on members, so that their mean over the members is that over all ranks."""
        return len(self.members) / self.size

    def _call(
        self, run: Callable[..., Any], leaves: list[Any], *, is_there: bool, trouble: ModuleContractError | None = None
    ) -> Any:
        grad = torch.is_grad_enabled()
        wants = [isinstance(leaf, torch.Tensor) and leaf.requires_grad and grad for leaf in leaves]
        agreed = agree(
            self.name,
            self.group,
            leaves,
            self._batched,
            is_there=is_there,
            wants=wants,
            trouble=trouble,
            waiting=self._waiting,
        )
        held, there, wanted = agreed.held, agreed.there, agreed.wanted
        if any(there) and not all(there):
            self._share(leaves, there.index(True))
        routing = RowRouting(held=held, members=self.members)
        exchange = Exchange(routing, self.group, self.name, traffic=self._traffic, waiting=self._waiting)
        part = self._part(leaves, wanted, exchange)
        made = self._made(run, part, exchange)
        return unflatten(self._home(made, exchange), self.template.spec)

    def _share(self, leaves: list[Any], source: int) -> None:
        """Gives ranks that do not call the module the arguments that are no part of the batch."""
        for index, (leaf, cut) in enumerate(zip(leaves, self._batched, strict=True)):
            if isinstance(leaf, torch.Tensor) and not cut:
                given = leaf.detach().clone()
                with self._waiting("forward"):
                    dist.broadcast(given, src=dist.get_global_rank(self.group, source), group=self.group)
                if self.rank != source and not leaf.requires_grad:
                    leaves[index] = given

    def _part(self, leaves: list[Any], wanted: Sequence[bool], exchange: Exchange) -> list[Any]:
        """Routes the arguments: this rank's part of those that are batched, the others as they are."""
        part = list(leaves)
        routed = []
        for index, (leaf, cut) in enumerate(zip(leaves, self._batched, strict=True)):
            if cut and wanted[index]:
                part[index] = leaf if leaf.requires_grad else leaf.detach().requires_grad_()
                routed.append(index)
            elif cut:
                part[index] = exchange.to_members(leaf)
            elif wanted[index]:
                part[index] = Shared.apply(self.scale, leaf if leaf.requires_grad else leaf.detach().requires_grad_())
        if routed:
            moved = ToMembers.apply(exchange, self.scale, *(part[index] for index in routed))
            for index, tensor in zip(routed, moved, strict=True):
                part[index] = tensor
        return part

    def _home(self, made: list[Any], exchange: Exchange) -> list[Any]:
        """Routes the results back to the ranks whose rows they are."""
        home = list(made)
        routed = [index for index, leaf in enumerate(made) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if routed:
            moved = ToHolders.apply(exchange, self.scale, *(made[index] for index in routed))
            for index, tensor in zip(routed, moved, strict=True):
                home[index] = tensor
        for index, leaf in enumerate(made):
            if isinstance(leaf, torch.Tensor) and index not in routed:
                home[index] = exchange.to_holders(leaf)
        return home

    def _made(self, run: Callable[..., Any], part: list[Any], exchange: Exchange) -> list[Any]:
        """Runs the module on this rank's part, or makes results of no rows."""
        tensors = [leaf for leaf in part if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        rows = exchange.routing.parts[self.rank]
        if rows:
            made = Here.run(self, run, part, self._spec, tensors)
            self._check(made, rows)
            return made
        empty = self.template.of_no_rows()
        wanted = [index for index, flag in enumerate(self.template.differentiable) if flag]
        if wanted and torch.is_grad_enabled():
            stood_in = Absent.apply(self, [empty[index] for index in wanted], self._anchor, *tensors)
            for index, tensor in zip(wanted, stood_in, strict=True):
                empty[index] = tensor
        return empty

    def _check(self, made: list[Any], rows: int) -> None:
        """Holds the module to its template, since ranks that do not run it rely on that."""
        found = [(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in made]
        wanted = [
            ((rows, *leaf.shape[1:]), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in self.template.leaves
        ]
        if found != wanted:
            raise ModuleContractError(
                f"{self.name!r} returned {found} for {rows} rows where {wanted} was expected: each tensor needs a "
                f"row for each row of the arguments, or it cannot be split: colocate(..., exclude=[{self.name!r}])"
            )


def batched_leaves(name: str, leaves: Sequence[Any]) -> tuple[bool, ...]:
    """Returns for each argument whether its leading dimension is the batch: the one that all have in common.

    One of size 1 where others have more is taken to be the same for all samples, as are scalars.

    Raises:
        UnsupportedModelError: The tensors have no leading dimension in common, or there are none.
    """
    sizes = {len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()}
    wide = sizes - {1} or sizes
    if len(wide) != 1:
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves if isinstance(leaf, torch.Tensor)) or "no tensors"
        raise UnsupportedModelError(
            f"{name!r} cannot be split over ranks: its arguments ({shapes}) share no leading dimension that is "
            f"the batch; leave it where it is called: colocate(..., exclude=[{name!r}])"
        )
    (batch,) = wide
    return tuple(isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and len(leaf) == batch for leaf in leaves)


class Absent(torch.autograd.Function):
    """Stands on a rank that has no rows for a module: results and gradients of no rows."""

    @staticmethod
    def forward(
        ctx: Any, ranked: Ranked, results: list[torch.Tensor], _anchor: torch.Tensor, *inputs: torch.Tensor
    ) -> Any:
        """Returns results of no rows."""
        ctx.ranked, ctx.inputs = ranked, [(tensor.shape, tensor.dtype) for tensor in inputs]
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *_grads: Any) -> Any:
        """Returns gradients of no rows."""
        ctx.ranked.backward_begins()
        ctx.ranked.reduce()  # as the other members do now
        return None, None, None, *(torch.zeros(shape, dtype=dtype) for shape, dtype in ctx.inputs)


class Here(torch.autograd.Function):
    """The module's own work, in a graph of its own, so that its backward runs where its forward ran."""

    @staticmethod
    def run(
        ranked: Ranked, run: Callable[..., Any], part: list[Any], spec: Any, tensors: list[torch.Tensor]
    ) -> list[Any]:
        """Runs the forward; returns the leaves of its result."""
        state = ThreadState.capture()
        inputs: list[torch.Tensor] = []

        def alias(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
                return leaf
            inputs.append(leaf.detach().requires_grad_())
            return inputs[-1]

        aliased = [alias(leaf) for leaf in part]

        def forward() -> list[Any]:
            with state.applied():
                args, kwargs = unflatten(aliased, spec)
                return flatten(run(*args, **kwargs))[0]

        made: list[Any] = ranked.compute(forward, "forward")
        roots = [leaf for leaf in made if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if not roots:
            return made
        outside = iter(Here.apply(ranked, roots, inputs, ranked._anchor, *tensors))
        return [next(outside) if isinstance(leaf, torch.Tensor) and leaf.requires_grad else leaf for leaf in made]

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
        ranked.backward_begins()
        keep = torch._C._autograd._get_current_graph_task_keep_graph()

        def backward() -> list[torch.Tensor | None]:
            torch.autograd.backward(ctx.roots, grads, retain_graph=keep)
            found = [tensor.grad for tensor in inputs]
            for tensor in inputs:
                tensor.grad = None
            return found

        found = ranked.compute(backward, "backward")
        ranked.reduce()
        return None, None, None, None, *found
