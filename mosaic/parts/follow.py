"""Following tensors from site to site through one run of a model."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from mosaic.errors import UnsplittableError
from mosaic.parts.doors import Forward, hidden_of, replaced_forwards
from mosaic.parts.split import Value

_SHAPE_ALONE = ("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like")
_RANDOM = (
    "bernoulli",
    "bernoulli_",
    "native_dropout",
    "rand",
    "randn",
    "rand_like",
    "randn_like",
    "normal_",
    "uniform_",
)
_READS = ("tolist", "item", "numpy", "__bool__", "__int__", "__float__", "__index__")


@dataclass(kw_only=True, eq=False)
class SeenCall:
    """One call of a layer or another module with parameters."""

    path: str
    """The module's name."""
    call: int
    """How many calls of it came before."""
    line: str
    """File and line that called it."""
    values: set[Value] = field(default_factory=set)
    """Values of earlier calls that it read."""
    parameters: set[str] = field(default_factory=set)
    """Parameters that it read, or that operations before it did."""
    inputs: set[str] = field(default_factory=set)
    """Tensors of the sample that it read."""
    random: set[str] = field(default_factory=set)
    """Lines of operations between calls that drew random numbers for what it read."""
    form: tuple[list[Any], Any] | None = None
    """What it returned, without its tensors."""
    keeps_shape: bool = False
    """Whether its first result has the shape of its first input."""


@dataclass(kw_only=True)
class Followed:
    """What one run showed."""

    calls: list[SeenCall]
    """In order."""
    output: dict[str, SeenCall]
    """For each tensor that the model returned by where it stands in the output, what it is made of."""
    scoped_inputs: dict[str, set[str]]
    """For modules that hold lists of layers, tensors of the sample that were read between their calls."""


_Source = tuple[str, Any]


class _Follower(TorchDispatchMode):
    """Marks memory with the values, parameters and inputs that it stems from."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], sample: Mapping[str, Any]) -> None:
        super().__init__()
        self.calls: list[SeenCall] = []
        self.here: SeenCall | None = None
        self.scopes: list[str] = []
        self.scoped: dict[str, set[str]] = {}
        self._sources: dict[int, frozenset[_Source]] = {}
        self._memory: dict[int, StorageWeakRef] = {}  # so that an address is never given out twice
        for name, parameter in parameters.items():
            self.mark(parameter, {("parameter", name)})
        for name, value in sample.items():
            for tensor in _tensors((value,)):
                self.mark(tensor, {("input", name)})

    def mark(self, tensor: torch.Tensor, sources: Iterable[_Source], *, anew: bool = False) -> None:
        """Says what a tensor's memory stems from; beside what it stemmed from so far, or anew."""
        weak = StorageWeakRef(tensor.untyped_storage())
        known = frozenset() if anew else self._sources.get(weak.cdata, frozenset())
        self._sources[weak.cdata] = known | frozenset(sources)
        self._memory[weak.cdata] = weak

    def sources(self, tensors: Iterable[torch.Tensor]) -> set[_Source]:
        found: set[_Source] = set()
        for tensor in tensors:
            found |= self._sources.get(tensor.untyped_storage()._cdata, frozenset())
        return found

    def note_read(self, sources: set[_Source]) -> None:
        """What is read here belongs to the call that reads it, and to the module that is running.

        Raises:
            UnsplittableError: It was made inside of another call, which did not return it.
        """
        for kind, made_in in sources:
            if kind == "inside" and (self.here is None or made_in.path != self.here.path):
                raise UnsplittableError(
                    f"a tensor made inside of {made_in.path} is used outside of it at {caller()}, other than as its "
                    "result (a hook or an attribute keeps it, such as routers' logits for a loss); where it runs on "
                    "another rank it is not there: return it, or switch off what uses it"
                )
        if self.here is not None:
            note(self.here, sources)
        if self.scopes:
            self.scoped.setdefault(self.scopes[-1], set()).update(name for kind, name in sources if kind == "input")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name.rpartition("::")[2]
        if name in _SHAPE_ALONE or name.startswith("new_"):
            sources: set[_Source] = set()
        else:
            sources = self.sources(_tensors((args, kwargs)))
            self.note_read(sources)
        if self.here is not None:
            sources = {("inside", self.here)}
        elif name in _RANDOM:
            sources.add(("random", caller()))
        if sources:
            came = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
            for tensor in _tensors((result,)):
                if self.here is None or tensor.untyped_storage()._cdata not in came:
                    self.mark(tensor, sources)
            for tensor in _written(func, args):
                self.mark(tensor, sources)
        return result


class _Reads(TorchFunctionMode):
    """Sees tensors that become Python numbers, which torch's dispatcher does not."""

    def __init__(self, follower: _Follower) -> None:
        super().__init__()
        self._follower = follower

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _READS:
            self._follower.note_read(self._follower.sources(_tensors(args)))
        return func(*args, **(kwargs or {}))


def note(call: SeenCall, sources: Iterable[_Source]) -> None:
    """Adds sources to what a call reads."""
    kinds = {
        "value": call.values,
        "parameter": call.parameters,
        "input": call.inputs,
        "random": call.random,
        "inside": set(),
    }
    for kind, name in sources:
        kinds[kind].add(name)


def follow(
    model: nn.Module,
    sample: Mapping[str, Any],
    *,
    sites: Mapping[str, nn.Module],
    scopes: Mapping[str, nn.Module],
) -> Followed:
    """Runs the model once and follows what its sites read and return; the outermost running site counts.

    Args:
        model: The user's model.
        sample: A microbatch.
        sites: Modules by name whose calls are watched.
        scopes: Modules by name that hold them.
    """
    follower = _Follower(dict(model.named_parameters()), sample)
    counts: Counter[str] = Counter()

    def site(path: str, forward: Forward) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            if follower.here is not None:
                return forward(*args, **kwargs)
            call = SeenCall(path=path, call=counts[path], line=caller())
            counts[path] += 1
            follower.here = call
            follower.calls.append(call)
            try:
                result = forward(*args, **kwargs)
            finally:
                follower.here = None
            _note_result(follower, call, result, hidden_of(args, kwargs))
            return result

        return run

    def scope(path: str, forward: Forward) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            follower.scopes.append(path)
            try:
                return forward(*args, **kwargs)
            finally:
                follower.scopes.pop()

        return run

    forwards = {module: site(path, module.forward) for path, module in sites.items()}
    forwards |= {module: scope(path, module.forward) for path, module in scopes.items()}
    with replaced_forwards(forwards), torch.no_grad(), _Reads(follower), follower:
        result = model(**sample)
    return Followed(calls=follower.calls, output=_output(follower, result), scoped_inputs=follower.scoped)


def _note_result(follower: _Follower, call: SeenCall, result: Any, hidden: torch.Tensor | None) -> None:
    leaves, spec = pytree.tree_flatten(result)
    index = len(follower.calls) - 1
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            follower.mark(leaf, {("value", Value(index, number))}, anew=True)
    call.form = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec
    first = leaves[0] if leaves else None
    call.keeps_shape = (
        isinstance(first, torch.Tensor)
        and hidden is not None
        and (first.shape, first.dtype) == (hidden.shape, hidden.dtype)
    )


def _output(follower: _Follower, result: Any) -> dict[str, SeenCall]:
    found: dict[str, SeenCall] = {}
    for path, leaf in pytree.tree_flatten_with_path(result)[0]:
        sources = follower.sources(_tensors((leaf,)))
        if isinstance(leaf, torch.Tensor) and not any(kind == "inside" for kind, _ in sources):
            found[pytree.keystr(path)] = seen = SeenCall(path="", call=0, line="")
            note(seen, sources)
    return found


def _written(func: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
    writes = (argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments)
    return _tensors([value for value, written in zip(args, writes, strict=False) if written])


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def caller() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("mosaic.parts", "torch.")):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
