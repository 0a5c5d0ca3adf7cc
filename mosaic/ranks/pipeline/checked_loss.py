"""The user's loss of a microbatch, which one rank computes, and what it must leave alone since the others do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from mosaic.errors import UnsplittableError
from mosaic.find.random_numbers import torch_state
from mosaic.parts.parted_model import PartedModel

Loss = Callable[[Any, Mapping[str, Any]], Tensor]
"""From the model's output and the microbatch to one number."""


def checked_loss(loss: Loss, output: Any, kwargs: Mapping[str, Any], model: PartedModel) -> Tensor:
    """Computes a loss.

    Raises:
        UnsplittableError: It draws random numbers, or trains something that is no parameter of the model.
    """
    before, found = torch_state(model.device), loss(output, kwargs)
    if not before.is_same(torch_state(model.device)):
        raise UnsplittableError(
            "the loss draws random numbers, which ranks without the last layer do not; draw them in the model, or in "
            "the loop, and give them with the microbatch"
        )
    trained = list(_trained(found, until=output))
    known = {id(one) for one in model.model.parameters()} if trained else ()
    other = next((one for one in trained if id(one) not in known), None)
    if other is not None:
        raise UnsplittableError(
            f"the loss trains a tensor of shape {tuple(other.shape)} that is no parameter of the model; ranks without "
            "the last layer would not see its gradient: make the model compute with it"
        )
    return found


def _trained(loss: Tensor, *, until: Any) -> Iterator[Tensor]:
    """Gives the leaves that get a gradient of a loss otherwise than through the model's output."""
    seen = {one.grad_fn for one in pytree.tree_leaves(until) if isinstance(one, Tensor)}
    left = [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        left += [before for before, _ in node.next_functions]
