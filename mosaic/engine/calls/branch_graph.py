"""The uses that a module's autograd graph makes of its inputs, so that gradients are summed in the plain loop's order.

A tensor that feeds several operators gets one gradient contribution from each, and floating-point sums depend on
their order. The autograd engine adds contributions in reverse order of the operators' creation. A module on a
lane has a graph of its own, cut at its inputs; if each input's contributions were summed inside first, the
order would differ from the plain loop's. So every use of an input counts as an edge of its own: contributions
are kept apart inside and summed outside, in the plain order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import Node, get_gradient_edge

Target: TypeAlias = tuple[Node, int]


@dataclass(frozen=True, slots=True)
class Use:
    """One edge from an operator inside the module to one of its inputs."""

    node: Node
    """The operator's backward node."""
    position: int
    """Index among the node's gradients."""
    input: int
    """Index among the module's differentiable inputs."""


def find_uses(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[Use]:
    """Returns the uses of ``inputs`` in the graph behind ``outputs``, in the order in which backward meets them.

    The search stops at the inputs, so it sees the module's own graph only.
    """
    targets = {target_of(tensor): index for index, tensor in enumerate(inputs)}
    uses: list[Use] = []
    seen: set[Node] = set()
    todo = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None and target_of(tensor) not in targets]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        for position, (following, number) in enumerate(node.next_functions):
            if following is None:
                continue
            index = targets.get((following, number))
            if index is not None:
                uses.append(Use(node, position, index))
            else:
                todo.append(following)
    uses.sort(key=lambda use: (-_sequence(use.node), use.position))
    return uses


def target_of(tensor: torch.Tensor) -> Target:
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def capture(uses: Sequence[Use], into: list[torch.Tensor | None]) -> list[Any]:
    """Makes backward put each use's gradient into ``into`` instead of summing it; returns the hooks' handles."""
    by_node: dict[Node, list[tuple[int, int]]] = {}
    for edge, use in enumerate(uses):
        by_node.setdefault(use.node, []).append((edge, use.position))
    return [node.register_hook(_capturing(edges, into)) for node, edges in by_node.items()]


def _capturing(edges: list[tuple[int, int]], into: list[torch.Tensor | None]) -> Any:
    def hook(grad_inputs: Sequence[torch.Tensor | None], _: Any) -> tuple[torch.Tensor | None, ...]:
        gradients = list(grad_inputs)
        for edge, position in edges:
            into[edge] = gradients[position]
            gradients[position] = None
        return tuple(gradients)

    return hook


def _sequence(node: Node) -> int:
    number: int = node._sequence_nr()  # type: ignore[attr-defined]
    return number


@dataclass(frozen=True, slots=True)
class Survey:
    """The leaves and operators of the graph behind some tensors."""

    leaves: dict[int, torch.Tensor]
    """Leaves that gradients reach, by id."""
    uses: dict[int, int]
    """Number of uses of each."""
    names: frozenset[str]
    """Names of the operators' backward nodes."""
    recasts: bool
    """True if one cast of a leaf to another dtype is used several times."""


def survey(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor] = ()) -> Survey:
    """Walks the graph behind ``outputs`` down to the leaves, or to ``inputs`` where it meets them."""
    stops = {target_of(tensor) for tensor in inputs if tensor.requires_grad}
    leaves: dict[int, torch.Tensor] = {}
    uses: Counter[int] = Counter()
    casts: Counter[Node] = Counter()
    seen: set[Node] = set()
    todo: list[Target] = [target_of(tensor) for tensor in outputs if tensor.requires_grad]
    while todo:
        node, number = todo.pop()
        if (node, number) in stops:
            continue
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            leaves[id(variable)] = variable
            uses[id(variable)] += 1
        if node.name() == "ToCopyBackward0" and hasattr(node.next_functions[0][0], "variable"):
            casts[node] += 1
        if node not in seen:
            seen.add(node)
            todo.extend((following, at) for following, at in node.next_functions if following is not None)
    return Survey(leaves, dict(uses), frozenset(node.name() for node in seen), max(casts.values(), default=0) > 1)


def find_leaves(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list(survey(outputs).leaves.values())
