"""The course of one run for all of a model's modules: calls, work, dependencies, and tensors that outlive the run."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nested._internal.nested_tensor import NestedTensor

from mosaic.cost.counting.operators import count_flops, kind_of
from mosaic.cost.counts import OperatorKind
from mosaic.engine.calls.obstacles import Obstacle
from mosaic.engine.calls.thread_state import TRANSFORMED, is_transformed
from mosaic.find.structure import tensors_in
from mosaic.find.trace import Operation, Tracer, caller

_TRANSFORMED = Obstacle(TRANSFORMED, todo="call it on the whole batch, or leave it where it is")
_ALL = "all modules"  # which is no name
_HEAVY = (OperatorKind.MATMUL, OperatorKind.CONV, OperatorKind.ATTENTION)


class Course(Tracer[int]):
    """Follows one run; labels are the modules that computed a tensor, a bit each, with all modules around them.

    Work is the forward operations of matrix products, convolutions and attention. Others are left out: they are bound
    by memory, and a module of nothing else is glue. The work of a part counts for all that it is part of.

    Attributes:
        called: For each module the lines that call it.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(0)
        self.called: dict[str, list[str]] = {name: [] for name, _ in model.named_modules()}
        self._bits = {name: 1 << index for index, name in enumerate(self.called)}
        self._around = [0]  # with each running module, its bit and those of all around it
        self._reading = [0]
        self._read = dict.fromkeys(self.called, 0)
        self._transformed: set[str] = set()
        self._flops: Counter[str] = Counter()
        self._made: list[tuple[weakref.ref[torch.Tensor], tuple[str, ...]]] = []

    @property
    def obstacles(self) -> dict[str, Obstacle]:
        often = {name: _called_often(places) for name, places in self.called.items() if len(places) != 1}
        return often | dict.fromkeys(self._transformed, _TRANSFORMED)

    def escapes(self) -> dict[str, Obstacle]:
        """Returns obstacles of modules that make tensors with gradients which a hook, a list or an attribute keeps.

        A loss that uses such a tensor goes backward through the graph of a branch from outside, while its lane does.
        Called once the run's own result is dropped.
        """
        makers = {id(tensor): names for ref, names in self._made for tensor in [ref()] if tensor is not None}
        alive = [tensor for ref, _ in self._made for tensor in [ref()] if tensor is not None]
        holders = [holder for holder in gc.get_referrers(*alive) if holder is not alive] if alive else []
        referred = {id(value) for holder in holders for value in gc.get_referents(holder)}
        obstacles: dict[str, Obstacle] = {}
        for names in [names for key, names in makers.items() if key in referred]:
            where = f" (made in {names[-1]})" if len(names) > 1 else ""
            obstacle = Obstacle(
                f"a tensor made inside of it{where} is kept after its call, by a hook, a list or an attribute",
                todo="return it, keep tensor.detach(), or leave the module out: colocate(..., exclude=[...])",
            )
            obstacles |= dict.fromkeys(names, obstacle)
        return obstacles

    def work(self, name: str) -> float:
        """Returns the share of a module in the operations of all; 0 where none were counted."""
        return self._flops[name] / max(1, self._flops[_ALL])

    def reaches(self, first: str, second: str) -> bool:
        """Returns True if a value that ``first`` computed goes into ``second``, through whatever is between them."""
        return bool(self._bits[first] & self._read[second])

    def end(self, operation: Operation, labels: int) -> int:
        """Counts an operator for every running module; what it makes stems from its inputs and from these."""
        self._reading[-1] |= labels
        is_plain = isinstance(operation.operator, torch._ops.OpOverload)
        is_ragged = any(isinstance(tensor, NestedTensor) for tensor in operation.inputs)  # whose sizes are no numbers
        if self.running and is_plain and not is_ragged and kind_of(operation.operator) in _HEAVY:
            result = operation.results[0] if len(operation.results) == 1 else operation.results
            flops = count_flops(operation.operator, operation.args, operation.kwargs, result)
            self._flops.update(dict.fromkeys((_ALL, *self.running), flops))
        return labels | self._around[-1]

    def function(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if self.running:
            for tensor in (result,) if isinstance(result, torch.Tensor) else tensors_in(result):
                if tensor.requires_grad and not tensor.is_leaf:
                    self._made.append((weakref.ref(tensor), tuple(self.running)))
        return result

    def enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.called[name].append(caller())
        self._around.append(self._around[-1] | self._bits[name])
        self._reading.append(0)
        if is_transformed():
            self._transformed.add(name)

    def leave(self, name: str, result: Any) -> None:
        self._around.pop()
        labels = self._reading.pop()
        self._read[name] |= labels
        self._reading[-1] |= labels


def _called_often(places: Sequence[str]) -> Obstacle:
    where = f" ({', '.join(dict.fromkeys(places))})" if places else ""
    return Obstacle(
        f"called {len(places)} times in a step{where}; a placed module is called once, on all its inputs",
        todo="call it once on a concatenated batch, or leave it where it is",
    )
