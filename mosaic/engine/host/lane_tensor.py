"""Tensors whose values a lane is still computing.

A placed module returns at once; what it returns are ``LaneTensor``s. They have a shape, a dtype and a place in
the autograd graph, but no storage. What happens to one decides where the work goes:

* an operation on tensors of one lane is queued on that lane, forward and backward (*glue follows its branch*);
* an operation that mixes lanes, needs a value, writes in place or into running statistics, or draws random numbers
  waits for its inputs and runs where it was called (*joins where lanes mix*).

Where an operation runs depends on the program alone and never on timing, and the autograd graph has the same
nodes in the same order as in a plain run, so gradients are summed in the same order: results are equal bit for
bit. A tensor that was joined once counts as an ordinary tensor from then on; this is part of that argument.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch

from mosaic.engine.calls.structure import tensors_of
from mosaic.engine.calls.thread_state import on_lane
from mosaic.engine.calls.torch_functions import look_up
from mosaic.errors import ModuleContractError, UnsupportedModelError

if TYPE_CHECKING:
    from mosaic.backends.base import Lane, Ticket


T = TypeVar("T")
LANE = "mosaic.lane"
"""Where an autograd node keeps the lane of its forward."""


class RunsLaneTensors(Protocol):
    """What a lane tensor asks of the executor that made it."""

    closed: bool

    def value(self, tensor: LaneTensor) -> torch.Tensor:
        """Waits for a tensor's value."""

    def operate(self, first: LaneTensor, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs one operator that has lane tensors among its arguments."""

    def expect_gradient(self, leaf: torch.Tensor) -> None:
        """Prepares a leaf whose gradient a lane may compute."""

    def drain(self) -> None:
        """Waits until the lanes are at rest."""


class LaneTensor(torch.Tensor):
    """A tensor that a lane is computing; made by the executor alone."""

    _executor: RunsLaneTensors
    _lane: Lane
    _ticket: Ticket[list[torch.Tensor]]
    _pick: int
    _joined: torch.Tensor | None
    _joined_at: Any
    _module: str
    _base_of_view: LaneTensor | None
    _replay: Callable[[torch.Tensor], torch.Tensor] | None
    _views: list[weakref.ref[LaneTensor]]
    _refused: Callable[[], Exception] | None
    _node: str | None

    @staticmethod
    def __new__(
        cls: type[LaneTensor],
        like: torch.Tensor,
        executor: RunsLaneTensors,
        lane: Lane,
        ticket: Ticket[list[torch.Tensor]],
        pick: int,
        module: str,
    ) -> LaneTensor:
        """Makes a tensor with the metadata of ``like``, whose value will be ``ticket.wait()[pick]``."""
        made: LaneTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, like.size(), strides=like.stride(), dtype=like.dtype, layout=like.layout, device=torch.device("cpu")
        )
        made._executor = executor
        made._lane = lane
        made._ticket = ticket
        made._pick = pick
        made._joined = None
        made._joined_at = None
        made._module = module
        made._base_of_view = None
        made._replay = None
        made._views = []
        made._refused = None
        made._node = None
        return made

    def value(self) -> torch.Tensor:
        """Waits for the lane and returns the plain tensor, cut from the autograd graph.

        Raises:
            BaseException: What the lane's work raised, after all lanes have come to rest.
        """
        return self._executor.value(self)

    def join(self) -> torch.Tensor:
        """Returns the plain tensor that stands for this one in the caller's autograd graph.

        It is always the same one, unless this tensor got another place in the graph since: by an autograd function that
        says that it wrote into it (``mark_dirty``), or as a leaf that wants a gradient now.
        """
        if self._joined is None or self._joined_at != self._place:
            if self.requires_grad:
                if self.is_leaf:
                    self._executor.expect_gradient(self)
                with torch.enable_grad():
                    return self._stood_for_by(_Join.apply(self))
            return self._stood_for_by(self.value())
        return self._joined

    @property
    def _place(self) -> tuple[Any, bool]:
        """Its place in the autograd graph."""
        return self.grad_fn, self.requires_grad

    def _stood_for_by(self, plain: torch.Tensor) -> torch.Tensor:
        self._joined, self._joined_at = plain, self._place
        return plain

    def _as_shown(self) -> torch.Tensor:
        """Returns a plain tensor that prints as this one would in the plain loop."""
        plain = self.join()
        if not isinstance(plain.grad_fn, _Join._backward_cls):  # type: ignore[attr-defined]
            return plain
        if self.is_leaf:
            return plain.detach().requires_grad_()
        own = type(self.grad_fn).__name__
        shown: Any = type("Shown", (_Shown,), {})
        shown._backward_cls.__name__ = self._node if self._node and own == "CallFunctionBackward" else own
        with torch.enable_grad():
            return shown.apply(plain.detach().requires_grad_())  # type: ignore[no-any-return]

    def note_view(self, base: LaneTensor, replay: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Remembers that this tensor is a view of ``base``, made by ``replay``."""
        self._base_of_view = base
        self._replay = replay
        base._views.append(weakref.ref(self))

    def note_result(self, node: str | None, refused: Callable[[], Exception] | None) -> None:
        """Remembers that a module made it: by which autograd node, and what to raise if somebody writes into it."""
        self._node, self._refused = node, refused

    def join_to_write(self) -> None:
        """Joins this tensor, what it is a view of, and all views of that, so that autograd sees a write in all of them.

        Raises:
            UnforeseenError: Other results of the module have the same memory.
            UnsupportedModelError: One of them was joined before, on its own.
        """
        base = self
        while base._base_of_view is not None:
            base = base._base_of_view
        if base._refused is not None:
            raise base._refused()
        if base is self and not any(ref() is not None for ref in self._views):
            self.join()
            return
        base.join()
        todo = [base]
        while todo:
            above = todo.pop()
            for view in [found for ref in above._views if (found := ref()) is not None]:
                if view.is_leaf and view.requires_grad:  # detached: it shares memory alone
                    view.join()
                elif view._joined is not None and not view._joined._is_view():
                    raise UnsupportedModelError(
                        f"a result of {self._module!r} is written to in place after a view of it was used elsewhere; "
                        f"write to a copy, or leave the module out: colocate(..., exclude=[{self._module!r}])"
                    )
                elif view._joined is None:
                    assert view._replay is not None
                    view._stood_for_by(view._replay(above.join()))
                todo.append(view)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Decides between following the lane and joining it."""
        kwargs = kwargs or {}
        does = look_up(func)
        if does.reads or (does.sets and isinstance(args[0], LaneTensor)):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        found = list(lane_tensors((args, kwargs)))
        _check_thread(found)
        if does.shows and isinstance(args[0], LaneTensor):
            return func(args[0]._as_shown(), *args[1:], **kwargs)
        if does.replaces(kwargs):
            found[0]._executor.drain()
            written = list(lane_tensors((args[0] if args else None, kwargs.get("out"))))
            for tensor in written:
                tensor.join_to_write()
            stands_for = {id(tensor.join()): tensor for tensor in written}
            result = func(*join_all(args), **join_all(kwargs))
            return stands_for.get(id(result), result)
        if does.follows_lane(args, kwargs) and not found[0].is_complex() and _is_one_branch(found):
            for leaf in _leaves((args, kwargs)):
                found[0]._executor.expect_gradient(leaf)
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
            _note_lane(result, found[0]._lane, (args, kwargs))
            return result
        return func(*join_all(args), **join_all(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch calls it with func first
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Queues an operator on its lane, or runs it here; see ``Executor.operate``."""
        first = next(lane_tensors((args, kwargs)))
        _check_thread([first])
        return first._executor.operate(first, func, args, kwargs or {})


class _Join(torch.autograd.Function):
    """The edge between a branch and the caller's graph: waits forward, hands gradients to the lane backward."""

    @staticmethod
    def forward(ctx: Any, tensor: LaneTensor) -> torch.Tensor:
        ctx.branch = (tensor._executor, tensor._lane, tensor._module)
        return tensor.value().detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        executor, lane, module = ctx.branch
        if torch.is_grad_enabled() or isinstance(grad, LaneTensor) or executor.closed:
            return grad
        grad = grad.resolve_conj().resolve_neg()
        # As a tensor of the lane it makes the glue's backward follow the branch, as its forward did.
        return LaneTensor(grad, executor, lane, ReadyTicket([grad]), 0, module)


class _Shown(torch.autograd.Function):
    """A node for a tensor that is printed, under another node's name."""

    @staticmethod
    def forward(ctx: Any, plain: torch.Tensor) -> torch.Tensor:
        return plain.detach()


class ReadyTicket(Generic[T]):
    """A ticket for what is there already."""

    def __init__(self, result: T) -> None:
        self._result = result

    @property
    def done(self) -> bool:
        """True."""
        return True

    @property
    def interval_ns(self) -> tuple[int, int]:
        """Zeros: it took no time."""
        return 0, 0

    def wait(self) -> T:
        """Returns the result."""
        return self._result


def lane_tensors(value: Any) -> Iterator[LaneTensor]:
    """Yields the lane tensors in nested lists, tuples and dicts."""
    return (tensor for tensor in tensors_of(value) if isinstance(tensor, LaneTensor))


def _note_lane(result: Any, lane: Lane, inputs: Any) -> None:
    """Marks the autograd nodes of a branch's operation with its lane, so that their backward runs there too."""
    known = {tensor.grad_fn for tensor in tensors_of(inputs)}
    todo = [tensor.grad_fn for tensor in lane_tensors(result) if tensor.grad_fn is not None]
    while todo:
        node = todo.pop()
        metadata: Any = node.metadata
        if node not in known and node.next_functions and LANE not in metadata:
            metadata[LANE] = lane
            todo.extend(following for following, _ in node.next_functions if following is not None)


def lane_of_backward() -> Lane | None:
    """Returns the lane on which the operation ran whose backward autograd is running now; None for any other."""
    node: Any = torch._C._current_autograd_node()
    found: Lane | None = None if node is None else node.metadata.get(LANE)
    return found


def _leaves(value: Any) -> Iterator[torch.Tensor]:
    """Yields the leaves that want a gradient in nested lists, tuples and dicts."""
    for tensor in tensors_of(value):
        if tensor.requires_grad and tensor.is_leaf:
            yield tensor


def join_all(value: Any) -> Any:
    """Replaces the lane tensors in nested lists, tuples and dicts by what they join to."""
    if isinstance(value, LaneTensor):
        return value.join()
    if type(value) in (list, tuple):
        return type(value)(join_all(item) for item in value)
    if type(value) is dict:
        return {key: join_all(item) for key, item in value.items()}
    return value


def _check_thread(found: list[LaneTensor]) -> None:
    """Lanes get plain values; a lane tensor among them came by another way and could make lanes wait for each other.

    Raises:
        ModuleContractError: This is a lane's thread.
    """
    if found and on_lane():
        name = found[0]._module
        raise ModuleContractError(
            f"a placed module reads a result of {name!r} that is not among its arguments; pass it as an argument, or "
            f"leave one of them out: colocate(..., exclude=[{name!r}])"
        )


def _is_one_branch(found: list[LaneTensor]) -> bool:
    lane = found[0]._lane
    return all(tensor._lane is lane and tensor._joined is None for tensor in found)


def join_joined(leaf: Any) -> Any:
    """Returns what a lane tensor that was joined before joined to, and anything else as it is."""
    return leaf.join() if isinstance(leaf, LaneTensor) and leaf._joined is not None else leaf


def joined(tensor: torch.Tensor) -> torch.Tensor:
    """Returns what a lane tensor joins to, and any other tensor as it is."""
    return tensor.join() if isinstance(tensor, LaneTensor) else tensor
