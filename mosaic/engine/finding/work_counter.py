"""Each module's share of a model's arithmetic: a small module may do much, as a video encoder does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nested._internal.nested_tensor import NestedTensor
from torch.utils._python_dispatch import TorchDispatchMode

from mosaic.cost.analytic.formulas import count_flops, kind_of
from mosaic.cost.counts import OperatorKind

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_HEAVY = (OperatorKind.MATMUL, OperatorKind.CONV, OperatorKind.ATTENTION)


class WorkCounter(TorchDispatchMode):
    """Counts the forward operations of matrix products, convolutions and attention, module by module.

    Others are left out: they are bound by memory, and a module of nothing else is glue. Operations of a part count for
    all that it is part of.

    Attributes:
        running: The names of the modules that are running, the innermost last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.running: list[str] = []
        self._flops: Counter[str] = Counter()
        self._total = 0

    @contextmanager
    def counting(self, model: nn.Module, called: Callable[[str], None]) -> Iterator[None]:
        """Counts while it is open.

        Args:
            model: Whose modules to count for.
            called: Told each call of a module, by name.
        """
        handles = []
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(self._entering(name, called)))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def share(self, name: str) -> float:
        """Returns the share of a module in the operations of all; 0 where none were counted."""
        return self._flops[name] / self._total if self._total else 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator and counts it for every module that is running."""
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled() and func.has_kernel_for_dispatch_key(_COMPOSITE):
            with self:  # elsewhere autograd has taken it apart before it comes here
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        if self.running and not _is_ragged(types) and kind_of(func) in _HEAVY:
            flops = count_flops(func, args, kwargs, result) or 0
            self._total += flops
            for name in set(self.running):
                self._flops[name] += flops
        return result

    def _entering(self, name: str, called: Callable[[str], None]) -> Callable[[Any, Any], None]:
        def hook(_module: Any, _args: Any) -> None:
            called(name)
            self.running.append(name)

        return hook

    def _leave(self, *_: Any) -> None:
        self.running.pop()


def _is_ragged(types: Iterable[type]) -> bool:
    """Whether an operator takes nested tensors, whose sizes are no numbers."""
    return any(kind is NestedTensor for kind in types)
