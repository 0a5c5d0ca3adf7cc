"""Sources of each tensor of a run: memory is marked with the calls, parameters and inputs behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mosaic.errors import UnsplittableError
from mosaic.parts.draws import draws_random_numbers
from mosaic.parts.finding.seen_call import NOTHING, SeenCall, Sources, caller, tensors_in

_SHAPE_ALONE = ("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like")
_READS = ("tolist", "item", "numpy", "__bool__", "__int__", "__float__", "__index__")


class Provenance(TorchDispatchMode):
    """Marks the memory of tensors while it is entered.

    Attributes:
        here: The running call; None between calls.
        scopes: Names of the modules around it.
        decided: Sources of Python numbers read between calls: all later results may depend on them.
        scoped_inputs: Inputs read in each scope while it was the innermost.
        kept: The first call whose inner tensor was read elsewhere, and the line that read it.
        written_inputs: Inputs that the model writes into.
    """

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor], sample: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self.here: SeenCall | None = None
        self.scopes: list[str] = []
        self.decided = NOTHING
        self.kept: tuple[str, str] | None = None
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
        known = NOTHING if anew else self._sources.get(weak.cdata, NOTHING)
        self._sources[weak.cdata] = known | sources
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
        if self.kept is None:
            made_in = (call.path for call in sources.inside if self.here is None or call.path != self.here.path)
            self.kept = next(((path, caller()) for path in made_in), None)
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
