"""A microbatch through all chunks of a model, one after the other in one process, and back through their boundaries."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mosaic.graph import Part
from mosaic.parts.parted_model import PartedModel
from mosaic.parts.pieces import count_units, join_pieces, take_units
from mosaic.parts.split import ModelSplit

Tensors = tuple[torch.Tensor, ...]


class ChunkChain:
    """Each chunk on a rank of its own: copies of the model that hold the weights of one chunk."""

    def __init__(self, model: nn.Module, split: ModelSplit, chunks: Sequence[tuple[Part, ...]]) -> None:
        self.split = split
        self.chunks = chunks
        self.ranks = [PartedModel(copy.deepcopy(model), split, chunks, own=[i]) for i in range(len(chunks))]

    def step(
        self,
        kwargs: Mapping[str, Any],
        loss: Callable[[Any], torch.Tensor],
        *,
        strategy: str = "keep",
        sizes: Mapping[str, int] | None = None,
    ) -> torch.Tensor:
        """Runs forwards and backwards of one microbatch; gradients add up in the ranks' parameters."""
        tape: list[tuple[Tensors, Tensors]] = []  # what a chunk sent, and the same as its receivers have it
        made: dict[str, list[Tensors]] = {}
        result = None
        for index, chunk in enumerate(self.chunks):
            if not {part.module for part in chunk} & self.split.present(kwargs):
                continue
            batches = self._pieces(kwargs, chunk, sizes or {})
            arrived = {name: made[name] for name in self.split.entries(chunk) if name in made}
            outputs: dict[str, list[Tensors]] = {}
            for number, batch in enumerate(batches):
                received = {}
                for name, pieces in arrived.items():
                    mine = [pieces[number]] if len(batches) > 1 else pieces
                    leaves = [tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in p) for p in mine]
                    tape += zip(mine, leaves, strict=True)
                    received[name] = join_pieces(leaves)
                layers = sum(part.count for part in chunk)
                out = self.ranks[index].forward(index, batch, received, [strategy] * layers)
                if not self.split.leaves(chunk):
                    result = loss(out)
                    continue
                like = self.ranks[-1 - index].boundary_like(index, batch)  # another rank knows the shapes too
                assert {name: [(t.shape, t.dtype) for t in found] for name, found in like.items()} == {
                    name: [(t.shape, t.dtype) for t in found] for name, found in out.items()
                }
                for name, tensors in out.items():
                    outputs.setdefault(name, []).append(tensors)
            made |= outputs
        assert result is not None
        result.backward()
        for sent, leaves in reversed(tape):
            pairs = [(t, leaf.grad) for t, leaf in zip(sent, leaves, strict=True) if leaf.grad is not None]
            if pairs:
                torch.autograd.backward([t for t, _ in pairs], [grad for _, grad in pairs], retain_graph=True)
        return result.detach()

    def _pieces(
        self, kwargs: Mapping[str, Any], chunk: tuple[Part, ...], sizes: Mapping[str, int]
    ) -> list[Mapping[str, Any]]:
        module = chunk[0].module
        if module not in sizes:
            return [kwargs]
        units = count_units(self.split, kwargs, module)
        return [
            take_units(self.split, kwargs, module, range(first, min(first + sizes[module], units)))
            for first in range(0, units, sizes[module])
        ]

    def gradients(self) -> dict[str, torch.Tensor]:
        """Returns gradients by parameter, summed over ranks."""
        found: dict[str, torch.Tensor] = {}
        for rank in self.ranks:
            for name, parameter in rank.model.named_parameters():
                if parameter.grad is not None:
                    found[name] = found[name] + parameter.grad if name in found else parameter.grad
        return found


def chunks_of(*texts: str) -> list[tuple[Part, ...]]:
    """Reads chunks such as ``vision[1:2/2]+text[0:1/3]``."""
    return [tuple(Part.parse(part) for part in text.split("+")) for text in texts]
