"""Tensors whose values a lane is still computing.

A placed module returns ``LaneTensor``s at once. They have a shape, a dtype and a place in the autograd graph, but no
storage. What happens to one decides where the work goes:

* a listed function (``torch_functions``) of tensors of one lane runs on that lane, forward and backward (*glue follows
  its branch*);
* everything else waits for its inputs and runs where it is called, on plain tensors.

Where a function runs depends on the program alone and never on timing, and gradients are summed in the plain loop's
order: results are equal bit for bit. So a tensor that was joined once counts as an ordinary tensor from then on.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch._C._dynamo import eval_frame as dynamo
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from mosaic.backends.base import Ticket
from mosaic.engine.calls.obstacles import IS_COMPILED, SHARED_IS_WRITTEN
from mosaic.engine.calls.placed_module import PlacedModule
from mosaic.engine.calls.thread_state import on_lane
from mosaic.engine.calls.torch_functions import attributes_of, look_up
from mosaic.errors import ModuleContractError
from mosaic.find.structure import map_tensors, tensors_in

_CPU = torch.device("cpu")
APPLY: Any = vars(torch._C._FunctionBase)["apply"]
"""``apply`` of autograd functions without its preparation for transforms of ``torch.func``."""


class LaneTensor(torch.Tensor):
    """A tensor that a lane is computing; made by the executor alone."""

    _executor: Any  # see ``HostExecutor``
    _site: PlacedModule
    _ticket: Ticket[list[torch.Tensor | None]]
    _pick: int
    _edge: torch.Tensor
    _edge_of: Any
    _joined: torch.Tensor | None
    _joined_at: Any
    _is_shared: bool

    @staticmethod
    def __new__(
        cls: type[LaneTensor],
        like: torch.Tensor,
        executor: Any,
        site: PlacedModule,
        ticket: Any,  # None until its work is submitted
        pick: int,
        *,
        is_shared: bool = False,
    ) -> LaneTensor:
        """Makes a tensor with the metadata of ``like`` and the value ``ticket.wait()[pick]``."""
        tensor: LaneTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, like.size(), strides=like.stride(), dtype=like.dtype, layout=like.layout, device=_CPU
        )
        tensor._executor = executor
        tensor._site = site
        tensor._ticket = ticket
        tensor._pick = pick
        tensor._joined = tensor._joined_at = tensor._edge_of = None
        tensor._is_shared = is_shared
        return tensor

    def value(self) -> Any:
        """Waits for the lane and returns the plain tensor, cut from the autograd graph; None for a missing gradient."""
        return self._executor.wait(self._ticket)[self._pick]

    def join(self) -> torch.Tensor:
        """Returns the plain tensor that stands for this one in the caller's autograd graph.

        It is the same one until this tensor gets another place in the graph: by an autograd function that wrote into it
        (``mark_dirty``), or as a leaf that now requires a gradient.
        """
        with torch._C.DisableTorchFunctionSubclass():
            place = self.grad_fn, self.requires_grad
            if self._joined is None or self._joined_at != place:
                is_inside = torch._C._are_functorch_transforms_active()
                # A transform of torch.func gets a plain tensor from outside of it.
                outside: Any = temporarily_clear_interpreter_stack() if is_inside else nullcontext()
                with outside, torch.set_grad_enabled(self.requires_grad):
                    if self._edge_of is not None and self._edge_of is self.grad_fn:  # a lane has used it
                        self._joined = self._edge
                        self._joined.data = self.value()
                        self._joined.register_hook(to_plain)
                    else:
                        self._joined = _Join.apply(self, None) if self.requires_grad else self.value()
                    self._joined_at = place
            assert self._joined is not None
            vars(self._joined).update(attributes_of(self))
            return self._joined

    def edge(self) -> torch.Tensor:
        """Returns for a lane's call what ``join`` returns, without values: its gradient is that of all uses."""
        with torch._C.DisableTorchFunctionSubclass():
            if not self.requires_grad or self.is_leaf:
                return self
            if self._edge_of is not self.grad_fn:
                empty = torch.empty_strided(self.size(), self.stride(), dtype=self.dtype)
                self._edge, self._edge_of = _Join.apply(self, empty), self.grad_fn
            return self._edge

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Decides between following the lane and joining it."""
        kwargs = kwargs or {}
        if dynamo.get_eval_frame_callback() is not None:  # torch compiles the caller
            dynamo.set_eval_frame(None)
            tensor = next(each for each in tensors_in((args, kwargs)) if isinstance(each, LaneTensor))
            raise tensor._executor.refuse_use(tensor, IS_COMPILED)
        does = look_up(func)
        if does.reads or (does.sets and isinstance(args[0], LaneTensor)):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        pending = [tensor for tensor in tensors_in((*args, *kwargs.values())) if isinstance(tensor, LaneTensor)]
        if on_lane():
            # Lanes get plain values; this came by another way and could make lanes wait for each other.
            name = pending[0]._site.name
            raise ModuleContractError(
                f"a placed module reads a result of {name!r} that is not among its arguments; pass it as an argument, "
                f"or leave one of them out: colocate(..., exclude=[{name!r}])"
            )
        if does.name == "grad":  # of autograd: its arguments are places in the graph
            with torch._C.DisableTorchFunctionSubclass():
                return map_tensors(to_plain, func(*args, **kwargs))
        replaces = does.replaces(kwargs)
        into = tensors_in((args[0] if args else None, kwargs.get("out"))) if replaces else does.written(args, kwargs)
        written = {id(tensor): tensor for tensor in into if isinstance(tensor, LaneTensor)}
        if written or replaces:
            pending[0]._executor.drain()
            for tensor in written.values():
                records = torch.is_grad_enabled() or (tensor.requires_grad and not tensor.is_leaf)
                if tensor._is_shared and records:
                    # Autograd has to see the write in all tensors that have this memory.
                    raise tensor._executor.refuse_use(tensor, SHARED_IS_WRITTEN)
            stands_for = {id(tensor.join()): tensor for tensor in written.values()}
            result = func(*map_tensors(joined, args), **map_tensors(joined, kwargs))
            return stands_for.get(id(result), result)
        if does.follows_lane(args, kwargs) and _is_one_branch(pending):
            with torch._C.DisableTorchFunctionSubclass():  # what it asks of its arguments needs no values
                result = pending[0]._executor.follow(pending[0], func, args, kwargs)
            if result is not NotImplemented:
                return result
        return func(*map_tensors(joined, args), **(map_tensors(joined, kwargs) if kwargs else {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch calls it with func first
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Adds gradients on their lane, as autograd does between calls; whatever else comes here waits."""
        kwargs = kwargs or {}
        if func is torch.ops.aten.add.Tensor and not kwargs and all(isinstance(term, LaneTensor) for term in args):
            return args[1]._executor.add(*args)
        stands_for = {}

        def value(tensor: torch.Tensor) -> torch.Tensor:
            if isinstance(tensor, LaneTensor):
                plain: torch.Tensor = tensor.value()
                stands_for[id(plain)] = tensor
                return plain
            return tensor

        result = func(*map_tensors(value, args), **map_tensors(value, kwargs))
        return map_tensors(lambda tensor: stands_for.get(id(tensor), tensor), result)


# Its lines would come into the graphs of code that torch compiles.
_decides: Any = LaneTensor.__torch_function__.__func__  # type: ignore[attr-defined]
_decides._torchdynamo_disable, _SKIP = True, dynamo._FrameAction.SKIP
dynamo.set_code_exec_strategy(_decides.__code__, dynamo._FrameExecStrategy(_SKIP, dynamo._FrameAction.DEFAULT))


class _Join(torch.autograd.Function):
    """The edge between a branch and the caller's graph."""

    apply = APPLY

    @staticmethod
    def forward(ctx: Any, tensor: LaneTensor, empty: torch.Tensor | None) -> torch.Tensor:
        ctx.is_leaf = tensor.is_leaf
        ctx.set_materialize_grads(False)  # what gets no gradient in the plain loop gets none here
        plain: torch.Tensor = tensor.value().detach() if empty is None else empty
        return plain

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return to_plain(grads[0]) if ctx.is_leaf else grads[0], None


def to_plain(grad: torch.Tensor) -> torch.Tensor:
    """Returns the gradient that a lane computes; any other as it is."""
    if not isinstance(grad, LaneTensor):
        return grad
    plain, name = grad.value(), grad._site.name
    if plain is None:
        raise ModuleContractError(
            f"the backward of {name!r} returned no gradient for one of its inputs, of which autograd expects "
            f"one; return zeros, or leave it out: colocate(..., exclude=[{name!r}])"
        )
    return plain  # type: ignore[no-any-return]


def waits_for_plain(tensor: torch.Tensor) -> None:
    """Makes a tensor's gradient plain before the caller's own autograd node gets it."""
    node = tensor.grad_fn
    if node is not None and type(node).__name__ not in ("CallFunctionBackward", "_JoinBackward"):
        tensor.register_hook(to_plain)


def _is_one_branch(pending: list[LaneTensor]) -> bool:
    lane = pending[0]._site.lane
    return all(
        tensor._site.lane is lane and tensor._joined is None and not (tensor.requires_grad and tensor.is_leaf)
        for tensor in pending
    )


def join_joined(leaf: Any) -> Any:
    """Returns what a lane tensor that was joined before joined to, and anything else as it is."""
    return leaf.join() if isinstance(leaf, LaneTensor) and leaf._joined is not None else leaf


@cache
def patch_logging() -> None:
    """Has records wait for lanes as they are made: handlers format them under a lock, for which a lane may wait."""
    make = logging.getLogRecordFactory()
    logging.setLogRecordFactory(lambda *args, **kwargs: make(*map_tensors(joined, args), **kwargs))


def joined(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.join() if isinstance(tensor, LaneTensor) else tensor
