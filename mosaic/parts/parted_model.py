"""A rank's part of a model: the weights of its chunks, and their forwards."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from mosaic.graph import Part
from mosaic.parts.blank import BlankResults
from mosaic.parts.doors import replaced_forwards
from mosaic.parts.pass_through import ChunkEnded, Door, PassThrough
from mosaic.parts.split import ModelSplit, Value
from mosaic.parts.weights import StandIns, drop_weights

Sent = dict[str, tuple[torch.Tensor, ...]]
"""Tensors that leave a chunk, or come in, by the module whose part sends them."""


class PartedModel:
    """Runs chunks of a model, and keeps no memory for the rest.

    The model stays what it is: between calls it has its own ``forward`` and its own parameter objects, those of other
    ranks on the meta device.

    Args:
        model: The user's model, on its device.
        split: Where it can be cut.
        chunks: All chunks of the partition.
        own: Indices of the chunks that run on this rank; None: all.
    """

    def __init__(
        self,
        model: nn.Module,
        split: ModelSplit,
        chunks: Sequence[tuple[Part, ...]],
        own: Collection[int] | None = None,
    ) -> None:
        self.model = model
        self.split = split
        self.chunks = tuple(map(tuple, chunks))
        self.own = frozenset(range(len(self.chunks)) if own is None else own)
        self._check_chunks()
        self.device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
        self._doors = self._make_doors()
        running = frozenset().union(*(split.sites_of(self.chunks[index]) for index in self.own))
        keep = frozenset().union(*(split.parameters_of(self.chunks[index]) for index in self.own))
        foreign = [door.module for door in self._doors if not running & set(door.sites)]
        drop_weights(model, keep=keep, whole=foreign)
        first = {site.path for _, site in split.layer_sites() if site.layer == 0}
        layers = {site.path for _, site in split.layer_sites()} - first
        inside = [door.module for door in self._doors if door.path in layers]
        self._stand_ins = StandIns(model, inside=inside, device=self.device)
        self._blank = BlankResults(self.device)
        self._likes: dict[Any, Sent] = {}

    def forward(
        self, chunk: int, kwargs: Mapping[str, Any], received: Sent | None = None, strategies: Sequence[str] = ()
    ) -> Any:
        """Runs a chunk with a microbatch, or with some units of it.

        Args:
            chunk: Index of a chunk of this rank.
            kwargs: Keyword arguments of the model.
            received: What the chunks before have sent, by module; several pieces joined by ``join_pieces``.
            strategies: For each of the chunk's layers, in order, what becomes of its activations; empty: all are kept.

        Returns:
            By module what leaves the chunk, or the model's output where the model ends in it.

        Raises:
            ValueError: Something that the chunk needs was not received, or there are more or fewer strategies.
        """
        if chunk not in self.own:
            raise ValueError(
                f"chunk {chunk} does not run on this rank, which has {sorted(self.own)}; its weights are not here"
            )
        parts = self.chunks[chunk]
        own = self.split.sites_of(parts)
        through = self._through(
            chunk, kwargs, own=own, received=self._given(chunk, kwargs, received or {}), strategies=strategies
        )
        output = self._call(through, kwargs)
        if through.last is None:
            return self._without_foreign_leaves(output)
        return self._sent(chunk, kwargs, through)

    def boundary_like(self, chunk: int, kwargs: Mapping[str, Any]) -> Sent:
        """Returns what ``forward`` of any chunk hands over, as tensors without data; of any rank's chunk.

        What is known of shapes is kept, by the shapes of ``kwargs``.
        """
        key = (chunk, *((name, _shape(value)) for name, value in sorted(kwargs.items())))
        if key not in self._likes:
            through = self._through(chunk, kwargs, own=(), received={}, strategies=())
            if through.last is None:
                return {}
            with torch.no_grad():
                self._call(through, kwargs)
            through.values |= {value: made for value, made in through.values.items()}
            self._likes[key] = {
                name: tuple(torch.empty_like(tensor, device="meta") for tensor in tensors)
                for name, tensors in self._sent(chunk, kwargs, through).items()
            }
        return self._likes[key]

    def own_parameters(self, chunk: int) -> dict[str, nn.Parameter]:
        """Returns the parameters that a chunk of this rank needs, by their first names in the model."""
        names = self.split.parameters_of(self.chunks[chunk])
        return {name: parameter for name, parameter in self.model.named_parameters() if name in names}

    def state_dict(self) -> dict[str, Any]:
        """Returns what this rank has of the plain model's ``state_dict``."""
        return {
            name: value
            for name, value in self.model.state_dict().items()
            if not (isinstance(value, torch.Tensor) and value.is_meta)
        }

    def _check_chunks(self) -> None:
        for chunk in self.chunks:
            for part in chunk:
                module = self.split.by_name.get(part.module)
                if module is None or module.count != part.total:
                    known = ", ".join(f"{module.name} of {module.count} layers" for module in self.split.modules)
                    raise ValueError(
                        f"part {part} is none of this model's, which has {known}; make the partition for it"
                    )

    def _make_doors(self) -> list[Door]:
        sites: dict[str, list[int]] = {}
        for index, site in enumerate(self.split.sites):
            if site.path:
                sites.setdefault(site.path, []).append(index)
        return [Door(path, self.model.get_submodule(path), tuple(found)) for path, found in sites.items()]

    def _through(
        self,
        chunk: int,
        kwargs: Mapping[str, Any],
        *,
        own: Collection[int],
        received: Mapping[Value, torch.Tensor],
        strategies: Sequence[str],
    ) -> PassThrough:
        present = self.split.present(kwargs)
        indices = self.split.sites_of(self.chunks[chunk])
        last = max(index for index in indices if self.split.sites[index].module in present)
        layers = [index for index in sorted(indices) if self.split.sites[index].is_layer]
        if strategies and len(strategies) != len(layers):
            raise ValueError(f"{len(strategies)} strategies for {len(layers)} layers; give one for each, or none")
        return PassThrough(
            split=self.split,
            blank=self._blank,
            own=own,
            last=None if not self.split.sites[last].path else last,
            received=received,
            sends={value for found in self.split.leaves(self.chunks[chunk]).values() for value in found},
            strategies=dict(zip(layers, strategies, strict=bool(strategies))),
            devices=(self.device,),
        )

    def _call(self, through: PassThrough, kwargs: Mapping[str, Any]) -> Any:
        through.pause_random_numbers()
        for door in self._doors:
            door.through = through
        try:
            with self._stand_ins.placed(), replaced_forwards({door.module: door for door in self._doors}):
                return self.model(**kwargs)
        except ChunkEnded as end:
            end.__traceback__ = None
            return None
        finally:
            through.resume_random_numbers()
            for door in self._doors:
                door.through = None

    def _given(self, chunk: int, kwargs: Mapping[str, Any], received: Sent) -> dict[Value, torch.Tensor]:
        present = self.split.present(kwargs)
        found: dict[Value, torch.Tensor] = {}
        for module, values in self.split.entries(self.chunks[chunk]).items():
            needed = [value for value in values if self.split.sites[value.site].module in present]
            tensors = received.get(module, ())
            if len(tensors) != len(needed) and module in present:
                raise ValueError(
                    f"chunk {chunk} received {len(tensors)} tensors of {module!r} and needs {len(needed)}; hand over what "
                    "forward of the chunk before returned"
                )
            found |= dict(zip(needed, tensors, strict=False))
        return found

    def _sent(self, chunk: int, kwargs: Mapping[str, Any], through: PassThrough) -> Sent:
        present = self.split.present(kwargs)
        return {
            module: tuple(
                through.received.get(value, through.values.get(value))
                for value in values
                if self.split.sites[value.site].module in present
            )
            for module, values in self.split.leaves(self.chunks[chunk]).items()
            if module in present
        }

    def _without_foreign_leaves(self, output: Any) -> Any:
        leaves, tree = pytree.tree_flatten_with_path(output)
        kept = [
            leaf if not isinstance(leaf, torch.Tensor) or pytree.keystr(path) in self.split.output_leaves else None
            for path, leaf in leaves
        ]
        return output if isinstance(output, torch.Tensor) else pytree.tree_unflatten(kept, tree)


def _shape(value: Any) -> Any:
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else repr(value)
