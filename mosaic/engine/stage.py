"""``mosaic.stage``: the explicit form, for code that the finder cannot see through."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping
from functools import cache
from types import BuiltinFunctionType, TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from mosaic.backends.host import HostBackend
from mosaic.engine.branch_graph import find_leaves
from mosaic.engine.executor import Executor
from mosaic.engine.lane_tensor import LaneTensor
from mosaic.engine.site import Site
from mosaic.engine.structure import tensors_in
from mosaic.errors import InvalidPlanError
from mosaic.plan import Plan

if TYPE_CHECKING:
    from mosaic.backends.base import Lane


class Region:
    """A block in which named pieces of work run side by side; made by ``mosaic.stage``."""

    def __init__(self, pool: _Pool) -> None:
        self._pool = pool
        self._made: list[weakref.ref[LaneTensor]] = []

    def run(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs ``function(*args, **kwargs)`` on the lane of ``name`` and returns its result at once.

        The first call of its kind (name, shapes, modes) runs in place, to learn what it returns. Work under two
        names that turns out to share a parameter stays in place, so that gradients are right.

        Raises:
            InvalidPlanError: The stage was given a plan or quotas without this name.
        """
        result = self._pool.call(name, function, args, kwargs)
        self._made += [weakref.ref(tensor) for tensor in tensors_in(result) if isinstance(tensor, LaneTensor)]
        return result

    def __enter__(self) -> Self:
        """Opens the block."""
        self._pool.executor.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Joins everything that was run; an error inside a piece of work is raised here at the latest."""
        executor = self._pool.executor
        try:
            for made in self._made:
                tensor = made()
                if tensor is not None and error is None:
                    tensor.join()
            if error is None:
                executor.check_forwards()
        finally:
            executor.drain()  # what nobody used may still read parameters and modes
            executor.begin()


class _Pool:
    """Lanes and what is known of each name's calls; lives as long as the process."""

    def __init__(self, slots: Mapping[str, tuple[int, ...]] | None) -> None:
        backend = HostBackend()
        self._slots = slots
        self._spare = [(slot,) for slot in backend.device.slots]
        for name, wanted in (slots or {}).items():
            backend.device.check_quota(len(wanted), of=f"{name!r}")
        self.executor = Executor(backend.open_lanes(self._spare if slots is None else slots.values()))
        self._lanes: dict[str, Lane] = {}
        self._sites: dict[tuple[str, Hashable, int], Site] = {}
        self._leaves: dict[str, weakref.WeakValueDictionary[int, torch.Tensor]] = {}

    def call(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
        site = self._site(name, _identity(function), owner if isinstance(owner, nn.Module) else None)
        known = len(site.signatures)
        result = self.executor.call(site, function, args, kwargs)
        if len(site.signatures) > known:
            self._compare_leaves(site, result)
        return result

    def _site(self, name: str, identity: Hashable, module: nn.Module | None) -> Site:
        """Returns what is known of this function under this name; ids of modules that are gone are given out again."""
        if name not in self._lanes:
            self._lanes[name] = self.executor.lanes.lane(self._slots_of(name))
        key = (name, identity, id(module))
        site = self._sites.get(key)
        if site is None or site.module is not module:
            site = self._sites[key] = Site(name, module, self._lanes[name])
        return site

    def _slots_of(self, name: str) -> tuple[int, ...]:
        if self._slots is None:
            return self._spare[len(self._lanes) % len(self._spare)]
        if name not in self._slots:
            raise InvalidPlanError(f"{name!r} is not in the plan of this stage; it has {', '.join(self._slots)}")
        return self._slots[name]

    def _compare_leaves(self, site: Site, result: Any) -> None:
        found = {id(leaf): leaf for leaf in find_leaves(tensors_in(result))}
        self._leaves.setdefault(site.name, weakref.WeakValueDictionary()).update(found)
        for other, leaves in self._leaves.items():
            if other != site.name and any(leaves.get(key) is leaf for key, leaf in found.items()):
                site.obstacle = f"it shares a parameter with {other!r}"
                for theirs in self._sites.values():
                    if theirs.name == other:
                        theirs.obstacle = f"it shares a parameter with {site.name!r}"


def _identity(function: Callable[..., Any]) -> Hashable:
    """Returns what tells functions apart, and stays the same for a lambda that is made anew each step."""
    plain = getattr(function, "__func__", function)
    code: Hashable = getattr(plain, "__code__", None)
    if code is not None:
        return code
    return id(plain) if isinstance(plain, BuiltinFunctionType) else id(type(plain))


@cache
def _pool(slots: tuple[tuple[str, tuple[int, ...]], ...] | None) -> _Pool:
    return _Pool(dict(slots) if slots is not None else None)


def stage(plan: Plan | Mapping[str, int] | None = None) -> Region:
    """Opens a block in which named pieces of work run side by side on lanes that exist beforehand.

    .. code-block:: python

        with mosaic.stage() as s:
            image = s.run("vision", self.encode_image, images)
            text = s.run("text", self.encode_text, texts)

    Results can be used inside the block (what follows one branch runs on its lane) and are plain values for every
    purpose after it.

    Args:
        plan: A plan with these names, or a quota in slots for each name; by default every new name gets the next
            core, round and round.

    Raises:
        InvalidPlanError: The quotas do not fit on this machine.
    """
    if plan is None:
        return Region(_pool(None))
    if isinstance(plan, Plan):
        return Region(_pool(tuple((placed.module, placed.slots) for placed in plan.placements)))
    first = 0
    slots = []
    for name, quota in plan.items():
        if quota < 1:
            raise InvalidPlanError(f"{name!r} asks for a quota of {quota} slots; use 1 or more")
        slots.append((name, tuple(range(first, first + quota))))
        first += quota
    return Region(_pool(tuple(slots)))
