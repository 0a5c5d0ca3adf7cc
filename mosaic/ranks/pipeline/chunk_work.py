"""What the chunks of one rank compute in a step: forwards, backwards and gradients of the user's own model.

Lanes of the rank may ask at the same time. There is one generator of random numbers, so forwards that draw take turns,
with each other and with backwards that make activations again: those set the generator back while they do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from mosaic.engine.calls.thread_state import is_transformed, saved_tensor_hooks
from mosaic.errors import UnsplittableError
from mosaic.find.random_numbers import RandomState, torch_state
from mosaic.parts.parted_model import PartedModel
from mosaic.parts.pieces import join_pieces
from mosaic.parts.strategies import Again
from mosaic.pipelining.schedule import TaskName
from mosaic.pipelining.tasks import ActionKind
from mosaic.ranks.pipeline.executing.program import Edge
from mosaic.ranks.pipeline.random_numbers import DrawnNumbers
from mosaic.ranks.pipeline.step_data import StepData
from mosaic.ranks.pipeline.transports.transport import Tensors, TensorSpec

Loss = Callable[[Any, Mapping[str, Any]], Tensor]
"""From the model's output and the microbatch to one number."""


def checked_loss(loss: Loss, output: Any, kwargs: Mapping[str, Any], model: PartedModel) -> Tensor:
    """Computes a loss.

    Raises:
        UnsplittableError: It draws random numbers, or trains something that is no parameter of the model.
    """
    before, found = torch_state(model.device), loss(output, kwargs)
    if not before.is_same(torch_state(model.device)):
        raise UnsplittableError(
            "the loss draws random numbers, which ranks without the last layer do not; draw them in the model, or in "
            "the loop, and give them with the microbatch"
        )
    trained = list(_trained(found, until=output))
    known = {id(one) for one in model.model.parameters()} if trained else ()
    other = next((one for one in trained if id(one) not in known), None)
    if other is not None:
        raise UnsplittableError(
            f"the loss trains a tensor of shape {tuple(other.shape)} that is no parameter of the model; ranks without "
            "the last layer would not see its gradient: make the model compute with it"
        )
    return found


def _trained(loss: Tensor, *, until: Any) -> Iterator[Tensor]:
    """Gives the leaves that get a gradient of a loss otherwise than through the model's output."""
    seen = {one.grad_fn for one in pytree.tree_leaves(until) if isinstance(one, Tensor)}
    left = [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        left += [before for before, _ in node.next_functions]


Product = tuple[Tensor, Tensor, Tensor]
"""A matrix whose gradient is due, what was multiplied by it, and the gradient of the result."""


class LateWeights:
    """Products of one forward whose matrices get their gradients when ``run`` is called."""

    def __init__(self) -> None:
        self._due: list[Product] = []
        self._task = -1  # torch's number of the backward that leaves gradients for later

    def backward(self, tensors: Sequence[Tensor], gradients: Sequence[Tensor] | None = None) -> None:
        """Runs autograd from what left a chunk; gradients of its matrices wait for ``run``."""

        def begin(_: Tensor) -> None:
            self._task = torch._C._current_graph_task_id()

        for one in tensors:
            one.register_hook(begin)
        torch.autograd.backward(tensors, gradients)

    @torch.no_grad()
    def run(self) -> None:
        """Adds the gradients that are due to those of the matrices."""
        due, self._due = self._due, []
        for weight, given, gradient in due:
            found = (gradient.t() @ given).to(weight.dtype)
            weight.grad = found if weight.grad is None else weight.grad.add_(found)

    def note(self, product: Product) -> bool:
        """Keeps a product until ``run``; returns whether it did, which it does in ``backward`` alone."""
        is_own = torch._C._current_graph_task_id() == self._task
        if is_own:
            self._due.append(product)
        return is_own

    def collecting(self) -> TorchFunctionMode:
        """Returns a context; products of trained matrices that are called in it are noted in ``backward``.

        Those under hooks on saved tensors that are entered in it, such as a checkpoint's, are not: they may be called
        a second time outside of it.
        """
        return _Collecting(self)


class _Collecting(TorchFunctionMode):
    def __init__(self, late: LateWeights) -> None:
        super().__init__()
        self._late = late
        self._hooks: object = None

    def __enter__(self) -> Self:
        self._hooks = saved_tensor_hooks()
        super().__enter__()
        return self

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is functional.linear and not kwargs and torch.is_grad_enabled():
            given, weight, *bias = args
            if _may_wait(weight) and not given.is_nested and not self._steps_aside():
                if torch.is_autocast_enabled(given.device.type) and given.dtype is not torch.float64:
                    given = given.to(torch.get_autocast_dtype(given.device.type))
                flat = given.reshape(given.shape[:-1].numel(), given.shape[-1])
                made = _Linear.apply(flat, weight, bias[0] if bias else None, self._late)
                return made.view(*given.shape[:-1], made.shape[-1])  # no view made in a Function may be written into
        return func(*args, **(kwargs or {}))

    def _steps_aside(self) -> bool:
        """Whether a layer differentiates, or runs what may run again, by itself."""
        return is_transformed() or forward_ad._current_level >= 0 or saved_tensor_hooks() != self._hooks


def _may_wait(weight: Tensor) -> bool:
    """Whether a matrix trains, and no hook waits for its gradient, which backward then has to compute."""
    is_hooked = weight._backward_hooks or weight._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    return weight.is_leaf and weight.requires_grad and weight.ndim == 2 and not is_hooked


class _Linear(torch.autograd.Function):
    """``x W^T`` whose backward leaves the gradient of W to ``LateWeights``."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor, bias: Tensor | None, late: LateWeights) -> Tensor:
        ctx.save_for_backward(given)
        ctx.weight, ctx.late = weight, late  # what a checkpoint saves is a copy, whose gradient nobody would see
        ctx.bias_dtype = None if bias is None else bias.dtype
        return functional.linear(given, weight.to(given.dtype), None if bias is None else bias.to(given.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (given,), weight = ctx.saved_tensors, ctx.weight
        waits = ctx.late.note((weight, given, gradient))
        needs_given, _, needs_bias, _ = ctx.needs_input_grad
        for_given = gradient @ weight.to(gradient.dtype) if needs_given else None
        for_weight = None if waits else (gradient.t() @ given).to(weight.dtype)
        for_bias = gradient.sum(0).to(ctx.bias_dtype) if needs_bias else None
        return for_given, for_weight, for_bias, None


Scale = Callable[[Tensor], Tensor]
"""Of a loss before its backward, as ``GradScaler.scale``."""


@dataclass(slots=True, kw_only=True)
class _Kept:
    """Of a forward until its backward has run."""

    leaves: Mapping[TaskName, Tensors]
    outputs: Mapping[str, Tensors]
    """By module what left; the loss where the model ends."""
    late: LateWeights | None


class ChunkWork:
    """Computes the tasks of one rank in one step, as an executor asks for them.

    Args:
        model: The rank's chunks.
        loss: Makes a number of the model's output.
        data: The step's.
        scale: Scales losses before their backward.
        numbers: For the plain loop's random numbers; None: forwards draw as they come.
        states: Of the generators before each microbatch of the plain loop, where there are ``numbers``.
        reduce: Called with each chunk whose gradients are there; None: each chunk is on one rank.
        turn: A lock that ranks which are threads of one process share, as they share its generators.
    """

    def __init__(
        self,
        model: PartedModel,
        loss: Loss,
        data: StepData,
        *,
        numbers: DrawnNumbers | None = None,
        states: Sequence[RandomState] = (),
        scale: Scale | None = None,
        reduce: Callable[[int], None] | None = None,
        turn: AbstractContextManager[Any] | None = None,
    ) -> None:
        self._model, self._loss, self._data = model, loss, data
        self._numbers, self._states, self._scale, self._reduce = numbers, states, scale, reduce
        self._draws = [numbers is None or numbers.draw(one) for one in data.microbatches]
        self._turn: AbstractContextManager[Any] = (turn or threading.RLock()) if any(self._draws) else nullcontext()
        self._kept: dict[TaskName, _Kept] = {}
        self._late: dict[TaskName, LateWeights] = {}
        self.losses: dict[int, Tensor] = {}
        """Of the microbatches that end here."""

    def forward(self, task: TaskName, inputs: Mapping[TaskName, Tensors]) -> Mapping[TaskName, Tensors]:
        """Returns for each forward that this one feeds what it is given; nothing where the model ends."""
        data = self._data
        wanted = data.wanted.get(task, {})
        leaves = {
            source: tuple(_leaf(one, needs=source in wanted) for one in given) for source, given in inputs.items()
        }
        late = LateWeights() if task in data.apart else None
        kwargs = data.kwargs_of(task)
        with self._turn:  # looking at what chunks hand over sets the generator back, too
            received = self._received(task, leaves)
        given = kwargs, received, data.strategies.get(task, ())
        has_backward = task in data.backward_forwards
        with torch.set_grad_enabled(has_backward), nullcontext() if late is None else late.collecting():
            found = self._run(task, *given, again=nullcontext if late is None else late.collecting)
        if data.ends(task):
            with self._turn, self._model.computing():
                loss = checked_loss(self._loss, found, kwargs, self._model)
            self.losses[task.microbatch] = loss.detach()
            mean = loss / data.averaged_over
            found = {"": (mean if self._scale is None else self._scale(mean),)}
        else:
            with torch.set_grad_enabled(has_backward):
                found = data.gathered(task, found)
        if has_backward:
            self._kept[task] = _Kept(leaves=leaves, outputs=found, late=late)
        return {
            target: tuple(one.detach() for name in data.carried(Edge(task, target)) for one in found[name])
            for target in data.targets.get(task, ())
        }

    def backward(self, task: TaskName, gradients: Mapping[TaskName, Tensors]) -> Mapping[TaskName, Tensors]:
        """Adds gradients of weights; returns those of what came in, for each backward that takes one."""
        forward = _forward_of(task)
        kept = self._kept.pop(forward)
        with self._turn if forward in self._data.strategies else nullcontext():
            ends, outputs = self._data.ends(forward), kept.outputs
            due = (outputs[""], None) if ends else self._due(forward, outputs, gradients)
            if kept.late is None:
                torch.autograd.backward(*due)
            else:
                kept.late.backward(*due)
                self._late[forward] = kept.late
        wanted = self._data.wanted.get(forward, {})
        return {
            wanted[source]: tuple(_gradient(one) for one in leaves if one.is_floating_point())
            for source, leaves in kept.leaves.items()
            if source in wanted
        }

    def weights(self, task: TaskName) -> None:
        """Adds the gradients of weights that its backward has left."""
        self._late.pop(_forward_of(task)).run()

    def free(self, task: TaskName) -> None:
        """Lets go of what a forward kept."""
        self._kept.pop(task, None)

    def reduce(self, chunk: int) -> None:
        """Begins to sum a chunk's gradients over replicas."""
        if self._reduce is not None:
            self._reduce(chunk)

    def specs(self, edge: Edge) -> tuple[TensorSpec, ...]:
        """Returns what crosses an edge; gradients are of what its forward handed over."""
        is_back = edge.source.kind is not ActionKind.FORWARD
        ends = Edge(_forward_of(edge.target), _forward_of(edge.source)) if is_back else edge
        kwargs = self._data.leaving_kwargs_of(ends.source)
        with self._turn:
            likes = self._model.boundary_like(ends.source.chunk, kwargs)
        found = (TensorSpec.of(one) for name in self._data.carried(ends) for one in likes[name])
        return tuple(spec for spec in found if not is_back or spec.dtype.is_floating_point)

    def _run(self, task: TaskName, kwargs: Mapping[str, Any], *given: Any, again: Again) -> Any:
        numbers, data = self._numbers, self._data
        if not self._draws[task.microbatch]:
            return self._model.forward(task.chunk, kwargs, *given, draws="none", again=again)
        if numbers is None:
            with self._turn:
                return self._model.forward(task.chunk, kwargs, *given, again=again)
        assert not data.is_cut(task)  # pieces would draw other numbers: planning has none of such microbatches
        with self._turn, numbers.numbers_of(self._states[task.microbatch]):
            return self._model.forward(task.chunk, kwargs, *given, draws="all", again=again)

    def _received(self, task: TaskName, leaves: Mapping[TaskName, Tensors]) -> dict[str, Tensors]:
        """By module what came in: its pieces one after the other."""
        pieces: dict[str, list[tuple[int, Tensors]]] = {}
        for source, tensors in leaves.items():
            likes = self._model.boundary_like(source.chunk, self._data.kwargs_of(source))
            at = 0
            for name in self._data.carried(Edge(source, task)):
                pieces.setdefault(name, []).append((source.piece, tensors[at : at + len(likes[name])]))
                at += len(likes[name])
        return {
            name: join_pieces([tensors for _, tensors in sorted(found, key=lambda pair: pair[0])])
            for name, found in pieces.items()
        }

    def _due(
        self, forward: TaskName, outputs: Mapping[str, Tensors], gradients: Mapping[TaskName, Tensors]
    ) -> tuple[Tensors, Tensors]:
        """Returns what left and has a gradient, and for each the sum of what its readers sent."""
        sums: dict[tuple[str, int], Tensor] = {}
        for reader, found in gradients.items():
            names = self._data.carried(Edge(forward, _forward_of(reader)))
            places = [(name, at) for name in names for at, one in enumerate(outputs[name]) if one.is_floating_point()]
            for place, gradient in zip(places, found, strict=True):
                sums[place] = sums[place] + gradient if place in sums else gradient
        due = {place: grad for place, grad in sums.items() if outputs[place[0]][place[1]].requires_grad}
        return tuple(outputs[name][at] for name, at in due), tuple(due.values())


def _forward_of(task: TaskName) -> TaskName:
    return TaskName(task.chunk, ActionKind.FORWARD, task.microbatch, task.piece)


def _leaf(tensor: Tensor, *, needs: bool) -> Tensor:
    found = tensor.detach()
    return found.requires_grad_() if needs and found.is_floating_point() else found


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
