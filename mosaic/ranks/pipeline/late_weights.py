"""Gradients of matrices that wait: backward computes those of inputs, and those of weights later or elsewhere.

A backward for inputs is what other ranks wait for; one for weights fills time in which a rank would wait (zero-bubble
schedules, arXiv 2401.10241). Products of an activation and a matrix are found as they are called; what remains, such as
scales of norms, biases and matrices whose gradients hooks wait for, has its gradient with the inputs'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

Product = tuple[Tensor, Tensor, Tensor]
"""A matrix whose gradient is due, what was multiplied by it, and the gradient of the result."""


class LateWeights:
    """Products of one forward whose matrices get their gradients when ``run`` is called."""

    def __init__(self) -> None:
        self._due: list[Product] = []

    @torch.no_grad()
    def run(self) -> None:
        """Adds the gradients that are due to those of the matrices."""
        due, self._due = self._due, []
        for weight, given, gradient in due:
            flat = gradient.reshape(-1, gradient.shape[-1])
            found = (flat.t() @ given.reshape(-1, given.shape[-1])).to(weight.dtype)
            weight.grad = found if weight.grad is None else weight.grad.add_(found)

    def note(self, product: Product) -> None:
        """Keeps a product until ``run``."""
        self._due.append(product)

    def collecting(self) -> TorchFunctionMode:
        """Returns a context; products of trained matrices that are called in it are noted when their backward runs."""
        return _Collecting(self)


class _Collecting(TorchFunctionMode):
    def __init__(self, late: LateWeights) -> None:
        super().__init__()
        self._late = late

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is functional.linear and not kwargs and torch.is_grad_enabled():
            given, weight, *bias = args
            if weight.is_leaf and weight.requires_grad and not _is_hooked(weight):
                if torch.is_autocast_enabled(given.device.type) and given.dtype is not torch.float64:
                    given = given.to(torch.get_autocast_dtype(given.device.type))
                return _Linear.apply(given, weight, bias[0] if bias else None, self._late)
        return func(*args, **(kwargs or {}))


def _is_hooked(weight: Tensor) -> bool:
    """Whether hooks wait for a matrix's gradient, which backward then has to compute."""
    return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)  # type: ignore[attr-defined]


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
        ctx.late.note((weight, given, gradient))
        needs_given, _, needs_bias, _ = ctx.needs_input_grad
        for_given = gradient @ weight.to(gradient.dtype) if needs_given else None
        for_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0).to(ctx.bias_dtype) if needs_bias else None
        return for_given, None, for_bias, None
