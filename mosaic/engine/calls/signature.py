"""The signature of a kind of call: learned from the first call of that kind, relied on afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from contextvars import Context, copy_context
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from mosaic.engine.calls.branch_graph import Survey, find_uses, survey
from mosaic.engine.calls.hidden import belongs_to_thread, sets_context
from mosaic.engine.calls.obstacles import Obstacle, hides_tensors
from mosaic.engine.calls.random_numbers import (
    DRAW_WITH_TORCH,
    CallWatch,
    may_draw,
)
from mosaic.engine.calls.shapes import on_meta
from mosaic.engine.calls.structure import (
    flatten,
    is_opaque,
    leaf_key,
    memory_of,
    tensors_in,
    unflatten,
    version_of,
)
from mosaic.engine.calls.thread_state import ThreadState
from mosaic.find.random_numbers import CPU, count_draws, python_state, torch_state

_WRITES = Obstacle("it writes into one of its inputs", todo="let it write to a copy")
_DRAWS = Obstacle("it draws random numbers in a way that cannot be foreseen", todo=DRAW_WITH_TORCH)
_DRAWS_OTHERWISE = Obstacle("it draws from Python's or numpy's random numbers", todo="draw with torch")
_SHARES = Obstacle(
    "it uses a parameter that is used outside of it too",
    todo="move that use into the module, or leave it where it is",
)
_SPARSE = Obstacle("it returns a sparse tensor", todo="make it sparse where it is used")
_CHECKPOINTS = Obstacle(
    "it uses activation checkpointing", todo="nothing, if memory needs it; on its lane it would run without"
)


@dataclass(frozen=True, slots=True)
class OutputInfo:
    """One tensor that a call returns."""

    like: torch.Tensor
    """A tensor on the meta device with its shape, strides and dtype."""
    differentiable: bool
    """Whether it requires a gradient."""
    same_input: int | None
    """Index of the input leaf that is returned as it came, or None."""
    shares_memory: bool = False
    """Whether another result that requires a gradient has the same memory, as one that is a view of the other."""
    view_of: int | None = None
    """Index of the input leaf that it is a view of, or None; known of functions alone."""


@dataclass(frozen=True, slots=True)
class Signature:
    """What one kind of call returns, how often it uses its inputs, and how many random numbers it draws."""

    outputs: tuple[OutputInfo, ...]
    """Its distinct tensors, in order of appearance."""
    spec: pytree.TreeSpec
    """The shape of the nested result."""
    leaves: tuple[Any, ...]
    """For each leaf of the result the index of its tensor, or ``(value,)`` for anything else."""
    edges: tuple[int, ...]
    """For each use of a differentiable input, in backward order, which input."""
    draws: int
    """32-bit random numbers drawn."""
    drawing: tuple[torch.nn.Module, ...] | None
    """The parts of the module that draw them, or may, each a module of its own; None if the module itself may."""
    obstacle: Obstacle | None
    """Why calls of this kind run where they are made, or None."""
    alone: str | None
    """Why two calls of this kind in one backward would sum gradients in another order on a lane, or None."""
    recasts: bool
    """Whether it uses a weight several times that autocast has cast once: all uses must fall in one autocast."""
    writes_buffers: bool = False
    """Whether it writes into buffers of the module, as a BatchNorm does."""
    views_input: bool = False
    """Whether a result that requires a gradient is a view of an input."""
    reached_from: tuple[frozenset[int], ...] | None = None
    """For each edge, the results that it gets a gradient from, by their index in ``made``; None: from all."""

    @property
    def may_draw(self) -> bool:
        """Whether it draws random numbers, or may in another call of the same kind."""
        return self.draws > 0 or self.drawing != ()

    @property
    def made(self) -> list[OutputInfo]:
        """The outputs that the module makes, rather than passing an input on."""
        return [output for output in self.outputs if output.same_input is None]

    def reaches(self, edge: int, picks: frozenset[int]) -> bool:
        """Returns True if an edge gets a gradient when the results ``picks`` have one."""
        return self.reached_from is None or not picks.isdisjoint(self.reached_from[edge])


@dataclass(frozen=True, slots=True)
class Arguments:
    """A call's arguments, taken apart."""

    leaves: list[Any]
    """Tensors and other values."""
    spec: pytree.TreeSpec
    """How they nest."""
    state: ThreadState
    """The caller's thread, as torch keeps it."""
    context: Context = field(default_factory=copy_context)
    """The caller's thread, as Python keeps it; to be entered once."""
    differentiable: list[torch.Tensor] = field(init=False)
    """Distinct tensors that want a gradient, in order of appearance."""

    def __post_init__(self) -> None:
        tensors = (leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad)
        distinct = {id(tensor): tensor for tensor in tensors} if self.state.grad else {}
        object.__setattr__(self, "differentiable", list(distinct.values()))

    @staticmethod
    def take(args: tuple[Any, ...], kwargs: dict[str, Any], instead: Callable[[Any], Any] | None = None) -> Arguments:
        """Takes arguments apart, and replaces each leaf by ``instead(leaf)``."""
        leaves, spec = flatten((args, kwargs))
        return Arguments(leaves if instead is None else list(map(instead, leaves)), spec, ThreadState.capture())

    @property
    def opaque(self) -> str | None:
        """Type of a leaf that may hide tensors, or None."""
        return next((type(leaf).__name__ for leaf in self.leaves if is_opaque(leaf)), None)

    @property
    def versions(self) -> list[int | None]:
        """How often each tensor was written to."""
        return [version_of(leaf) for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    def key(self, *of_module: Hashable) -> Hashable:
        """Returns what two calls must share to be of one kind."""
        first: dict[int, int] = {}
        repeats = tuple(
            first.setdefault(id(leaf), index)
            for index, leaf in enumerate(self.leaves)
            if isinstance(leaf, torch.Tensor)
        )
        return (self.spec, tuple(map(leaf_key, self.leaves)), repeats, self.state, of_module)


def learn(
    run: Callable[[], Any],
    arguments: Arguments,
    module: torch.nn.Module | None,
    parted: frozenset[int] = frozenset(),
) -> tuple[Any, list[torch.Tensor], Signature]:
    """Runs a call where it was made; returns its result, the tensors that it made, and what to expect of the next.

    Args:
        run: Makes the call.
        arguments: What it is called with.
        module: Whose call it is; None for a function.
        parted: Ids of the module's parameters that only others are known to use.
    """
    versions = arguments.versions
    before, others = torch_state(CPU), python_state()
    buffers = buffer_versions(module)
    context = copy_context()
    with CallWatch(module) as watch:
        result = run()
    draws = count_draws(before, torch_state(CPU))
    leaves, spec = flatten(result)
    hidden = next((leaf for leaf in leaves if is_opaque(leaf)), None)
    came = {id(leaf) for leaf in arguments.leaves}
    made = list({id(t): t for t in leaves if isinstance(t, torch.Tensor) and id(t) not in came}.values())
    found = survey([tensor for tensor in made if tensor.requires_grad], arguments.differentiable)
    obstacles = [
        _changes(watch.setting),
        hides_tensors("returns", hidden) if hidden is not None else None,
        _WRITES if versions != arguments.versions else None,
        watch.obstacle,
        _DRAWS if draws is None else None,
        _DRAWS_OTHERWISE if not others.is_same(python_state()) else None,
        _foreign(found, module),
        _SHARES if parted & found.leaves.keys() else None,
        _SPARSE if any(tensor.layout != torch.strided for tensor in made) else None,
        _CHECKPOINTS if any("Checkpoint" in name for name in found.names) else None,
        sets_context(context, copy_context()),
        belongs_to_thread(module),
    ]
    obstacle = next((reason for reason in obstacles if reason is not None), None)
    drew = [*watch.parts, *(part for part in may_draw(module) if all(part is not known for known in watch.parts))]
    parts = tuple(part for part in drew if part is not None and part is not module)
    drawing = parts if len(parts) == len(drew) else None
    signature = _describe(leaves, spec, arguments, draws or 0, obstacle, _alone(found, arguments.state))
    recasts = found.recasts and arguments.state.autocast and arguments.state.autocast_cache
    writes = buffers != buffer_versions(module)
    return result, made, replace(signature, drawing=drawing, recasts=recasts, writes_buffers=writes)


def buffer_versions(module: torch.nn.Module | None) -> list[int]:
    """Returns how often each buffer of a module was written to."""
    return [] if module is None else [0 if b.is_inference() else b._version for b in module.buffers()]


def _alone(found: Survey, state: ThreadState) -> str | None:
    if any(count > 1 for count in found.uses.values()):
        return "it uses a parameter several times"
    if state.autocast and state.autocast_cache and found.uses:
        return "autocast keeps its cast weights from one call to the next"
    return None


def _changes(setting: str | None) -> Obstacle | None:
    if setting is None:
        return None
    return Obstacle(
        f"it changes {setting}, which torch has for the whole process, while it runs",
        todo="change it around the model's call",
        apart=True,
    )


def _foreign(found: Survey, module: torch.nn.Module | None) -> Obstacle | None:
    """Returns an obstacle if results depend on what is neither an argument nor a parameter of the module."""
    if module is None:
        return None
    own = {id(parameter) for parameter in module.parameters()}
    strange = [tensor for key, tensor in found.leaves.items() if key not in own]
    if not strange:
        return None
    shape = "x".join(map(str, strange[0].shape)) or "scalar"
    return Obstacle(
        f"its result depends on a {shape} tensor that is neither an argument nor one of its parameters",
        todo="pass it as an argument",
    )


def learn_function(func: Callable[..., Any], arguments: Arguments) -> Signature | None:
    """Returns what a function between modules returns, by one run on zeros; None where it has to run on its inputs.

    Sums depend on the order in which memory is read, and torch's meta device does not always have the strides of
    kernels.
    """
    zeros: dict[int, torch.Tensor] = {}
    for leaf in arguments.leaves:
        if isinstance(leaf, torch.Tensor) and id(leaf) not in zeros:
            sizes = tuple(zip(leaf.size(), leaf.stride(), strict=True))
            span = 0 if leaf.numel() == 0 else 1 + sum((size - 1) * stride for size, stride in sizes)
            zero = torch.zeros(span, dtype=leaf.dtype).as_strided(leaf.size(), leaf.stride())
            zeros[id(leaf)] = zero.requires_grad_(leaf.requires_grad)
    like = replace(arguments, leaves=[zeros.get(id(leaf), leaf) for leaf in arguments.leaves])
    args, kwargs = unflatten(like.leaves, like.spec)
    try:
        result = func(*args, **kwargs)
    except Exception:  # zeros or shapes that do not fit: the function itself says what is wrong
        return None
    leaves, spec = flatten(result)
    if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return None
    signature = _describe(leaves, spec, like, 0, None, None)
    places = {memory_of(leaf): index for index, leaf in enumerate(like.leaves) if isinstance(leaf, torch.Tensor)}
    places.pop(0, None)
    outputs = [
        replace(output, view_of=places.get(memory_of(leaf)) if output.same_input is None else None)
        for output, leaf in zip(signature.outputs, {id(leaf): leaf for leaf in leaves}.values(), strict=True)
    ]
    return replace(signature, outputs=tuple(outputs), drawing=())


def strides_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns strides; those of dimensions with one element say nothing and are 1."""
    return tuple([stride if size > 1 else 1 for size, stride in zip(tensor.size(), tensor.stride(), strict=True)])


def _describe(
    leaves: list[Any],
    spec: pytree.TreeSpec,
    arguments: Arguments,
    draws: int,
    obstacle: Obstacle | None,
    alone: str | None,
) -> Signature:
    distinct = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
    order = {key: index for index, key in enumerate(distinct)}
    inputs = arguments.differentiable
    came = {id(leaf): index for index, leaf in enumerate(arguments.leaves) if isinstance(leaf, torch.Tensor)}
    results = list(distinct.values())
    returned = [came.get(id(tensor)) for tensor in results]
    new = [tensor for tensor, index in zip(results, returned, strict=True) if index is None]
    made = [tensor for tensor in new if tensor.requires_grad]
    uses = find_uses(made, inputs)
    reached = {pick: set(find_uses([tensor], inputs)) for pick, tensor in enumerate(new) if tensor.requires_grad}
    memory = Counter(place for tensor in made if (place := memory_of(tensor)))
    outputs = tuple(
        OutputInfo(
            like=on_meta(tensor),
            differentiable=tensor.requires_grad,
            same_input=index,
            shares_memory=index is None and tensor.requires_grad and memory[memory_of(tensor)] > 1,
        )
        for tensor, index in zip(results, returned, strict=True)
    )
    return Signature(
        outputs=outputs,
        spec=spec,
        leaves=tuple(order[id(leaf)] if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in leaves),
        edges=tuple(use.input for use in uses),
        draws=draws,
        drawing=None,
        obstacle=obstacle,
        alone=alone,
        recasts=False,
        reached_from=tuple(frozenset(pick for pick, found in reached.items() if use in found) for use in uses),
        views_input=any(memory_of(tensor) in memory for tensor in tensors_in(arguments.leaves)),
    )
