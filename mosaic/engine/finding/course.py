"""The course of one run for all of a model's modules: calls, work, dependencies, and tensors that outlive the run."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nested._internal.nested_tensor import NestedTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mosaic.cost.counting.operators import count_flops, kind_of
from mosaic.cost.counts import OperatorKind
from mosaic.engine.calls.caller import caller
from mosaic.engine.calls.obstacles import Obstacle
from mosaic.engine.calls.structure import tensors_in
from mosaic.engine.calls.thread_state import TRANSFORMED, is_transformed
from mosaic.engine.calls.torch_functions import written_arguments

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_TRANSFORMED = Obstacle(TRANSFORMED, todo="call it on the whole batch, or leave it where it is")
_HEAVY = (OperatorKind.MATMUL, OperatorKind.CONV, OperatorKind.ATTENTION)


class Course(TorchDispatchMode):
    """Watches the operators of one run.

    Work is the forward operations of matrix products, convolutions and attention. Others are left out: they are bound
    by memory, and a module of nothing else is glue. What a part does counts for all that it is part of.

    Attributes:
        called: For each module the lines at which it is called.
        running: The names of the modules that are running, the innermost last.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.called: dict[str, list[str]] = {name: [] for name, _ in model.named_modules()}
        self._model = model
        self.running: list[str] = []
        self._transformed: set[str] = set()
        self._flops: Counter[str] = Counter()
        self._total = 0
        self._reach = _Reach(self.called)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches while it is open."""
        handles = []
        for name, module in self._model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # it takes no hooks
            handles.append(module.register_forward_pre_hook(self._entering(name)))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    @property
    def obstacles(self) -> dict[str, Obstacle]:
        """Why modules cannot be placed that are not called once, or in a transform."""
        often = {name: _called_often(places) for name, places in self.called.items() if len(places) != 1}
        return often | dict.fromkeys(self._transformed, _TRANSFORMED)

    def work(self, name: str) -> float:
        """Returns the share of a module in the operations of all; 0 where none were counted."""
        return self._flops[name] / self._total if self._total else 0.0

    def reaches(self, first: str, second: str) -> bool:
        """Whether a value that ``first`` computed goes into ``second``, through whatever is between them."""
        return self._reach.reaches(first, second)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator and counts it for every module that is running."""
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled() and func.has_kernel_for_dispatch_key(_COMPOSITE):
            with self:  # elsewhere autograd has taken it apart before it comes here
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        self._reach.note(func, args, kwargs, result)
        if self.running and not _is_ragged(types) and kind_of(func) in _HEAVY:
            flops = count_flops(func, args, kwargs, result)
            self._total += flops
            for name in set(self.running):
                self._flops[name] += flops
        return result

    def _entering(self, name: str) -> Callable[[Any, Any], None]:
        def hook(_module: Any, _args: Any) -> None:
            self.called[name].append(caller())
            self.running.append(name)
            if is_transformed():
                self._transformed.add(name)
            self._reach.enter(name)

        return hook

    def _leave(self, *_: Any) -> None:
        self._reach.leave(self.running.pop())


class Escapes(TorchFunctionMode):
    """Notes tensors with gradients that modules make and that outlive the run, kept by a hook, a list or an attribute.

    A loss that uses such a tensor goes backward through the graph of a branch from outside, while its lane does.

    Args:
        running: The names of the modules that are running, the innermost last.
    """

    def __init__(self, running: Sequence[str]) -> None:
        super().__init__()
        self._running = running
        self._made: list[tuple[weakref.ref[torch.Tensor], tuple[str, ...]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operator unchanged."""
        result = func(*args, **(kwargs or {}))
        if self._running:
            for tensor in tensors_in(result):
                if tensor.requires_grad and not tensor.is_leaf:
                    self._made.append((weakref.ref(tensor), tuple(self._running)))
        return result

    def obstacles(self) -> dict[str, Obstacle]:
        """Returns for each module why no lane's thread can run it; called once the run's own result is dropped."""
        alive = [tensor for ref, _ in self._made for tensor in [ref()] if tensor is not None]
        makers = {id(tensor): names for ref, names in self._made for tensor in [ref()] if tensor is not None}
        obstacles = {}
        for names in [makers[key] for key in _held_by_python(alive)]:
            where = f" (made in {names[-1]})" if len(names) > 1 else ""
            for name in names:
                obstacles[name] = Obstacle(
                    f"a tensor made inside of it{where} is kept after its call, by a hook, a list or an attribute",
                    todo="return it, keep tensor.detach(), or leave the module out: colocate(..., exclude=[...])",
                )
        return obstacles


class _Reach:
    """Marks memory with the modules that computed what is in it, and notes which marks each module reads.

    A set of modules is an integer with a bit for each.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._bits = {name: 1 << index for index, name in enumerate(names)}
        self._read = dict.fromkeys(self._bits, 0)
        self._running = [0]  # with each module that is running, it and all around it
        self._reading = [0]
        self._marks: dict[int, int] = {}
        self._kept: list[StorageWeakRef] = []  # so that an address is never given out twice

    def reaches(self, first: str, second: str) -> bool:
        return bool(self._bits[first] & self._read[second])

    def enter(self, name: str) -> None:
        self._running.append(self._running[-1] | self._bits[name])
        self._reading.append(0)

    def leave(self, name: str) -> None:
        self._running.pop()
        read = self._reading.pop()
        self._read[name] |= read
        self._reading[-1] |= read

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """An operator ran: what it wrote or made stems from its inputs and from who is running; a view does not."""
        given = set(_memory((args, kwargs)))
        read = 0
        for key in given:
            read |= self._marks.get(key, 0)
        self._reading[-1] |= read
        made = read | self._running[-1]
        if func._schema.is_mutable:
            for key in _memory(tuple(written_arguments(func, args, kwargs))):
                self._marks[key] = self._marks.get(key, 0) | made
        for tensor in tensors_in(result):
            for key in _memory(tensor):
                if key not in given:
                    self._marks[key] = made
                    self._kept.append(StorageWeakRef(tensor.untyped_storage()))


def _memory(value: Any) -> Iterator[int]:
    """Yields the addresses of the storages of tensors, which those without memory have, too."""
    for tensor in tensors_in(value):
        try:
            yield tensor.untyped_storage()._cdata
        except (RuntimeError, NotImplementedError):  # sparse tensors and some subclasses have none
            continue


def _called_often(places: Sequence[str]) -> Obstacle:
    where = f" ({', '.join(dict.fromkeys(places))})" if places else ""
    return Obstacle(
        f"called {len(places)} times in a step{where}; a placed module is called once, on all its inputs",
        todo="call it once on a concatenated batch, or leave it where it is",
    )


def _is_ragged(types: Iterable[type]) -> bool:
    """Whether an operator takes nested tensors, whose sizes are no numbers."""
    return any(kind is NestedTensor for kind in types)


def _held_by_python(tensors: list[torch.Tensor]) -> set[int]:
    """Returns the ids of tensors to which an object of Python's refers: not only the graph that saved them."""
    keys = set(map(id, tensors))
    holders = [holder for holder in gc.get_referrers(*tensors) if holder is not tensors] if tensors else []
    return {key for holder in holders for key in map(id, gc.get_referents(holder)) if key in keys}
