"""One traced run of a model between sites: the layers, and the outermost modules beside them that hold no layers."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from traceback import walk_tb
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from mosaic.errors import MosaicError, UnsplittableError, said_by
from mosaic.find.random_numbers import python_state
from mosaic.find.structure import tensors_in
from mosaic.find.trace import NUMBER_READS, Operation, Tracer, caller
from mosaic.parts.blank import (
    BlankResults,
    Forward,
    ModuleCall,
    draws_random_numbers,
    hidden_of,
    is_kept_by_selection,
    replaced_forwards,
)
from mosaic.parts.split import Value


class Label(NamedTuple):
    """A source of a tensor."""

    kind: Literal["value", "parameter", "input", "random", "rows", "output", "inside"]
    """A ``Value``; the name of a parameter, of a tensor of the sample, or of a leaf of the output; a line between calls
    that drew random numbers, or that made the number of rows depend on values; a call that made the tensor and did not
    return it."""
    source: Any


Labels = frozenset[Label]
_NOTHING: Labels = frozenset()


def sources(labels: Iterable[Label], kind: str) -> set[Any]:
    return {label.source for label in labels if label.kind == kind}


@dataclass(kw_only=True, eq=False)
class TracedCall:
    """One call of a site, with its inputs."""

    path: str
    call: int
    """Number of earlier calls."""
    line: str
    """File and line that called it."""
    labels: set[Label] = field(default_factory=set)
    form: tuple[list[Any], Any] | None = None
    """Its result without the tensors."""
    has_effects: bool = False
    """True if a run changes arguments or buffers, or draws numbers of numpy or Python."""
    may_select: bool = True
    """False if something writes into a result that selective recomputation keeps."""
    keeps_shape: bool = False
    """True if its first result has its first input's shape."""

    @property
    def values(self) -> set[Value]:
        return sources(self.labels, "value")


class Dataflow(Tracer[Labels]):
    """Follows the tensors of one run from site to site; the outermost of nested sites counts.

    With ``blank``, sites do not run.

    Attributes:
        calls: The calls of sites, in order.
        scoped_inputs: Tensors of the sample that were read, by the innermost module around that holds layers.
        written_inputs: Tensors of the sample that the model wrote into.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        sample: Mapping[str, Any],
        blank: BlankResults | None,
    ) -> None:
        super().__init__(_NOTHING)
        self.calls: list[TracedCall] = []
        self.scoped_inputs: dict[str, set[str]] = {}
        self.written_inputs: set[str] = set()
        self._here: TracedCall | None = None
        self._decided = _NOTHING  # of numbers that Python read between calls: all later results may depend on them
        self._blank = blank
        self._kept: dict[int, TracedCall] = {}  # memory of results that selective recomputation keeps
        self._counts: Counter[str] = Counter()
        self._owned = {self.memory(buffer): ("buffer", name) for name, buffer in buffers.items()}
        labelled = [(tensor, Label("parameter", name)) for name, tensor in parameters.items()]
        labelled += [(each, Label("input", name)) for name, value in sample.items() for each in tensors_in(value)]
        for tensor, label in labelled:
            self._owned[self.memory(tensor)] = label
            self.mark(tensor, frozenset([label]))

    def begin(self, operation: Operation) -> None:
        for tensor in operation.written:
            self._check_written(tensor)
            if (maker := self._kept.get(self.memory(tensor))) is not None:
                maker.may_select = False
            if self._here is not None and Label("inside", self._here) not in self.labels([tensor]):
                self._here.has_effects = True

    def end(self, operation: Operation, labels: Labels) -> Labels:
        self.note_read(labels)
        if not operation.results:
            self._note_decision(labels)
        if self._here is not None:
            if is_kept_by_selection(operation.operator, operation.args, operation.kwargs):
                self._kept |= dict.fromkeys(map(self.memory, operation.created), self._here)
            return frozenset([Label("inside", self._here)])
        if not isinstance(operation.operator, torch._ops.OpOverload):
            return labels
        if sources(self.labels(_deciding_rows(operation)), "value"):
            return labels | {Label("rows", caller())}
        if draws_random_numbers(operation.operator, operation.args, operation.kwargs):
            return labels | {Label("random", caller())}
        return labels

    def function(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is torch.autograd.grad and self._here is None:
            raise UnsplittableError(
                f"gradients are computed between layers at {caller()}; other ranks have the layers that they would go "
                "through: do it within one layer, or in the loss"
            )
        if name in NUMBER_READS:
            labels = self.labels(tensors_in(args))
            self.note_read(labels)
            self._note_decision(labels)
        return func(*args, **kwargs)

    def note_read(self, labels: Labels) -> None:
        """Records a read by the running call, and by the module around it."""
        for call in sources(labels, "inside"):
            if self._here is None or call.path != self._here.path:
                raise kept_inside(call.path, caller())
        if self._here is not None:
            self._here.labels |= {label for label in labels if label.kind != "inside"}
        if self.running:
            self.scoped_inputs.setdefault(self.running[-1], set()).update(sources(labels, "input"))

    def _note_decision(self, labels: Labels) -> None:
        if self._here is None:
            self._decided |= {label for label in labels if label.kind in ("value", "parameter")}

    def _check_written(self, tensor: torch.Tensor) -> None:
        """Raises UnsplittableError for a parameter, or a buffer that others may read.

        A module may write into its own buffers, because it runs on one rank.
        """
        kind, name = self._owned.get(self.memory(tensor), ("", ""))
        is_own = self._here is not None and name.startswith(f"{self._here.path}.")
        if kind == "parameter" or (kind == "buffer" and not is_own):
            raise UnsplittableError(
                f"{kind} {name} is written into at {caller()}; other ranks would not see it: let the loop write it, "
                "behind the optimizer's step, or a buffer the module that holds it"
            )
        if kind == "input":
            self.written_inputs.add(name)

    @contextmanager
    def watching(self, sites: Mapping[str, nn.Module], scopes: Mapping[str, nn.Module]) -> Iterator[None]:
        """Follows what the block runs; converts errors of the model's own code."""
        forwards = {module: self._site(path, module) for path, module in sites.items()}
        with replaced_forwards(forwards), torch.no_grad(), self.following(scopes):
            try:
                yield
            except MosaicError:
                raise
            except Exception as error:  # of any kind: it is the user's code that runs
                raise UnsplittableError(
                    f"the model cannot be followed: with the sample, without gradients, it raises {said_by(error)} "
                    f"({_line_of(error)}); see that it runs under torch.no_grad(), and that its layers take plain "
                    "tensors"
                ) from error

    def _site(self, path: str, module: nn.Module) -> Forward:
        forward: Forward = module.forward
        weights = [*map(id, module.parameters())]

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._here is not None:
                return forward(*args, **kwargs)
            call = TracedCall(path=path, call=self._counts[path], line=caller(), labels={*self._decided})
            if _is_checkpointed():
                raise UnsplittableError(
                    f"{path} is called within torch.utils.checkpoint, as {call.line} has it; parts choose themselves "
                    "which layers are recomputed: call it directly and give strategies"
                )
            if [*map(id, module.parameters())] != weights:
                raise UnsplittableError(
                    f"{path} is called with other weights than its own at {call.line}, as functional_call does; "
                    "a rank that makes its layer again would not find them: change weights within the layer"
                )
            self._counts[path] += 1
            self.calls.append(call)
            with self._running(call):
                if self._blank is None:
                    before = python_state()
                    result = forward(*args, **kwargs)
                    call.has_effects |= not before.is_same(python_state())
                else:
                    result = self._blank_result(call, self._blank, ModuleCall(module, forward, args, kwargs))
            self._note_result(call, result, hidden_of(args, kwargs))
            return result

        return run

    @contextmanager
    def _running(self, call: TracedCall) -> Iterator[None]:
        self._here = call
        try:
            yield
        finally:
            self._here = None

    def _blank_result(self, call: TracedCall, blank: BlankResults, module_call: ModuleCall) -> Any:
        arguments = module_call.flat()[0]
        self.note_read(self.labels(tensors_in((module_call.args, module_call.kwargs))))
        with _disable_current_modes():
            result = blank.of(module_call)
            leaves, tree = blank.zeros(module_call)
        call.has_effects, call.may_select = result.has_effects, result.may_select
        for leaf, number in zip(leaves, result.passed, strict=True):
            if isinstance(leaf, torch.Tensor):
                inside = frozenset([Label("inside", call)])
                self.mark(leaf, inside if number is None else self.labels([arguments[number]]))
        return pytree.tree_unflatten(leaves, tree)

    def _note_result(self, call: TracedCall, result: Any, hidden: torch.Tensor | None) -> None:
        leaves, tree = pytree.tree_flatten(result)
        index = len(self.calls) - 1
        tensors = {number: leaf for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        before = {number: self.labels([leaf]) for number, leaf in tensors.items()}
        for number, leaf in tensors.items():
            if Label("inside", call) in before[number]:
                self.mark(leaf, _NOTHING, anew=True)
            else:  # an argument or its view, as from a dropout of rate 0
                with self._running(call):
                    self.note_read(before[number])
        rows = {label for label in call.labels if label.kind == "rows"}
        for number, leaf in tensors.items():
            self.mark(leaf, frozenset([Label("value", Value(index, number)), *rows]))
        call.form = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], tree
        if hidden is not None and 0 in tensors:
            call.keeps_shape = (leaves[0].shape, leaves[0].dtype) == (hidden.shape, hidden.dtype)

    def output_of(self, result: Any) -> dict[str, Labels]:
        """Returns the labels of each tensor of the model's output, by its place, and marks it."""
        leaves = {
            pytree.keystr(path): leaf
            for path, leaf in pytree.tree_flatten_with_path(result)[0]
            if isinstance(leaf, torch.Tensor)
        }
        output = {name: self.labels([leaf]) for name, leaf in leaves.items()}
        for name, leaf in leaves.items():
            self.mark(leaf, frozenset([Label("output", name)]))
        return output

    def loss_of(self, loss: Callable[[Any], Any], result: Any) -> TracedCall:
        """Returns what the loss of an output reads."""
        call = TracedCall(path="", call=0, line="")
        with self._running(call):
            self.note_read(self.labels(tensors_in(loss(result))))
        return call


def kept_inside(path: str, reader: str) -> UnsplittableError:
    """Returns the error of a tensor that a call makes and does not return, and that is read elsewhere."""
    return UnsplittableError(
        f"a tensor made inside of {path} is used outside of it at {reader}, other than as its result (a hook or an "
        "attribute keeps it); on another rank it is not there: return it, or switch off what uses it, such as "
        "output_router_logits"
    )


def _deciding_rows(operation: Operation) -> list[torch.Tensor]:
    """Returns tensors whose values determine the number of rows of an operator's result."""
    if torch.Tag.dynamic_output_shape not in operation.operator.tags:
        return []
    by_mask = operation.name in ("index", "masked_select")
    return [tensor for tensor in tensors_in(operation.args) if not by_mask or tensor.dtype in (torch.bool, torch.uint8)]


def _is_checkpointed() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != "torch.utils.checkpoint":
        frame = frame.f_back
    return frame is not None


def _line_of(error: BaseException) -> str:
    """Returns file and line of the user's code that raised an error."""
    frames = [(frame.f_globals.get("__name__", ""), frame, line) for frame, line in walk_tb(error.__traceback__)]
    own = [f"{f.f_code.co_filename}:{line}" for name, f, line in frames if not name.startswith(("mosaic.", "torch."))]
    return own[-1] if own else "in torch"
