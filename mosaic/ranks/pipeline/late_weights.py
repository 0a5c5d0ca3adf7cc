"""Gradients of matrices that wait: backward computes those of inputs, and those of weights later or elsewhere.

A backward for inputs is what other ranks wait for; one for weights fills time in which a rank would wait (zero-bubble
schedules, arXiv 2401.10241). Products of an activation and a matrix are found as they are called; what remains, such as
scales of norms, biases and matrices whose gradients hooks wait for, has its gradient with the inputs'. Only the chunk's
own backward leaves gradients for later: one that a layer or a loss runs, such as ``torch.autograd.grad``, is torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from mosaic.engine.calls.thread_state import is_transformed, saved_tensor_hooks

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
