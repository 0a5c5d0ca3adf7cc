"""``mosaic.parallel``: the explicit form, for code that the finder cannot see through."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from types import BuiltinFunctionType, TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from mosaic.backends.host.backend import HostBackend
from mosaic.engine.calls.branch_graph import find_leaves
from mosaic.engine.calls.placed_module import PlacedModule, owner_of
from mosaic.engine.calls.structure import tensors_in
from mosaic.engine.host.executor import Executor
from mosaic.engine.host.lane_tensor import LaneTensor
from mosaic.errors import BackendUnavailableError, InvalidPlanError
from mosaic.plan import Plan

if TYPE_CHECKING:
    from mosaic.backends.base import Backend, Lane
    from mosaic.engine.streams.parallel_pool import StreamPool


class ParallelBlock:
    """A block in which named pieces of work run side by side; made by ``mosaic.parallel``."""

    def __init__(self, pool: HostPool | StreamPool) -> None:
        self._pool = pool

    def run(self, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Runs ``function(*args, **kwargs)`` on the lane of ``name`` and returns its result at once.

        On the host the first call of its kind (name, shapes, modes) runs in place, to learn what it returns. Work under
        two names that turns out to share a parameter stays in place there, so that gradients are right; on streams it
        keeps the order of its calls.

        Raises:
            InvalidPlanError: The block was given a plan or quotas without this name.
        """
        return self._pool.call(name, function, args, kwargs)

    def run_all(self, calls: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """Runs pieces of work that are all known at once.

        .. code-block:: python

            results = p.run_all({"vision": (encode_image, (images,)), "text": (encode_text, (ids,), {"mask": mask})})

        Args:
            calls: For each name a function, its arguments, and its named arguments if it has any.

        Returns:
            The result of each name.

        Raises:
            TypeError: A call is something else.
        """
        for name, call in calls.items():
            if not 2 <= len(call) <= 3 or not callable(call[0]):
                raise TypeError(f"{name!r} is not (function, arguments) or (function, arguments, named arguments)")
        return {
            name: self._pool.call(name, call[0], tuple(call[1]), dict(call[2]) if len(call) == 3 else {})
            for name, call in calls.items()
        }

    def __enter__(self) -> Self:
        """Opens the block."""
        self._pool.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Joins everything that was run; an error inside a piece of work is raised here at the latest."""
        self._pool.end(failed=error is not None)


def parallel(
    plan: Plan | Mapping[str, int] | None = None, *, backend: Backend | None = None, cuda_graphs: bool = False
) -> ParallelBlock:
    """Opens a block in which named pieces of work run side by side on lanes that exist beforehand.

    .. code-block:: python

        with mosaic.parallel() as p:
            image = p.run("vision", self.encode_image, images)
            text = p.run("text", self.encode_text, texts)

    Results can be used inside the block (what follows one branch runs on its lane) and are plain values for every
    purpose after it.

    Args:
        plan: A plan with these names, or a quota in slots for each name; by default, on the host, every new name gets
            the next core, round and round.
        backend: Whose lanes to use; the host's by default. Lanes stay open as long as the process.
        cuda_graphs: Launch each module as a CUDA graph; functions, and what cannot be captured, are launched as without
            it.

    Raises:
        InvalidPlanError: The quotas do not fit on the device, or there are none for a GPU.
        BackendUnavailableError: CUDA graphs were asked for on the host.
    """
    where = backend if backend is not None else _host()
    if cuda_graphs and where.device.kind == "host":
        raise BackendUnavailableError(
            "a block cannot be captured", found=f"the backend {where.name!r}", needed="a CUDA backend"
        )
    slots = _slots_of(plan) if plan is not None else None
    return ParallelBlock(_pool(where, slots, cuda_graphs))  # type: ignore[arg-type]  # a protocol promises no hash


def _slots_of(plan: Plan | Mapping[str, int]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Returns each name's slots: a plan's, or as many as each quota asks for, in order."""
    if isinstance(plan, Plan):
        return tuple((placed.module, placed.slots) for placed in plan.placements)
    first, slots = 0, []
    for name, quota in plan.items():
        if quota < 1:
            raise InvalidPlanError(f"{name!r} asks for a quota of {quota} slots; use 1 or more")
        slots.append((name, tuple(range(first, first + quota))))
        first += quota
    return tuple(slots)


@cache
def _host() -> HostBackend:
    return HostBackend()


@cache
def _pool(
    backend: Backend, slots: tuple[tuple[str, tuple[int, ...]], ...] | None, cuda_graphs: bool
) -> HostPool | StreamPool:
    for name, wanted in slots or ():
        backend.device.check_quota(len(wanted), of=f"{name!r}")
    if backend.device.kind == "host":
        return HostPool(backend, dict(slots) if slots is not None else None)
    from mosaic.engine.streams.parallel_pool import StreamPool

    if slots is None:
        raise InvalidPlanError(
            f"a block on {backend.device.name} needs a plan or quotas, such as parallel({{'vision': 10, 'text': 6}})"
        )
    return StreamPool(backend, dict(slots), cuda_graphs=cuda_graphs)


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
        self._results: list[weakref.ref[LaneTensor]] = []

    def begin(self) -> None:
        """Opens a block."""
        self.executor.begin()

    def call(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one piece of work on the lane of its name."""
        site = self._site(name, _identity_of(function), owner_of(function))
        num_signatures = len(site.signatures)
        result = self.executor.call(site, function, args, kwargs)
        if len(site.signatures) > num_signatures:
            self._compare_leaves(site, result)
        self._results += [weakref.ref(tensor) for tensor in tensors_in(result) if isinstance(tensor, LaneTensor)]
        return result

    def end(self, *, failed: bool) -> None:
        """Joins what the block made, unless it failed; the lanes come to rest."""
        try:
            for reference in self._results:
                tensor = reference()
                if tensor is not None and not failed:
                    tensor.join()
            if not failed:
                self.executor.check_unseen()
        finally:
            self._results.clear()
            self.executor.drain()  # what nobody used may still read parameters and modes
            self.executor.end()

    def _site(self, name: str, identity: Hashable, module: nn.Module | None) -> PlacedModule:
        """Returns the site of a function under a name; another module may have the id of one that is gone."""
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
        own = {id(leaf): leaf for leaf in find_leaves(tensors_in(result))}
        self._leaves.setdefault(site.name, weakref.WeakValueDictionary()).update(own)
        for other, leaves in self._leaves.items():
            if other != site.name and any(leaves.get(key) is leaf for key, leaf in own.items()):
                site.obstacle = f"it shares a parameter with {other!r}"
                for theirs in self._sites.values():
                    if theirs.name == other:
                        theirs.obstacle = f"it shares a parameter with {site.name!r}"


def _identity_of(function: Callable[..., Any]) -> Hashable:
    """Returns an identity that stays the same for a lambda that is made anew each step."""
    plain = getattr(function, "__func__", function)
    code: Hashable = getattr(plain, "__code__", None)
    if code is not None:
        return code
    return id(plain) if isinstance(plain, BuiltinFunctionType) else id(type(plain))
