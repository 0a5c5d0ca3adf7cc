"""``mosaic.parallel`` on the host: each name has a lane."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mosaic.engine.calls.branch_graph import find_leaves
from mosaic.engine.calls.pieces import Piece, identity_of, owner_of
from mosaic.engine.calls.placed_module import PlacedModule
from mosaic.engine.calls.structure import tensors_in
from mosaic.engine.host.executor import Executor
from mosaic.engine.host.lane_tensor import LaneTensor
from mosaic.errors import InvalidPlanError

if TYPE_CHECKING:
    from mosaic.backends.base import Backend, Lane


class HostPool:
    """Lanes of the host and what is known of each name's calls; lives as long as the process."""

    def __init__(self, backend: Backend, slots: Mapping[str, tuple[int, ...]] | None) -> None:
        self._slots = slots
        self._spare = [(slot,) for slot in backend.device.slots]
        self.executor = Executor(backend.open_lanes(self._spare if slots is None else slots.values()))
        self.executor.way_out = "call {!r} without run()"
        self._lanes: dict[str, Lane] = {}
        self._sites: dict[tuple[str, Hashable, int], PlacedModule] = {}
        self._leaves: dict[str, weakref.WeakValueDictionary[int, torch.Tensor]] = {}
        self._made: list[weakref.ref[LaneTensor]] = []

    def begin(self) -> None:
        """Opens a block."""
        self.executor.begin()

    def call(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one piece of work on the lane of its name."""
        site = self._site(name, identity_of(function), owner_of(function))
        known = len(site.signatures)
        result = self.executor.call(site, function, args, kwargs)
        if len(site.signatures) > known:
            self._compare_leaves(site, result)
        self._made += [weakref.ref(tensor) for tensor in tensors_in(result) if isinstance(tensor, LaneTensor)]
        return result

    def call_all(self, calls: Mapping[str, Piece]) -> dict[str, Any]:
        """Runs pieces of work side by side."""
        return {name: self.call(name, *piece) for name, piece in calls.items()}

    def end(self, *, failed: bool) -> None:
        """Joins what the block made, unless it failed; the lanes come to rest."""
        try:
            for made in self._made:
                tensor = made()
                if tensor is not None and not failed:
                    tensor.join()
            if not failed:
                self.executor.check_unseen()
        finally:
            self._made.clear()
            self.executor.drain()  # what nobody used may still read parameters and modes
            self.executor.end()

    def _site(self, name: str, identity: Hashable, module: nn.Module | None) -> PlacedModule:
        """Returns what is known of this function under this name; ids of modules that are gone are given out again."""
        if name not in self._lanes:
            self._lanes[name] = self.executor.lanes.lane(self._slots_of(name))
        key = (name, identity, id(module))
        site = self._sites.get(key)
        if site is None or site.module is not module:
            site = self._sites[key] = PlacedModule(name, module, self._lanes[name])
        return site

    def _slots_of(self, name: str) -> tuple[int, ...]:
        if self._slots is None:
            return self._spare[len(self._lanes) % len(self._spare)]
        if name not in self._slots:
            raise InvalidPlanError(f"{name!r} is not in the plan of this block; it has {', '.join(self._slots)}")
        return self._slots[name]

    def _compare_leaves(self, site: PlacedModule, result: Any) -> None:
        """Keeps names that share a parameter off their lanes, so that gradients are right."""
        found = {id(leaf): leaf for leaf in find_leaves(tensors_in(result))}
        self._leaves.setdefault(site.name, weakref.WeakValueDictionary()).update(found)
        for other, leaves in self._leaves.items():
            if other != site.name and any(leaves.get(key) is leaf for key, leaf in found.items()):
                site.obstacle = f"it shares a parameter with {other!r}"
                for theirs in self._sites.values():
                    if theirs.name == other:
                        theirs.obstacle = f"it shares a parameter with {site.name!r}"
