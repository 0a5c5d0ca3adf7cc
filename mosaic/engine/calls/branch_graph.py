"""The uses that a module's autograd graph makes of its inputs, so that gradients are summed in the plain loop's order.

A tensor that feeds several operators gets a gradient from each, and the autograd engine adds these in reverse order of
the operators' creation. A module on a lane has a graph of its own, cut at its inputs. Every use of an input is an edge
of its own there: gradients are kept apart inside and summed outside, in the plain loop's order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.autograd.graph import Node, get_gradient_edge

from mosaic.find.structure import flatten

Target: TypeAlias = tuple[Node, int]


class Use(NamedTuple):
    """One edge from an operator inside the module to one of its inputs."""

    node: Node  # of the operator's backward
    position: int  # among the node's gradients
    input: int  # among the module's differentiable inputs


def find_uses(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[Use]:
    """Returns the uses of ``inputs`` in the graph behind ``outputs``, in the order in which backward meets them.

    The search stops at the inputs, so it sees the module's own graph only.
    """
    targets = {target_of(tensor): index for index, tensor in enumerate(inputs)}
    edges = (edge for edge in _edges(outputs, targets) if edge[0] is not None and edge[2] in targets)
    uses = [Use(node, position, targets[target]) for node, position, target in edges]
    return sorted(uses, key=lambda use: (-use.node._sequence_nr(), use.position))


def _edges(outputs: Sequence[torch.Tensor], stops: Collection[Target]) -> Iterator[tuple[Any, int, Target]]:
    """Yields each edge behind ``outputs``, not beyond ``stops``: its node, or None, its position there, its target."""
    seen: set[Node] = set()
    todo: list[tuple[Any, int, Any]] = [(None, 0, target_of(tensor)) for tensor in outputs]
    while todo:
        edge = todo.pop()
        yield edge
        target, node = edge[2], edge[2][0]
        if target not in stops and node not in seen:
            seen.add(node)
            todo += [(node, at, after) for at, after in enumerate(node.next_functions) if after[0] is not None]


def target_of(tensor: torch.Tensor) -> Target:
    return get_gradient_edge(tensor)[:2]


def capture(uses: Sequence[Use], into: list[torch.Tensor | None]) -> None:
    """Makes backward put each use's gradient into ``into`` instead of summing it."""
    by_node: dict[Node, list[tuple[int, int]]] = {}
    for edge, use in enumerate(uses):
        by_node.setdefault(use.node, []).append((edge, use.position))
    for node, edges in by_node.items():
        node.register_hook(_capturing(edges, into))


def _capturing(edges: list[tuple[int, int]], into: list[torch.Tensor | None]) -> Any:
    def hook(grad_inputs: Sequence[torch.Tensor | None], _: Any) -> tuple[torch.Tensor | None, ...]:
        gradients = list(grad_inputs)
        for edge, position in edges:
            into[edge] = gradients[position]
            gradients[position] = None
        return tuple(gradients)

    return hook


class Survey(NamedTuple):
    """The leaves and operators of the graph behind some tensors."""

    leaves: dict[int, torch.Tensor]  # by id
    uses: dict[int, int]  # number of uses of each leaf
    recomputes: bool  # by activation checkpointing, also by hand: a function keeps the state of random numbers
    recasts: bool  # one cast of a leaf to another dtype is used several times


def survey(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor] = ()) -> Survey:
    """Walks the graph behind ``outputs`` down to the leaves, or to ``inputs`` where it meets them."""
    stops = {target_of(tensor) for tensor in inputs if tensor.requires_grad}
    leaves: dict[int, torch.Tensor] = {}
    uses: Counter[int] = Counter()
    casts: Counter[Node] = Counter()
    recomputes, random_state = False, torch.get_rng_state()
    for _, _, target in _edges([tensor for tensor in outputs if tensor.requires_grad], stops):
        if target in stops:
            continue
        node = target[0]
        saved, _ = flatten(getattr(node, "__dict__", None))
        states = [value for value in saved if isinstance(value, torch.Tensor) and value.dtype is random_state.dtype]
        recomputes |= "Checkpoint" in node.name() or any(each.shape == random_state.shape for each in states)
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            leaves[id(variable)] = variable
            uses[id(variable)] += 1
        if node.name() == "ToCopyBackward0" and hasattr(node.next_functions[0][0], "variable"):
            casts[node] += 1
    return Survey(leaves, dict(uses), recomputes, max(casts.values(), default=0) > 1)
