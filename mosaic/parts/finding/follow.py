"""Dataflow of tensors between sites in one run of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from mosaic.errors import MosaicError, UnsplittableError, said_by
from mosaic.find.random_numbers import python_state
from mosaic.parts.blank import BlankResults
from mosaic.parts.doors import Forward, hidden_of, replaced_forwards
from mosaic.parts.finding.provenance import NumbersRead, Provenance
from mosaic.parts.finding.seen_call import NOTHING, SeenCall, Sources, caller, is_checkpointed, line_of
from mosaic.parts.split import Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """Result of one run."""

    calls: list[SeenCall]
    """In order."""
    output: dict[str, Sources]
    """Sources of each returned tensor, by its place in the output."""
    loss: SeenCall | None
    """Reads of the loss; None without a loss."""
    kept: tuple[str, str] | None
    """A call whose inner tensor is read elsewhere, and the line that reads it."""
    is_drawn: Callable[[Any], bool]
    """Returns True if tensors in a container were drawn between calls."""
    written_inputs: frozenset[str]
    """Tensors of the sample that the model wrote into."""
    scoped_inputs: dict[str, set[str]]
    """Tensors of the sample that were read between calls, by the module that holds the layers."""


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
            call.hooked = self._blank.hooked_in(module, forward, args, kwargs)
        for leaf, argument in zip(leaves, passed, strict=True):
            if argument is not None:
                self.provenance.mark(leaf, self.provenance.sources(argument))
        self._run_hooks(call, module, self._blank, first=len(leaves))
        return pytree.tree_unflatten(leaves, tree)

    def _run_hooks(self, call: SeenCall, module: nn.Module, blank: BlankResults, *, first: int) -> None:
        """Calls hooks inside a call that does not run, with zeros, which become further values of the call."""
        leaf = first
        for hooked in call.hooked:
            with _disable_current_modes():
                tensors = [blank.zeros(hooked.leaves[number]) for number in hooked.tensors]
            for tensor in tensors:
                self.provenance.mark(tensor, Sources(values=frozenset([Value(len(self.calls) - 1, leaf)])))
                leaf += 1
            hooked.run_hooks(module, tensors)

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
        kept=provenance.kept,
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
