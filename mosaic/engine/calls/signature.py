"""The signature of a kind of call: learned from the first call of that kind, relied on afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from mosaic.engine.calls.branch_graph import Survey, find_uses, survey
from mosaic.engine.calls.hidden import changed_setting, holds_back, read_settings, sets_context
from mosaic.engine.calls.obstacles import Obstacle, hides_tensors
from mosaic.engine.calls.thread_state import ThreadState, saved_tensor_hooks
from mosaic.engine.calls.torch_functions import attributes_of
from mosaic.find.random_numbers import (
    CPU,
    count_draws,
    draws_numbers,
    python_state,
    runs_own_code,
    torch_state,
    with_generator,
)
from mosaic.find.structure import Nesting, flatten, flatten_call, is_opaque, leaf_key, memory_of, versions_of

_LEAF = flatten(None)[1]
_CLASSES = (torch.Tensor, torch.nn.Parameter)
_DRAW_WITH_TORCH = "nothing, or draw with torch.rand and its like only"
_WRITES = Obstacle("it writes into one of its inputs", remedy="let it write to a copy")
_DRAWS = Obstacle("it draws random numbers in a way that cannot be foreseen", remedy=_DRAW_WITH_TORCH)
_DRAWS_OTHERWISE = Obstacle("it draws from Python's or numpy's random numbers", remedy="draw with torch")
_SHARES = Obstacle("it uses a parameter that is used outside of it too", remedy="move that use into the module")
_SPARSE = Obstacle("it returns a sparse or nested tensor", remedy="make it sparse or nested where it is used")
_ATTRIBUTES = Obstacle("it returns a tensor with attributes or of another class", remedy="return them beside it")
_VIEWS = Obstacle("it returns a view of one of its inputs, so that a write changes both", remedy="return a copy")
_RECASTS = Obstacle("it uses a weight several times, in an autocast that may end before its lane does")
HOOKS_GRADIENTS = Obstacle("it hooks or keeps gradients of its arguments or results", remedy="do that around its call")
_FORWARD_DERIVATIVES = Obstacle("it takes forward-mode derivatives, of which torch has one level for all threads")
_SWITCHES = Obstacle("it leaves gradient mode or autocast switched", remedy="switch them in a `with` block")
_CHECKPOINTS = Obstacle("it uses activation checkpointing or other hooks on saved tensors", remedy="leave these out")


@dataclass(frozen=True, slots=True)
class OutputInfo:
    like: torch.Tensor  # on the meta device, with its shape, strides and dtype
    differentiable: bool
    same_input: int | None  # the index of the input leaf that it is
    shares_memory: bool = False  # another result that requires a gradient is a view of the same memory
    view_of: int | None = None  # the index of the input leaf that it is a view of


@dataclass(frozen=True, kw_only=True)
class Signature:
    """The results of one kind of call, the uses of its inputs, and the number of its random draws."""

    outputs: tuple[OutputInfo, ...]  # its distinct tensors, in order of appearance
    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]  # for each leaf of the result the index of its tensor, or ``(value,)`` for anything else
    edges: tuple[int, ...]  # for each use of a differentiable input, in backward order, which input
    draws: int = 0  # 32-bit random numbers
    may_draw: bool = False  # it draws some, or may in another call of the same kind
    obstacle: Obstacle | None = None
    alone: str | None = None  # why two calls in one backward would sum gradients in another order on a lane
    writes_buffers: bool = False  # of the module, as a BatchNorm does
    reached_from: tuple[frozenset[int], ...] | None = None
    """For each edge, the results that it gets a gradient from, by their index in ``new_outputs``; None: from all."""

    @cached_property
    def new_outputs(self) -> tuple[OutputInfo, ...]:
        return tuple(output for output in self.outputs if output.same_input is None)

    @cached_property
    def is_single(self) -> bool:
        return self.spec == _LEAF and self.leaves == (0,) and self.outputs[0].same_input is None

    @cached_property
    def layouts(self) -> list[tuple[Any, ...]]:
        return [layout_of(output.like, output.differentiable) for output in self.outputs]

    @cached_property
    def values(self) -> list[Any]:
        return [leaf[0] for leaf in self.leaves if isinstance(leaf, tuple)]


class Arguments:
    """A call's arguments and the caller's thread."""

    __slots__ = ("context", "differentiable", "grad", "leaves", "nesting", "state", "tensors")

    def __init__(self, leaves: list[Any], nesting: Nesting, state: ThreadState) -> None:
        self.leaves = leaves
        self.nesting = nesting
        self.state = state  # the caller's thread, as torch keeps it
        self.context = copy_context()  # the caller's thread, as Python keeps it; to be entered once
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.grad = state.grad
        wanted = [tensor for tensor in self.tensors if tensor.requires_grad] if self.grad else []
        self.differentiable = list({id(tensor): tensor for tensor in wanted}.values())

    @staticmethod
    def take(args: tuple[Any, ...], kwargs: dict[str, Any], instead: Callable[[Any], Any] | None = None) -> Arguments:
        """Takes arguments apart, and replaces each leaf by ``instead(leaf)``."""
        leaves, nesting = flatten_call(args, kwargs)
        return Arguments(leaves if instead is None else list(map(instead, leaves)), nesting, ThreadState.capture())

    @property
    def opaque(self) -> str | None:
        """The type of a leaf that may hide tensors."""
        if len(self.tensors) == len(self.leaves):
            return None
        return next((type(leaf).__name__ for leaf in self.leaves if is_opaque(leaf)), None)

    def key(self, *of_module: Hashable) -> Hashable:
        ids = list(map(id, self.tensors))
        repeats = tuple(map(ids.index, ids)) if len(set(ids)) < len(ids) else None
        return (self.nesting, tuple(map(leaf_key, self.leaves)), repeats, self.state, of_module)


class CallWatch(TorchDispatchMode):
    """Finds, operator by operator, why a lane cannot make a call as its caller would."""

    def __init__(self) -> None:
        super().__init__()
        self.setting: str | None = None
        self.obstacle: Obstacle | None = None
        self._hooks = saved_tensor_hooks()
        self._settings = read_settings()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._compare_settings()
        if saved_tensor_hooks() != self._hooks:
            # Recomputing saves and restores the random numbers of the whole process, from each lane's thread.
            self.obstacle = _CHECKPOINTS
        if forward_ad._current_level >= 0:
            self.obstacle = _FORWARD_DERIVATIVES
        if not draws_numbers(func):
            return func(*args, **(kwargs or {}))
        if (kwargs or {}).get("generator") is not None:
            self.obstacle = Obstacle(
                "it draws random numbers from a generator of its own, which others may use too", remedy=_DRAW_WITH_TORCH
            )
        before = torch_state(CPU)
        result = func(*args, **(kwargs or {}))
        if before.is_same(torch_state(CPU)):  # attention without dropout, say, may draw and does not
            return result
        if with_generator(func) is None:
            self.obstacle = Obstacle(
                f"it draws random numbers through {func}, which takes no generator", remedy=_DRAW_WITH_TORCH
            )
        return result

    def __exit__(self, *reason: Any) -> None:
        super().__exit__(*reason)
        self._compare_settings()

    def _compare_settings(self) -> None:
        self.setting = self.setting or changed_setting(self._settings, read_settings())


def learn(
    run: Callable[[], Any],
    arguments: Arguments,
    module: torch.nn.Module | None,
    parted: frozenset[int] = frozenset(),
) -> tuple[Any, list[torch.Tensor], Signature]:
    """Runs a call where it was made; returns its result, the tensors that it made, and what to expect of the next."""
    versions = versions_of(arguments.tensors)
    before, others = torch_state(CPU), python_state()
    buffers = [] if module is None else list(module.buffers())
    buffer_versions = versions_of(buffers)
    context, followers = copy_context(), _followers(arguments.tensors)
    with CallWatch() as watch:
        result = run()
    draws = count_draws(before, torch_state(CPU))
    leaves, spec = flatten(result)
    hidden = next((leaf for leaf in leaves if is_opaque(leaf)), None)
    inputs = {id(leaf) for leaf in arguments.leaves}
    new_tensors = list({id(t): t for t in leaves if isinstance(t, torch.Tensor) and id(t) not in inputs}.values())
    differentiable = [tensor for tensor in new_tensors if tensor.requires_grad]
    is_hooked = followers != _followers(arguments.tensors)
    is_hooked |= any(keeps or hooks for _, keeps, hooks in _followers(new_tensors))
    graph = survey(differentiable, arguments.differentiable)
    expected = _describe(leaves, spec, arguments)
    obstacles = (
        _changes(watch.setting) if watch.setting is not None else None,
        hides_tensors("returns", hidden) if hidden is not None else None,
        _WRITES if versions != versions_of(arguments.tensors) else None,
        HOOKS_GRADIENTS if is_hooked else None,
        watch.obstacle,
        _DRAWS if draws is None else None,
        _DRAWS_OTHERWISE if not others.is_same(python_state()) else None,
        None if module is None else _foreign(graph, module),
        _SHARES if parted & graph.leaves.keys() else None,
        _SPARSE if any(tensor.layout != torch.strided or tensor.is_nested for tensor in new_tensors) else None,
        _ATTRIBUTES if any(type(t) not in _CLASSES or attributes_of(t) for t in new_tensors) else None,
        _VIEWS if any(output.differentiable and output.view_of is not None for output in expected.outputs) else None,
        _RECASTS if graph.recasts and arguments.state.autocast and arguments.state.autocast_cache else None,
        _CHECKPOINTS if graph.recomputes else None,
        _SWITCHES if arguments.state != ThreadState.capture() else None,
        sets_context(context, copy_context()),
        holds_back(module),
    )
    signature = replace(
        expected,
        draws=draws or 0,
        may_draw=bool(draws) or module is None or runs_own_code(module),
        obstacle=next((reason for reason in obstacles if reason is not None), None),
        alone=_alone(graph, arguments.state),
        writes_buffers=buffer_versions != versions_of(buffers),
    )
    return result, new_tensors, signature


def _followers(tensors: Sequence[torch.Tensor]) -> list[tuple[bool, bool, int]]:
    return [(tensor.requires_grad, tensor.retains_grad, len(tensor._backward_hooks or ())) for tensor in tensors]


def _alone(graph: Survey, state: ThreadState) -> str | None:
    if any(count > 1 for count in graph.uses.values()):
        return "it uses a parameter several times"
    if state.autocast and state.autocast_cache and graph.uses:
        return "autocast keeps its cast weights from one call to the next"
    return None


def _changes(setting: str) -> Obstacle:
    what = f"it changes {setting}, which the whole process shares, while it runs"
    return Obstacle(what, remedy="change it around the model's call", apart=True)


def _foreign(graph: Survey, module: torch.nn.Module) -> Obstacle | None:
    own = {id(parameter) for parameter in module.parameters()}
    strange = [tensor for key, tensor in graph.leaves.items() if key not in own]
    if not strange:
        return None
    shape = "x".join(map(str, strange[0].shape)) or "scalar"
    what = f"its result depends on a {shape} tensor that is neither an argument nor one of its parameters"
    return Obstacle(what, remedy="pass it as an argument")


def learn_function(func: Callable[..., Any], arguments: Arguments) -> Signature | None:
    """Returns what a function between modules returns, by one run on zeros; None where it has to run on its inputs.

    Sums depend on the order in which memory is read, and torch's meta device does not always have the strides of
    kernels.
    """
    zeros: dict[int, torch.Tensor] = {}
    for tensor in arguments.tensors:
        if id(tensor) not in zeros:
            sizes = tuple(zip(tensor.size(), tensor.stride(), strict=True))
            span = 0 if tensor.numel() == 0 else 1 + sum((size - 1) * stride for size, stride in sizes)
            # Itself a view: with autograd off, views of one that is not require gradients and have no graph.
            zero = torch.zeros(span, dtype=tensor.dtype).as_strided(tensor.size(), tensor.stride())
            zeros[id(tensor)] = zero.requires_grad_(tensor.requires_grad)
    like = Arguments([zeros.get(id(leaf), leaf) for leaf in arguments.leaves], arguments.nesting, arguments.state)
    args, kwargs = like.nesting.unflatten(like.leaves)
    try:
        result = func(*args, **kwargs)
    except Exception:  # zeros or shapes that do not fit: the function itself says what is wrong
        return None
    leaves, spec = flatten(result)
    if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return None
    return _describe(leaves, spec, like)


def layout_of(tensor: torch.Tensor, differentiable: bool) -> tuple[Any, ...]:
    """Returns shape, dtype, differentiability, and strides if they are not contiguous; those of one element are 1."""
    shape, strides = tensor.shape, None
    if tensor.layout is torch.strided and not tensor.is_contiguous():
        strides = tuple([stride if size > 1 else 1 for size, stride in zip(shape, tensor.stride(), strict=True)])
    return tuple(shape), tensor.dtype, differentiable, strides


def _describe(leaves: list[Any], spec: pytree.TreeSpec, arguments: Arguments) -> Signature:
    distinct = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
    order = {key: index for index, key in enumerate(distinct)}
    inputs = arguments.differentiable
    came = {id(leaf): index for index, leaf in enumerate(arguments.leaves) if isinstance(leaf, torch.Tensor)}
    places = {place: came[id(tensor)] for tensor in arguments.tensors if (place := memory_of(tensor))}
    results = list(distinct.values())
    returned = [came.get(id(tensor)) for tensor in results]
    new = [tensor for tensor, index in zip(results, returned, strict=True) if index is None]
    new_tensors = [tensor for tensor in new if tensor.requires_grad]
    uses = find_uses(new_tensors, inputs)
    reached = {pick: set(find_uses([tensor], inputs)) for pick, tensor in enumerate(new) if tensor.requires_grad}
    memory = Counter(place for tensor in new_tensors if (place := memory_of(tensor)))
    outputs = tuple(
        OutputInfo(
            like=_on_meta(tensor),
            differentiable=tensor.requires_grad,
            same_input=index,
            shares_memory=index is None and tensor.requires_grad and memory[memory_of(tensor)] > 1,
            view_of=places.get(memory_of(tensor)) if index is None else None,
        )
        for tensor, index in zip(results, returned, strict=True)
    )
    return Signature(
        outputs=outputs,
        spec=spec,
        leaves=tuple(order[id(leaf)] if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in leaves),
        edges=tuple(use.input for use in uses),
        reached_from=tuple(frozenset(pick for pick, own in reached.items() if use in own) for use in uses),
    )


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor without values that has a tensor's shape, strides and dtype; any for one that has no strides."""
    if tensor.layout != torch.strided or tensor.is_nested:
        return torch.empty(0, dtype=tensor.dtype, device="meta")
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
