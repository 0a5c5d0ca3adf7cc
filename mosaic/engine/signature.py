"""What is known of a module's calls: learned from the first call of each kind, relied on afterwards."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from mosaic.engine.branch_graph import find_uses
from mosaic.engine.random_numbers import RandomnessWatch, count_draws
from mosaic.engine.structure import flatten, is_opaque, leaf_key
from mosaic.engine.thread_state import ThreadState


@dataclass(frozen=True, slots=True)
class OutputInfo:
    """One tensor that a call returns."""

    like: torch.Tensor
    """A tensor on the meta device with its shape, strides and dtype."""
    differentiable: bool
    """Whether it requires a gradient."""
    uses: frozenset[int]
    """Edges (see ``Signature.edges``) that its gradient reaches."""
    same_input: int | None
    """Index of the input leaf that is returned as it came, or None."""


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
    obstacle: str | None
    """Why calls of this kind run where they are made, or None."""

    @property
    def made(self) -> list[OutputInfo]:
        """The outputs that the module makes, rather than passing an input on."""
        return [output for output in self.outputs if output.same_input is None]


@dataclass(frozen=True, slots=True)
class Arguments:
    """A call's arguments, taken apart."""

    leaves: list[Any]
    """Tensors and other values."""
    spec: pytree.TreeSpec
    """How they nest."""
    state: ThreadState
    """The caller's thread."""

    @staticmethod
    def take(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Takes arguments apart."""
        leaves, spec = flatten((args, kwargs))
        return Arguments(leaves, spec, ThreadState.capture())

    @property
    def differentiable(self) -> list[torch.Tensor]:
        """Distinct tensors that want a gradient, in order of appearance."""
        if not self.state.grad:
            return []
        found = {id(leaf): leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad}
        return list(found.values())

    @property
    def opaque(self) -> str | None:
        """Type of a leaf that may hide tensors, or None."""
        return next((type(leaf).__name__ for leaf in self.leaves if is_opaque(leaf)), None)

    def key(self, module: torch.nn.Module | None) -> Hashable:
        """Returns what two calls must share to be of one kind."""
        first: dict[int, int] = {}
        repeats = tuple(
            first.setdefault(id(leaf), index)
            for index, leaf in enumerate(self.leaves)
            if isinstance(leaf, torch.Tensor)
        )
        modes = () if module is None else tuple(part.training for part in module.modules())
        return (self.spec, tuple(map(leaf_key, self.leaves)), repeats, self.state, modes)


def learn(run: Callable[[], Any], arguments: Arguments) -> tuple[Any, Signature]:
    """Runs a call where it was made and returns its result and what to expect of the next one of its kind."""
    tensors = [leaf for leaf in arguments.leaves if isinstance(leaf, torch.Tensor)]
    versions = [tensor._version for tensor in tensors]
    before = torch.get_rng_state()
    with RandomnessWatch() as watch:
        result = run()
    draws = count_draws(before, torch.get_rng_state())
    obstacle = watch.obstacle
    if draws is None:
        obstacle = obstacle or "it draws random numbers in a way that cannot be foreseen"
    if versions != [tensor._version for tensor in tensors]:
        obstacle = "it writes into one of its inputs"
    leaves, spec = flatten(result)
    hidden = next((type(leaf).__name__ for leaf in leaves if is_opaque(leaf)), None)
    if hidden is not None:
        obstacle = f"it returns a {hidden}, which may hide tensors"
    return result, _describe(leaves, spec, arguments, draws or 0, obstacle)


def _describe(
    leaves: list[Any], spec: pytree.TreeSpec, arguments: Arguments, draws: int, obstacle: str | None
) -> Signature:
    distinct = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
    order = {key: index for index, key in enumerate(distinct)}
    inputs = arguments.differentiable
    came = {id(leaf): index for index, leaf in enumerate(arguments.leaves) if isinstance(leaf, torch.Tensor)}
    results = list(distinct.values())
    returned = [came.get(id(tensor)) for tensor in results]
    made = [tensor for tensor, index in zip(results, returned, strict=True) if index is None and tensor.requires_grad]
    uses = find_uses(made, inputs)
    number = {(use.node, use.position): edge for edge, use in enumerate(uses)}
    outputs = tuple(
        OutputInfo(
            like=torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta"),
            differentiable=tensor.requires_grad,
            uses=frozenset(number[use.node, use.position] for use in find_uses([tensor], inputs))
            if inputs and tensor.requires_grad and index is None
            else frozenset(),
            same_input=index,
        )
        for tensor, index in zip(results, returned, strict=True)
    )
    return Signature(
        outputs=outputs,
        spec=spec,
        leaves=tuple(order[id(leaf)] if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in leaves),
        edges=tuple(use.input for use in uses),
        draws=draws,
        obstacle=obstacle,
    )
