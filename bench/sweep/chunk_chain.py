"""A microbatch through all chunks of a model, one after the other in one process, and back through their boundaries."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mosaic.graph import Part
from mosaic.parts.parted_model import PartedModel
from mosaic.parts.random_state import random_state, set_random_state
from mosaic.parts.split import ModelSplit

Tensors = tuple[Tensor, ...]


class ChunkChain:
    """Each chunk on a rank of its own: copies of the model that hold the weights of one chunk.

    Args:
        model: The plain one.
        split: Where it can be cut.
        chunks: Of a partition, in order.
    """

    def __init__(self, model: nn.Module, split: ModelSplit, chunks: Sequence[tuple[Part, ...]]) -> None:
        self._split = split
        self._chunks = chunks
        self._ranks = [PartedModel(copy.deepcopy(model), split, chunks, own=[i]) for i in range(len(chunks))]

    def step(self, kwargs: Mapping[str, Any], loss: Callable[[Any], Tensor]) -> Tensor:
        """Runs forwards and backwards as the pipeline does; gradients add up in the ranks' parameters.

        Raises:
            AssertionError: A rank expects other shapes than another sends.
        """
        tape: list[tuple[Tensors, Tensors]] = []  # what a chunk sent, and the same as its receiver has it
        made: dict[str, Tensors] = {}
        state = random_state(torch.device("cpu"))
        found: Any = None
        for index, rank in enumerate(self._ranks):
            received = {name: tuple(map(_leaf, made[name])) for name in self._split.entries(self._chunks[index])}
            tape += [(made[name], leaves) for name, leaves in received.items()]
            _draw_elsewhere(index)
            set_random_state(state)
            found = rank.forward(index, kwargs, received, draws="all")
            if self._split.leaves(self._chunks[index]):
                self._check_shapes(index, kwargs, found)
                made |= found
        result = loss(found)
        result.backward()
        for sent, leaves in reversed(tape):
            pairs = [(one, leaf.grad) for one, leaf in zip(sent, leaves, strict=True) if one.requires_grad]
            due = [(one, grad) for one, grad in pairs if grad is not None]
            if due:
                torch.autograd.backward([one for one, _ in due], [grad for _, grad in due], retain_graph=True)
        return result.detach()

    def gradients(self) -> dict[str, Tensor]:
        """Returns gradients by parameter, summed over ranks."""
        found: dict[str, Tensor] = {}
        for index, rank in enumerate(self._ranks):
            for name, parameter in rank.own_parameters(index).items():
                if parameter.grad is not None:
                    found[name] = found[name] + parameter.grad if name in found else parameter.grad
        return found

    def _check_shapes(self, index: int, kwargs: Mapping[str, Any], found: dict[str, Tensors]) -> None:
        foreseen = self._ranks[(index + 1) % len(self._ranks)].boundary_like(index, kwargs)
        told, sent = ({name: [(one.shape, one.dtype) for one in of] for name, of in x.items()} for x in (foreseen, found))
        assert told == sent, f"chunk {index} sends {sent}, and the next rank expects {told}"


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _draw_elsewhere(index: int) -> None:
    """Leaves all generators as no other rank has them."""
    torch.manual_seed(100 + index)
    random.seed(100 + index)
    np.random.seed(100 + index)
