"""Dataflow of tensors between sites in one run of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from mosaic.errors import MosaicError, UnsplittableError, said_by
from mosaic.find.random_numbers import python_state
from mosaic.parts.blank import BlankResults, Forward, draws_random_numbers, hidden_of, replaced_forwards
from mosaic.parts.finding.seen_call import NOTHING, SeenCall, Sources, caller, is_checkpointed, line_of, tensors_in
from mosaic.parts.split import Value

_SHAPE_ALONE = ("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like")
_READS = ("tolist", "item", "numpy", "__bool__", "__int__", "__float__", "__index__")


class Provenance(TorchDispatchMode):
    """Marks the memory of tensors while it is entered.

    Attributes:
        here: The running call; None between calls.
        scopes: Names of the modules around it.
        decided: Sources of Python numbers read between calls: all later results may depend on them.
        scoped_inputs: Inputs read in each scope while it was the innermost.
        written_inputs: Inputs that the model writes into.
    """

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor], sample: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self.here: SeenCall | None = None
        self.scopes: list[str] = []
        self.decided = NOTHING
        self.scoped_inputs: dict[str, set[str]] = {}
        self._sources: dict[int, Sources] = {}
        self._memory: dict[int, StorageWeakRef] = {}  # keeps addresses unique
        for name, parameter in parameters.items():
            self.mark(parameter, Sources(parameters=frozenset([name])))
        for name, value in sample.items():
            for tensor in tensors_in(value):
                self.mark(tensor, Sources(inputs=frozenset([name])))
        self.written_inputs: set[str] = set()
        self._owners = _OwnedMemory(parameters=parameters, buffers=buffers, sample=sample)

    def mark(self, tensor: torch.Tensor, sources: Sources, *, anew: bool = False) -> None:
        """Adds sources to a tensor's memory, or replaces them if ``anew``."""
        weak = StorageWeakRef(tensor.untyped_storage())
        earlier = NOTHING if anew else self._sources.get(weak.cdata, NOTHING)
        self._sources[weak.cdata] = earlier | sources
        self._memory[weak.cdata] = weak

    def sources(self, value: Any) -> Sources:
        """Returns the sources of the tensors in a value."""
        sources = NOTHING
        for tensor in tensors_in(value):
            sources = sources | self._sources.get(tensor.untyped_storage()._cdata, NOTHING)
        return sources

    def note_read(self, value: Any) -> Sources:
        """Records a read of these tensors by the running call, and by the module around it."""
        sources = self.sources(value)
        for call in sources.inside:
            if self.here is None or call.path != self.here.path:
                raise kept_inside(call.path, caller())
        if self.here is not None:
            self.here.read(sources)
        if self.scopes:
            self.scoped_inputs.setdefault(self.scopes[-1], set()).update(sources.inputs)
        return sources

    def note_decision(self, value: Any) -> None:
        """Records that Python numbers result from these tensors."""
        sources = self.note_read(value)
        if self.here is None:
            self.decided |= Sources(values=sources.values, parameters=sources.parameters, inside=sources.inside)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Propagates marks from an operator's inputs to its results, and to tensors that it writes into."""
        kwargs = kwargs or {}
        written = _written(func, args, kwargs)
        self.written_inputs |= self._owners.check_written(written, self.here)
        if self.here is not None and any(self.here not in self.sources(tensor).inside for tensor in written):
            self.here.has_effects = True
        result = func(*args, **kwargs)
        name = func._schema.name.rpartition("::")[2]
        by_shape = name in _SHAPE_ALONE or name.startswith("new_")
        sources = NOTHING if by_shape else self.note_read((args, kwargs))
        if not by_shape and not tensors_in(result):
            self.note_decision((args, kwargs))
        if self.here is not None:
            sources = Sources(inside=frozenset([self.here]))
        elif self.sources(_deciding_rows(func, name, args)).values:
            sources |= Sources(rows=frozenset([caller()]))
        elif draws_random_numbers(func, args, kwargs):
            sources |= Sources(random=frozenset([caller()]))
        if sources:
            inputs = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
            for tensor in tensors_in(result):
                if self.here is None or tensor.untyped_storage()._cdata not in inputs:
                    self.mark(tensor, sources)
            for tensor in written:
                self.mark(tensor, sources)
        return result


class NumbersRead(TorchFunctionMode):
    """Observes tensors that become Python numbers, which torch's dispatcher does not always show."""

    def __init__(self, provenance: Provenance) -> None:
        super().__init__()
        self._provenance = provenance

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Records reads of numbers."""
        if func is torch.autograd.grad and self._provenance.here is None:
            raise UnsplittableError(
                f"gradients are computed between layers at {caller()}; other ranks have the layers that they would go "
                "through: do it within one layer, or in the loss"
            )
        if getattr(func, "__name__", "") in _READS:
            self._provenance.note_decision(args)
        return func(*args, **(kwargs or {}))


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    arguments = func._schema.arguments
    written = {each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write}
    values = dict(zip((each.name for each in arguments), args, strict=False)) | dict(kwargs)
    return tensors_in([value for name, value in values.items() if name in written])


def _deciding_rows(func: Any, name: str, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Returns tensors whose values determine the number of rows of an operator's result."""
    if torch.Tag.dynamic_output_shape not in func.tags:
        return []
    by_mask = name in ("index", "masked_select")
    return [tensor for tensor in tensors_in(args) if not by_mask or tensor.dtype in (torch.bool, torch.uint8)]


class _OwnedMemory:
    """The memory of parameters, buffers and the sample.

    Args:
        parameters: The model's parameters by name.
        buffers: The model's buffers by name.
        sample: A microbatch.
    """

    def __init__(
        self, *, parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor], sample: Mapping[str, Any]
    ) -> None:
        self._parameters = {_memory(tensor): name for name, tensor in parameters.items()}
        self._buffers = {_memory(tensor): name for name, tensor in buffers.items()}
        self._inputs = {_memory(tensor): name for name, value in sample.items() for tensor in tensors_in(value)}

    def check_written(self, tensors: Sequence[torch.Tensor], here: SeenCall | None) -> set[str]:
        """Returns the inputs among tensors of a write.

        A module may write into its own buffers, because it runs on one rank.

        Raises:
            UnsplittableError: A tensor is a parameter, or a buffer that others may read.
        """
        inputs = set()
        for memory in map(_memory, tensors):
            if memory in self._parameters:
                raise UnsplittableError(
                    f"parameter {self._parameters[memory]} is written into at {caller()}; ranks without its layer have "
                    "no memory for it: let the loop change it, behind the optimizer's step"
                )
            name = self._buffers.get(memory)
            if name is not None and (here is None or not name.startswith(f"{here.path}.")):
                raise UnsplittableError(
                    f"buffer {name} is written into at {caller()}, outside of the layer or module that holds it; other "
                    "ranks would not see it: let that module write it, or the loop behind the step"
                )
            if memory in self._inputs:
                inputs.add(self._inputs[memory])
        return inputs


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """Result of one run."""

    calls: list[SeenCall]
    """In order."""
    output: dict[str, Sources]
    """Sources of each returned tensor, by its place in the output."""
    loss: SeenCall | None
    """Reads of the loss; None without a loss."""
    is_drawn: Callable[[Any], bool]
    """Returns True if tensors in a container were drawn between calls."""
    written_inputs: frozenset[str]
    """Tensors of the sample that the model wrote into."""
    scoped_inputs: dict[str, set[str]]
    """Tensors of the sample that were read between calls, by the module that holds the layers."""


def kept_inside(path: str, reader: str) -> UnsplittableError:
    """Returns the error of a tensor that a call makes, does not return, and somebody else reads."""
    return UnsplittableError(
        f"a tensor made inside of {path} is used outside of it at {reader}, other than as its result (a hook or an "
        "attribute keeps it); on another rank it is not there: return it, or switch off what uses it, such as "
        "output_router_logits"
    )


class _Run:
    """One run of the model; the outermost of nested sites counts."""

    def __init__(self, provenance: Provenance, blank: BlankResults | None) -> None:
        self.calls: list[SeenCall] = []
        self.provenance = provenance
        self._blank = blank
        self._counts: Counter[str] = Counter()

    def site(self, path: str, module: nn.Module) -> Forward:
        forward: Forward = module.forward
        weights = [*map(id, module.parameters())]

        def run(*args: Any, **kwargs: Any) -> Any:
            if self.provenance.here is not None:
                return forward(*args, **kwargs)
            call = self._begin(path)
            if [*map(id, module.parameters())] != weights:
                raise UnsplittableError(
                    f"{path} is called with other weights than its own at {call.line}, as functional_call does; "
                    "a rank that makes its layer again would not find them: change weights within the layer"
                )
            try:
                result = self._result(call, module, forward, args, kwargs)
            finally:
                self.provenance.here = None
            self._end(call, result, hidden_of(args, kwargs))
            return result

        return run

    def scope(self, path: str, module: nn.Module) -> Forward:
        forward: Forward = module.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            self.provenance.scopes.append(path)
            try:
                return forward(*args, **kwargs)
            finally:
                self.provenance.scopes.pop()

        return run

    def _begin(self, path: str) -> SeenCall:
        call = SeenCall(path=path, call=self._counts[path], line=caller())
        if is_checkpointed():
            raise UnsplittableError(
                f"{path} is called within torch.utils.checkpoint, as {call.line} has it; parts choose themselves which "
                "layers are recomputed: call it directly and give strategies"
            )
        self._counts[path] += 1
        call.read(self.provenance.decided)
        self.provenance.here = call
        self.calls.append(call)
        return call

    def _result(
        self, call: SeenCall, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._blank is None:
            before = python_state()
            result = forward(*args, **kwargs)
            call.has_effects |= not before.is_same(python_state())
            return result
        self.provenance.note_read((args, kwargs))
        with _disable_current_modes():
            leaves, tree = self._blank.of(module, forward, args, kwargs)
            passed = self._blank.passed_by(module, forward, args, kwargs)
            call.has_effects = self._blank.has_effects(module, forward, args, kwargs)
        for leaf, argument in zip(leaves, passed, strict=True):
            if argument is not None:
                self.provenance.mark(leaf, self.provenance.sources(argument))
        return pytree.tree_unflatten(leaves, tree)

    def _end(self, call: SeenCall, result: Any, hidden: torch.Tensor | None) -> None:
        leaves, tree = pytree.tree_flatten(result)
        index = len(self.calls) - 1
        tensors = {number: leaf for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        sources = {number: self.provenance.sources(leaf) for number, leaf in tensors.items()}
        for number, leaf in tensors.items():
            if call in sources[number].inside:
                self.provenance.mark(leaf, NOTHING, anew=True)
            else:  # an argument or its view, as from a dropout of rate 0
                call.read(sources[number])
        for number, leaf in tensors.items():
            own = Sources(values=frozenset([Value(index, number)]), rows=frozenset(call.rows))
            self.provenance.mark(leaf, own)
        call.form = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], tree
        first = leaves[0] if leaves else None
        if isinstance(first, torch.Tensor) and hidden is not None:
            call.keeps_shape = (first.shape, first.dtype) == (hidden.shape, hidden.dtype)


def follow(
    model: nn.Module,
    sample: Mapping[str, Any],
    *,
    sites: Mapping[str, nn.Module],
    scopes: Mapping[str, nn.Module],
    parameters: Mapping[str, torch.Tensor],
    blank: BlankResults | None,
    loss: Callable[[Any], Any] | None,
) -> Followed:
    """Runs the model once and records the inputs and results of its sites.

    Args:
        model: The user's model.
        sample: A microbatch.
        sites: Watched modules by name.
        scopes: Modules by name that hold them.
        parameters: The model's parameters, or their stand-ins.
        blank: Results of sites that cannot run; None: they run.
        loss: Loss of the model's output.
    """
    provenance = Provenance(parameters, dict(model.named_buffers()), sample)
    run = _Run(provenance, blank)
    forwards = {module: run.site(path, module) for path, module in sites.items()}
    forwards |= {module: run.scope(path, module) for path, module in scopes.items()}
    with replaced_forwards(forwards), torch.no_grad(), NumbersRead(provenance), provenance:
        with _errors_converted():
            result = model(**sample)
        output = _output(result, provenance)
        read = None if loss is None else _read_by(loss, result, provenance)
    return Followed(
        calls=run.calls,
        output=output,
        loss=read,
        is_drawn=lambda value: bool(provenance.sources(value).random),
        written_inputs=frozenset(provenance.written_inputs),
        scoped_inputs=provenance.scoped_inputs,
    )


def _output(result: Any, provenance: Provenance) -> dict[str, Sources]:
    leaves = pytree.tree_flatten_with_path(result)[0]
    sources = {pytree.keystr(path): provenance.sources(leaf) for path, leaf in leaves if isinstance(leaf, torch.Tensor)}
    for path, leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            provenance.mark(leaf, Sources(outputs=frozenset([pytree.keystr(path)])))
    return sources


def _read_by(loss: Callable[[Any], Any], result: Any, provenance: Provenance) -> SeenCall:
    provenance.here = call = SeenCall(path="", call=0, line="")
    try:
        provenance.note_read(loss(result))
    finally:
        provenance.here = None
    return call


@contextmanager
def _errors_converted() -> Iterator[None]:
    """Converts errors of the model or torch to UnsplittableError."""
    try:
        yield
    except MosaicError:
        raise
    except Exception as error:  # of any kind: it is the user's code that runs
        raise UnsplittableError(
            f"the model cannot be followed: with the sample, without gradients, it raises {said_by(error)} "
            f"({line_of(error)}); see that it runs under torch.no_grad(), and that its layers take plain tensors"
        ) from error
