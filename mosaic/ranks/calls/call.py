"""One call of a routed module on one rank: rows to its ranks, its own work there, results back; gradients likewise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch.utils import _pytree as pytree

from mosaic.engine.calls.thread_state import Applied, ThreadState
from mosaic.engine.host.lane_tensor import to_plain
from mosaic.errors import ModuleContractError
from mosaic.find.structure import flatten, unflatten
from mosaic.ranks.calls.routed import Facts, RoutedModule
from mosaic.ranks.rows.routing import RowRouting


class RoutedCall:
    """This rank's part of one call, from its forward to its backward.

    The module's graph begins at the call's inputs and ends at its results. ``backward`` moves gradients to the members,
    runs the module's backward where its forward ran, and moves gradients home. A host lane calls it itself; elsewhere
    a node of the caller's graph does (``forward``).

    Attributes:
        is_there: True if this rank calls the module, rather than taking part without rows.
        waits: True to wait for its forward, so that its errors are raised here.
        obstacle: The reason why it has to run where it is made, or None.
        run: Makes the module's own call; None once it was made.
        error: The reason why it cannot be routed: all ranks raise.
        inputs: The leaves of its arguments that take a gradient on any rank.
        wanted: The leaves of its result that take a gradient.
        token: An empty tensor through which a backward reaches the call, whatever a loss is made of; None where no
            result takes a gradient.
    """

    def __init__(
        self,
        executor: Any,
        routed: RoutedModule,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_there: bool = True,
        waits: bool = False,
        obstacle: str | None = None,
    ) -> None:
        self.executor, self.routed = executor, routed
        self.is_there, self.waits, self.obstacle = is_there, waits, obstacle
        self.attributes, self.mode = routed.attributes.set_since(), routed.read_mode()
        added = {key: value for key, value in kwargs.items() if key not in routed.keywords and _holds_no_rows(value)}
        # Shape and type of tensors: reading a value would make the host wait for a GPU.
        values = [(leaf.dtype, tuple(leaf.shape)) if _is_tensor(leaf) else leaf for leaf in flatten(added)[0]]
        self._added = f"{sorted(added)} {values}" if added else ""  # which the sample's step had not
        self.run: Callable[..., Any] | None = partial(run, **added) if added else run
        self.args, self.kwargs = args, {key: value for key, value in kwargs.items() if key not in added}
        self.error: ModuleContractError | None = None
        self.inputs: list[int] = []
        self.wanted: list[int] = []
        self.token: torch.Tensor | None = None
        self._routes = routed.routes  # otherwise each rank runs its own rows, and nothing is agreed
        self._own_spec: pytree.TreeSpec | None = None  # of arguments unlike the sample's, right if nothing is routed
        self._result_spec: pytree.TreeSpec = routed.template.spec
        self._routing: RowRouting | None = None
        self._leaves: list[torch.Tensor] = []  # of the module's graph, for ``inputs``
        self._roots: list[torch.Tensor] | None = None  # its results; None where this rank has no rows
        self._is_over = False

    def validate(self, spec: pytree.TreeSpec, leaves: Sequence[Any]) -> None:
        """Notes the reason why a call with these arguments cannot be routed, if there is one."""
        routed, self.args, self.kwargs = self.routed, (), {}
        cut = list(compress(leaves, routed.batched)) if spec == routed.spec else []
        if spec != routed.spec:
            reason = "other arguments than in the sample's step"
        elif not all(isinstance(leaf, torch.Tensor) and leaf.dim() for leaf in cut):
            kinds = ", ".join(type(leaf).__name__ for leaf in cut)
            reason = f"{kinds} where the sample's step had tensors"
        elif len({len(leaf) for leaf in cut}) > 1:
            shapes = ", ".join(str(tuple(leaf.shape)) for leaf in cut)
            reason = f"{shapes}, which had one leading dimension in the sample's step"
        else:
            return
        self.error = ModuleContractError(
            f"{routed.name!r} is called with {reason}; on several ranks all calls have to be alike: "
            f"colocate(..., exclude=[{routed.name!r}])"
        )
        self._own_spec = None if self._routes else spec

    # Forward.

    def forward(self, leaves: list[Any], anchor: torch.Tensor | None = None) -> list[Any]:
        """Makes the call as one node of the caller's graph, from which a backward goes on to ``anchor``."""
        home = self.compute(leaves)
        if self.wanted:
            anchor = self.routed.anchor if anchor is None else anchor
            inputs = (leaves[index] for index in self.inputs)
            *results, self.token = _Node.apply(self, [home[index] for index in self.wanted], anchor, *inputs)
            for index, result in zip(self.wanted, results, strict=True):
                home[index] = result
        return home

    def compute(self, leaves: list[Any]) -> list[Any]:
        """Makes the call; returns the leaves of its result for this rank's rows, outside of any graph."""
        routed, run, self.run = self.routed, self.run, None
        assert run is not None, "a call ran twice"
        own, wants, rows = self._exchange(leaves)
        for index in compress(range(len(leaves)), wants):
            own[index] = own[index].detach().requires_grad_()
            self.inputs.append(index)
            self._leaves.append(own[index])
        outputs = self._run_module(run, own) if rows else routed.template.of_rows(0)
        if self._own_spec is not None:
            self.wanted = [index for index, leaf in enumerate(outputs) if _is_tensor(leaf) and leaf.requires_grad]
        else:
            self.wanted = routed.template.wanted()
            if rows:
                self._check(outputs, rows)
        if rows:
            self._roots = [outputs[index] for index in self.wanted]
        tensors = iter(routed.move(self._routing, list(filter(_is_tensor, outputs)), "forward", is_back=True))
        return [next(tensors).detach() if _is_tensor(leaf) else leaf for leaf in outputs]

    def nested(self, leaves: Sequence[Any]) -> Any:
        return unflatten(list(leaves), self._result_spec)

    def _exchange(self, leaves: list[Any]) -> tuple[list[Any], list[bool], int]:
        """Returns this rank's part of the arguments, which of them take a gradient, and how many rows it has."""
        routed, grad = self.routed, torch.is_grad_enabled()
        wants = [_is_tensor(leaf) and leaf.requires_grad and grad for leaf in leaves]
        if self._own_spec is not None:
            return list(leaves), wants, 1
        if self._routes:
            agreed, own = routed.exchange(self._facts(leaves, wants), leaves, self.error)
            self._routing, rows, wants = agreed.routing, agreed.routing.parts[routed.rank], list(agreed.wants)
        else:
            own, rows = list(leaves), routed.rows_of(leaves)
        # What wanted one in the sample's step counts as wanting one: the results' kind was learned there.
        return own, [a or (grad and b) for a, b in zip(wants, routed.sample_wants, strict=True)], rows

    def _facts(self, leaves: Sequence[Any], wants: Sequence[bool]) -> Facts:
        if self.error is not None:
            return Facts(error=str(self.error))
        cut = list(compress(leaves, self.routed.batched))
        values = repr([leaf for leaf in leaves if not _is_tensor(leaf)])
        shapes = repr([(tuple(leaf.shape[1:]), leaf.dtype) for leaf in cut])
        return Facts(len(cut[0]), self.is_there, "", self._added, values, shapes, self.attributes, tuple(wants))

    def _run_module(self, run: Callable[..., Any], own: list[Any]) -> list[Any]:
        routed, spec = self.routed, self._own_spec or self.routed.spec
        state, context = ThreadState.capture(), copy_context()

        def forward() -> tuple[list[Any], pytree.TreeSpec]:
            with Applied(state), routed.learning(self.mode):
                args, kwargs = unflatten(own, spec)
                return flatten(context.run(run, *args, **kwargs))

        outputs: list[Any]
        outputs, result_spec = self.executor.compute(routed, forward, "forward")
        if self._own_spec is not None:
            self._result_spec = result_spec
        return outputs

    def _check(self, outputs: list[Any], rows: int) -> None:
        """Holds the module to its template, on which ranks that do not run it rely."""
        routed, template = self.routed, self.routed.template
        returned = [
            (tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if _is_tensor(leaf) else leaf for leaf in outputs
        ]
        expected = [
            ((rows, *leaf.shape[1:]), leaf.dtype, index in self.wanted) if _is_tensor(leaf) else leaf
            for index, leaf in enumerate(template.leaves)
        ]
        if returned != expected:
            raise ModuleContractError(
                f"{routed.name!r} returned {returned} for {rows} rows where {expected} was expected (shape, dtype, "
                "whether it takes a gradient): except for the number of rows, other ranks rely on shapes, types and "
                "gradients of the sample's step; pad batches like the sample, or leave the module where it is: "
                f"colocate(..., exclude=[{routed.name!r}])"
            )

    # Backward.

    def backward(self, grads: Sequence[torch.Tensor], *, keep: bool) -> list[torch.Tensor]:
        """Returns the gradients of ``inputs``, from those of the ``wanted`` results."""
        routed = self.routed
        if self._is_over:
            raise RuntimeError(
                f"Trying to backward through the graph of {routed.name!r} a second time; its saved values were freed. "
                "Specify retain_graph=True in the first backward."
            )
        self._is_over = not keep
        grads = [_scaled(grad, routed.scale) for grad in routed.move(self._routing, grads, "backward")]
        if routed.is_reducing:  # an earlier call's gradients, before new ones are added to them
            routed.reduce()
        if self._roots is not None:
            work = partial(torch.autograd.backward, self._roots, grads, retain_graph=keep)
            self.executor.compute(routed, work, "backward")
        routed.start_reduction()
        input_grads = []
        for leaf in self._leaves:
            grad, leaf.grad = leaf.grad, None
            input_grads.append(_scaled(torch.zeros_like(leaf) if grad is None else grad, 1 / routed.scale))
        if not keep:
            self._roots, self._leaves = None, []
        if self._own_spec is not None:
            return input_grads
        travels = [routed.batched[index] for index in self.inputs]
        home = routed.move(self._routing, list(compress(input_grads, travels)), "backward", is_back=True)
        moved = iter(home)
        return [next(moved) if there else grad for grad, there in zip(input_grads, travels, strict=True)]


class _Node(torch.autograd.Function):
    """A call in the caller's graph; returns its results, and its token."""

    @staticmethod
    def forward(ctx: Any, call: RoutedCall, results: list[torch.Tensor], anchor: torch.Tensor, *_: Any) -> Any:
        ctx.call = call
        return *results, anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        call: RoutedCall = ctx.call
        executor, keep = call.executor, torch._C._autograd._get_current_graph_task_keep_graph()
        executor.backward_reached(call.routed)
        with executor.in_step():
            input_grads = call.backward(list(map(to_plain, grads[:-1])), keep=keep)
            executor.backward_done(call.routed)
        return None, None, None, *input_grads


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _holds_no_rows(value: Any) -> bool:
    return all(not _is_tensor(leaf) or (not leaf.dim() and not leaf.requires_grad) for leaf in flatten(value)[0])


def _scaled(grad: torch.Tensor, factor: float) -> torch.Tensor:
    """Returns a gradient times a factor; itself, bit for bit, where that is 1."""
    return grad if factor == 1 else grad * factor
