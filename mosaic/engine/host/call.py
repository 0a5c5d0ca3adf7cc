"""One call on a lane, of a placed module or of a function between modules: its forward and its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import is_
from typing import Any

import torch
from torch.autograd.graph import Node, _engine_run_backward, get_gradient_edge
from torch.utils import _pytree as pytree

from mosaic.engine.calls.branch_graph import capture, find_uses
from mosaic.engine.calls.hidden import ModuleState, has_hooks
from mosaic.engine.calls.obstacles import Obstacle
from mosaic.engine.calls.placed_module import PlacedModule
from mosaic.engine.calls.signature import Arguments, Signature, layout_of
from mosaic.engine.calls.thread_state import Applied, ThreadState
from mosaic.engine.host.lane_tensor import APPLY, LaneTensor
from mosaic.errors import ModuleContractError, UnforeseenError, UnsupportedModelError
from mosaic.find.random_numbers import LaneRandomness
from mosaic.find.restore import same
from mosaic.find.structure import Nesting, flatten, flatten_call, versions_of

_VALUES = "let its course depend on its arguments' shapes alone"
_EARLIER = "change it before the model's call or the block"


@dataclass(eq=False)
class Call:
    """State of one call from its launch to the end of its backward.

    It must not refer to the lane tensors that it returns: they refer to it through the autograd graph, and a
    cycle through that graph is never collected.
    """

    executor: Any  # see ``HostExecutor``
    site: PlacedModule  # the module, or the branch of a function
    run: Callable[..., Any] | None
    arguments: Arguments | None
    signature: Signature
    generator: tuple[torch.Generator, torch.Tensor] | None  # and the state in which it must end
    origin: str  # the caller's line
    state: ModuleState | None = None  # of the module at the time of the call
    is_glue: bool = False  # a function between modules

    def __post_init__(self) -> None:
        arguments, state = self.arguments, self.state
        assert arguments is not None
        self.parameters = state.trained if state is not None and arguments.grad else []
        self._versions = versions_of(arguments.tensors)
        self._likes = [(tensor.size(), tensor.dtype) for tensor in arguments.differentiable]
        self._has_leaf = any(tensor.is_leaf for tensor in arguments.differentiable)
        self._inputs: list[torch.Tensor] = []  # leaves of the branch's own graph
        self._ends: list[Node] = []  # of their gradients
        self._arrived: list[torch.Tensor | None] = []  # those gradients
        self._aliases: list[torch.Tensor] = []  # the module's view of them
        self._roots: list[torch.Tensor] = []
        self._captured: list[torch.Tensor | None] = []
        self._uses_apart = False

    # Forward.

    def forward(self) -> list[torch.Tensor | None]:
        """Runs on the lane: calls the module on aliases of its inputs; returns its tensors, cut from its graph."""
        run, arguments = self.run, self.arguments
        self.run = self.arguments = None
        assert run is not None and arguments is not None, "a call ran twice"  # noqa: PT018
        try:
            try:
                with Applied(arguments.state):
                    inputs = self._alias(arguments)
                    args, kwargs = arguments.nesting.unflatten(inputs)
                    holds = (
                        None
                        if self.is_glue or arguments.nesting.names is not None
                        else flatten_call(tuple(args), kwargs)
                    )
                    if self.generator is None:
                        result = arguments.context.run(run, *args, **kwargs)
                    else:
                        with LaneRandomness(self.generator[0]):
                            result = arguments.context.run(run, *args, **kwargs)
                    leaves, spec = flatten(result)
                    if holds is not None:
                        self._check_containers(holds, flatten_call(tuple(args), kwargs))
            finally:  # an error, too, may come of what is another than it was
                self._check_hidden(arguments)
        except BaseException as error:
            add_place(error, f"in {run.__name__}, which follows" if self.is_glue else "in module", self)
            raise
        outputs = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}.values())
        if not self.is_glue:
            self._check(inputs, leaves, spec, outputs)
        self._roots = [t for t, o in zip(outputs, self.signature.outputs, strict=True) if o.same_input is None]
        self._keep_uses_apart()
        return [tensor.detach() for tensor in self._roots]

    def _alias(self, arguments: Arguments) -> list[Any]:
        values: dict[int, torch.Tensor] = {}
        wanted = {id(tensor) for tensor in arguments.differentiable}
        aliased = []
        for leaf in arguments.leaves:
            if not isinstance(leaf, torch.Tensor):
                aliased.append(leaf)
                continue
            if id(leaf) not in values:
                value = leaf.value() if isinstance(leaf, LaneTensor) else leaf
                if id(leaf) in wanted:
                    value = self._input(value, is_leaf=leaf.is_leaf)
                values[id(leaf)] = value
            aliased.append(values[id(leaf)])
        return aliased

    def _input(self, value: torch.Tensor, *, is_leaf: bool) -> torch.Tensor:
        """Returns an input for the branch's own graph.

        It ends in a leaf whose gradient is kept as it arrives; ``grad`` would have the leaf's own strides. It is a leaf
        itself only if the caller's is one, which autocast casts once, and others at each use.
        """
        leaf, at, arrived = value.detach().requires_grad_(), len(self._arrived), self._arrived
        alias = leaf if is_leaf else leaf.view_as(leaf)
        end: Any = get_gradient_edge(leaf).node if is_leaf else alias.grad_fn.next_functions[0][0]  # type: ignore[union-attr]

        def keep(grads: Sequence[torch.Tensor | None]) -> tuple[None]:
            (arrived[at],) = grads
            return (None,)

        end.register_prehook(keep)
        self._inputs.append(leaf)
        self._ends.append(end)
        self._aliases.append(alias)
        arrived.append(None)
        return alias

    def _check(self, inputs: list[Any], leaves: list[Any], spec: pytree.TreeSpec, outputs: list[torch.Tensor]) -> None:
        expected = self.signature
        layouts = [layout_of(tensor, tensor.requires_grad) for tensor in outputs]
        came = {id(leaf): index for index, leaf in enumerate(inputs) if isinstance(leaf, torch.Tensor)}
        values = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        if (
            layouts != expected.layouts
            or spec != expected.spec
            or [came.get(id(tensor)) for tensor in outputs] != [output.same_input for output in expected.outputs]
            or not same([*map(_exact, values)], [*map(_exact, expected.values)])
        ):
            raise self._unforeseen(
                f"it returned {layouts} (shape, dtype, requires_grad, strides) and {values}, where its first call with "
                f"inputs of this kind had returned {expected.layouts} and {expected.values}, or other inputs: its "
                "results depend on values",
                _VALUES,
            )
        if self.generator is not None and not torch.equal(self.generator[0].get_state(), self.generator[1]):
            raise self._unforeseen(
                "it drew another number of random numbers than at its first call with inputs of this kind", _VALUES
            )

    def _keep_uses_apart(self) -> None:
        """Keeps the gradients of an input's uses apart where it has several, or none."""
        expected = self.signature.edges
        self._uses_apart = not len(expected) == len(self._aliases) == len(set(expected))
        if not self._aliases or (self.is_glue and not self._uses_apart):
            return
        uses = find_uses([tensor for tensor in self._roots if tensor.requires_grad], self._aliases)
        if tuple(use.input for use in uses) != expected:
            raise self._unforeseen(
                "it used its inputs in another way than at its first call with inputs of this kind", _VALUES
            )
        if self._uses_apart:
            capture(uses, self._captured)

    def _check_containers(self, before: tuple[list[Any], Nesting], after: tuple[list[Any], Nesting]) -> None:
        """Lists and dicts among the arguments are the lane's own, and what is written there would be lost."""
        if before[1] is not after[1] or not all(map(is_, before[0], after[0])):
            raise self._unforeseen("it writes into a list or dict among its inputs", "let it write to a copy")

    def _check_hidden(self, arguments: Arguments) -> None:
        name, state = self.site.name, self.state
        written = "an input" if self._versions != versions_of(arguments.tensors) else None
        if state is not None:
            written = written or state.written(writes_buffers=self.signature.writes_buffers)
            changed = state.changed() if written is None else written if written == "a buffer" else None
            if changed is not None:
                raise self._unforeseen(f"{changed} was changed while its lane had not finished with it", _EARLIER)
        if written is not None:
            of = "of a function that follows" if self.is_glue else "of"
            raise ModuleContractError(
                f"{written} {of} {name!r} was written to while its lane had not finished with it (called at "
                f"{self.origin}); write to a copy, {_EARLIER}, or leave it out: {self.executor.without_it.format(name)}"
            )

    def _unforeseen(self, what: str, remedy: str) -> UnforeseenError:
        return refuse(self.site, what, remedy, origin=self.origin, without_it=self.executor.without_it)

    # Backward.

    def launch_backward(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Runs in the caller's backward: submits the module's backward to its lane and returns pending gradients.

        Where a leaf's gradient is among them, a parameter has hooks, or an input was not reached, they are waited for.
        """
        executor, site, edges = self.executor, self.site, self.signature.edges
        if torch.is_grad_enabled():
            raise UnsupportedModelError(
                f"create_graph=True through {site.name!r}: gradients of gradients do not work across lanes; run this "
                "part of the loop inside `with handle.disabled():`"
            )
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        # torch.autograd.grad and backward(inputs=...) ask for some gradients only and never for the anchor's.
        only_asked = not torch._C._will_engine_execute_node(site.anchor_node)
        by_caller = only_asked or has_hooks(self.parameters)
        executor.backwards.begin()
        if not by_caller:
            executor.backwards.reach(site, self.parameters)
        if not keep:
            site.in_flight.discard(self)
        work: Callable[[], list[torch.Tensor | None]] = partial(self.backward, grads, keep=keep, by_caller=by_caller)
        if torch.is_autocast_enabled("cpu"):
            work = Applied(ThreadState.capture())(work)
        ticket = executor.submit(site, "glue" if self.is_glue else "backward", work, executor.inputs_of(grads, site))
        picks, reached_from = {pick for pick, grad in enumerate(grads) if grad is not None}, self.signature.reached_from
        if by_caller or self._has_leaf or any(picks.isdisjoint(results) for results in reached_from or ()):
            computed = list(executor.wait(ticket))
            return computed + [None] * (len(edges) + len(self.parameters) - len(computed))
        pending = [LaneTensor(_blank(*self._likes[i]), executor, site, ticket, edge) for edge, i in enumerate(edges)]
        return [*pending, *[None] * len(self.parameters)]

    def backward(
        self, grads: Sequence[torch.Tensor | None], *, keep: bool, by_caller: bool
    ) -> list[torch.Tensor | None]:
        """Runs on the lane: backward through the module; returns the gradient of each use of an input.

        ``by_caller`` leaves the parameters' ``grad`` alone and returns their gradients behind the others.
        """
        if not self._roots:
            raise RuntimeError(
                f"Trying to backward through the graph of {self.site.name!r} a second time; its saved values were "
                "freed. Specify retain_graph=True in the first backward."
            )
        self._captured[:] = [None] * len(self.signature.edges)
        values = [grad.value() if type(grad) is LaneTensor else grad for grad in grads]
        roots = tuple([root for root, grad in zip(self._roots, values, strict=True) if grad is not None])
        reached = tuple([grad for grad in values if grad is not None])
        gradients: list[torch.Tensor | None] = []
        try:
            if by_caller and roots:
                wanted = [*self._inputs, *self.parameters]
                with _without_hooks(self.parameters):
                    gradients = list(torch.autograd.grad(roots, wanted, reached, retain_graph=keep, allow_unused=True))
            elif roots:  # torch.autograd.backward would compare shapes in Python, which the caller's engine has done
                _engine_run_backward(roots, reached, keep, False, (), allow_unreachable=True, accumulate_grad=True)
        except BaseException as error:
            add_place(error, "in the backward of module", self)
            raise
        by_input = gradients or self._arrived
        gathered = list(self._captured) if self._uses_apart else [by_input[index] for index in self.signature.edges]
        returned = [*gathered, *gradients[len(self._inputs) :]]
        self._arrived[:] = [None] * len(self._arrived)
        self._captured[:] = []
        if not keep:
            self._roots, self._inputs, self._ends, self._arrived, self._aliases = [], [], [], [], []
        return returned


def _exact(value: Any) -> tuple[type, Any]:
    """Returns what two values have in common that are the same for all code: 1 equals True, and 0.0 equals -0.0."""
    return type(value), repr(value) if isinstance(value, float) else value


@lru_cache(maxsize=1000)
def _blank(size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor without values; made once, since torch lets other threads run while it makes one."""
    return torch.empty(size, dtype=dtype, device="meta")


@contextmanager
def _without_hooks(parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """Leaves the hooks on gradients of parameters to the caller's backward, which gets these gradients."""
    hooked = [(parameter, parameter._backward_hooks) for parameter in parameters if parameter._backward_hooks]
    for parameter, _ in hooked:
        parameter._backward_hooks = None
    try:
        yield
    finally:
        for parameter, hooks in hooked:
            parameter._backward_hooks = hooks


def add_place(error: BaseException, where: str, call: Call) -> None:
    if not any(note.startswith("raised in") for note in getattr(error, "__notes__", ())):
        error.add_note(f"raised {where} {call.site.name!r}, called at {call.origin}")


def refuse(site: PlacedModule, what: str, remedy: str, *, origin: str, without_it: str) -> UnforeseenError:
    """Keeps a module off its lane from now on; returns what to raise for the present call."""
    site.obstacle = Obstacle(what, remedy=remedy)
    return UnforeseenError(f"{site.name!r}, called at {origin}: {what}; {remedy}, or {without_it.format(site.name)}")


class CallFunction(torch.autograd.Function):
    """The node that stands for a call in the caller's autograd graph."""

    apply = APPLY

    @staticmethod
    def forward(ctx: Any, call: Call, outputs: list[LaneTensor], *edges: torch.Tensor) -> Any:
        """Returns the call's lane tensors.

        ``edges`` are the site's anchor, the differentiable inputs, once for each use, and the parameters. Those get
        no gradient through here (the lane adds to their ``grad``) unless it is requested by name or has hooks.
        """
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *[o for o, info in zip(outputs, call.signature.new_outputs, strict=True) if not info.differentiable]
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, None, *ctx.call.launch_backward(grads)
