"""The tracer: one run of a model, followed from operator to operator through the memory of its tensors.

Memory has labels, which say what its values stem from: modules, weights, inputs. The results of an operator have the
labels of its inputs, and so has what it writes into. This sees frozen modules and every edge.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial, reduce
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mosaic.find.structure import tensors_in

NUMBER_READS = ("tolist", "item", "numpy", "__bool__", "__int__", "__float__", "__index__")  # some run no operator
_SHAPE_READS = ("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like")
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_OWN_FILES = ("mosaic.engine", "mosaic.find", "mosaic.parts", "mosaic.ranks", "torch.")

Labels = TypeVar("Labels")  # joined by ``|``: a frozenset, or the bits of an integer where there are many


@dataclass(slots=True)
class Operation:
    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[torch.Tensor]
    written: list[torch.Tensor]
    results: list[torch.Tensor] = field(default_factory=list)
    created: list[torch.Tensor] = field(default_factory=list)  # results with memory of their own, which views have not

    @property
    def name(self) -> str:
        return getattr(self.operator, "overloadpacket", self.operator).__name__  # type: ignore[no-any-return]


class Tracer(TorchDispatchMode, Generic[Labels]):
    """Follows the operators of one run; memory that stems from nothing has the labels ``nothing``."""

    supports_higher_order_operators = True

    def __init__(self, nothing: Labels) -> None:
        super().__init__()
        self.running: list[str] = []  # names of modules, the innermost last
        self._nothing = nothing
        self._labels: dict[int, Any] = {}
        self._storages: dict[int, StorageWeakRef] = {}  # keep addresses unique
        self._alive: list[torch.Tensor] = []  # tensors without storage, or known by their ids

    @classmethod
    def ignore_compile_internals(cls) -> bool:  # the model's own use of the compiler
        return True

    @contextmanager
    def following(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Follows what this thread runs in the block, and the calls of some modules, by their names."""

        def enter(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
            with torch._C.DisableTorchFunction():
                self.running.append(name)
                self.enter(name, module, args, kwargs)

        def leave(name: str, _module: nn.Module, _args: Any, result: Any) -> None:
            with torch._C.DisableTorchFunction():
                self.running.pop()
                self.leave(name, result)

        with ExitStack() as stack:
            for name, module in modules.items():
                if not isinstance(module, torch.jit.ScriptModule):  # it takes no hooks
                    stack.callback(module.register_forward_pre_hook(partial(enter, name), with_kwargs=True).remove)
                    stack.callback(module.register_forward_hook(partial(leave, name), always_call=True).remove)
            with _Functions(self), self:
                yield

    def enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module is called, and is the last of those that run."""

    def leave(self, name: str, result: Any) -> None:
        """The call of a module ends; its result is None after an error."""

    def begin(self, operation: Operation) -> None:
        """An operator is about to run."""

    def end(self, operation: Operation, labels: Labels) -> Labels:
        """Returns the labels of an operator's results and of what it wrote; by default its inputs', no shapes'."""
        return labels

    def function(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a function of torch, such as ``__get__:data``; it may be several operators or none."""
        return func(*args, **kwargs)

    def memory(self, tensor: torch.Tensor) -> int:
        """Returns the identity of a tensor's memory, which its views share."""
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):  # sparse tensors and some subclasses have none
            self._alive.append(tensor)
            return -id(tensor)
        key = int(storage._cdata)
        if key not in self._storages:
            self._storages[key] = StorageWeakRef(storage)
        return key

    def labels(self, tensors: Sequence[torch.Tensor]) -> Labels:
        labels = (self._labels.get(self.memory(tensor), self._nothing) for tensor in tensors)
        return reduce(operator.or_, labels, self._nothing)

    def mark(self, tensor: torch.Tensor, labels: Labels, *, anew: bool = False) -> None:
        """Adds labels to a tensor's memory; with ``anew``, replaces them."""
        key = self.memory(tensor)
        self._labels[key] = labels if anew else self._labels.get(key, self._nothing) | labels

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_plain = isinstance(func, torch._ops.OpOverload)
        if is_plain and torch.is_inference_mode_enabled() and func.has_kernel_for_dispatch_key(_COMPOSITE):
            with self:  # elsewhere autograd has taken it apart before it comes here
                return func.decompose(*args, **kwargs)
        written = tensors_in(written_by(func, args, kwargs)) if is_plain else []
        operation = Operation(func, args, kwargs, tensors_in((args, kwargs)), written)
        self.begin(operation)
        result = func(*args, **kwargs)
        operation.results = tensors_in(result)
        old = set(map(self.memory, operation.inputs))
        operation.created = [tensor for tensor in operation.results if self.memory(tensor) not in old]
        reads_shapes = operation.name in _SHAPE_READS or operation.name.startswith("new_")
        labels = self.end(operation, self._nothing if reads_shapes else self.labels(operation.inputs))
        if labels:
            for tensor in (*operation.created, *written):
                self.mark(tensor, labels)
        return result


class _Functions(TorchFunctionMode):
    def __init__(self, tracer: Tracer[Any]) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._tracer.function(name_of(func), func, args, kwargs or {})


def name_of(func: Any) -> str:
    """Returns the name of a torch function; of an attribute's getter ``__get__:`` and the attribute's."""
    name: str = getattr(func, "__name__", "")
    if name not in ("__get__", "__set__"):
        return name
    return f"{name}:{getattr(func.__self__, '__name__', None) or func.__self__.fget.__name__}"


def written_by(function: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Any]:
    """Returns the arguments that an operator writes into, as its schema says; running statistics are not among them."""
    return [args[at] if at < len(args) else kwargs.get(name) for at, name in _written_places(function)]


@cache
def _written_places(function: Any) -> tuple[tuple[int, str], ...]:
    arguments = enumerate(function._schema.arguments)
    return tuple((at, each.name) for at, each in arguments if each.alias_info is not None and each.alias_info.is_write)


def caller() -> str:
    """Returns file, line and function of the user's code that is being run."""
    frame, names = sys._getframe(1), "__name__"
    while frame.f_back and names in frame.f_globals and frame.f_globals[names].startswith(_OWN_FILES):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
