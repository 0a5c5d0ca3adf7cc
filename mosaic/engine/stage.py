"""``mosaic.stage``: the explicit form, for code that the finder cannot see through."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from types import BuiltinFunctionType, TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias

import torch
from torch import nn

from mosaic.backends.host.backend import HostBackend
from mosaic.engine.calls.branch_graph import find_leaves
from mosaic.engine.calls.placed_module import Site
from mosaic.engine.calls.structure import tensors_in
from mosaic.engine.host.executor import Executor
from mosaic.engine.host.lane_tensor import LaneTensor
from mosaic.errors import BackendUnavailableError, InvalidPlanError
from mosaic.plan import Plan

if TYPE_CHECKING:
    from mosaic.backends.base import Backend, Lane
    from mosaic.engine.streams.parallel_pool import StreamPool
    from mosaic.engine.streams.parallel_sharing import SharedPieces

Piece: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A function with its arguments and named arguments."""


class Pool(Protocol):
    """Lanes that are open for a stage's names, and what is known of their calls."""

    def call(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one piece of work on the lane of its name."""

    def call_all(self, calls: Mapping[str, Piece]) -> dict[str, Any]:
        """Runs pieces of work side by side."""

    def begin(self) -> None:
        """Opens a block."""

    def end(self, *, failed: bool) -> None:
        """Closes a block, in which an error may have been raised; joins everything."""


class Region:
    """A block in which named pieces of work run side by side; made by ``mosaic.stage``."""

    def __init__(self, pool: Pool, *, graphs: bool, pieces: SharedPieces | None) -> None:
        self._pool = pool
        self._graphs = graphs
        self._pieces = pieces

    def run(self, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Runs ``function(*args, **kwargs)`` on the lane of ``name`` and returns its result at once.

        On the host the first call of its kind (name, shapes, modes) runs in place, to learn what it returns. Work under
        two names that turns out to share a parameter stays in place there, so that gradients are right; on streams it
        keeps the order of its calls.

        Raises:
            InvalidPlanError: The stage was given a plan or quotas without this name.
        """
        if self._pieces is None:
            return self._pool.call(name, function, args, kwargs)
        piece = self._pieces.begin(name, function, owner_of(function), _identity(function), (args, kwargs))
        result = self._pool.call(name, function, args, kwargs)
        self._pieces.note(piece, result, hooked=not self._graphs)
        return result

    def run_all(self, calls: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """Runs pieces of work that are all known at once; with ``graphs=True`` as one CUDA graph.

        .. code-block:: python

            found = s.run_all({"vision": (encode_image, (images,)), "text": (encode_text, (ids,), {"mask": mask})})

        Args:
            calls: For each name a function, its arguments, and its named arguments if it has any.

        Returns:
            The result of each name.
        """
        pieces = {name: _piece(name, call) for name, call in calls.items()}
        if self._graphs or self._pieces is None:
            return self._pool.call_all(pieces)
        return {name: self.run(name, function, *args, **kwargs) for name, (function, args, kwargs) in pieces.items()}

    def __enter__(self) -> Self:
        """Opens the block."""
        self._pool.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Joins everything that was run; an error inside a piece of work is raised here at the latest."""
        if self._pieces is not None:
            self._pieces.end()
        self._pool.end(failed=error is not None)


class _HostPool:
    """Lanes of the host and what is known of each name's calls; lives as long as the process."""

    def __init__(self, backend: Backend, slots: Mapping[str, tuple[int, ...]] | None) -> None:
        self._slots = slots
        self._spare = [(slot,) for slot in backend.device.slots]
        self.executor = Executor(backend.open_lanes(self._spare if slots is None else slots.values()))
        self._lanes: dict[str, Lane] = {}
        self._sites: dict[tuple[str, Hashable, int], Site] = {}
        self._leaves: dict[str, weakref.WeakValueDictionary[int, torch.Tensor]] = {}
        self._made: list[weakref.ref[LaneTensor]] = []

    def begin(self) -> None:
        self.executor.begin()

    def end(self, *, failed: bool) -> None:
        try:
            for made in self._made:
                tensor = made()
                if tensor is not None and not failed:
                    tensor.join()
            if not failed:
                self.executor.check_forwards()
        finally:
            self._made.clear()
            self.executor.drain()  # what nobody used may still read parameters and modes
            self.executor.begin()

    def call_all(self, calls: Mapping[str, Piece]) -> dict[str, Any]:
        return {name: self.call(name, *piece) for name, piece in calls.items()}

    def call(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        site = self._site(name, _identity(function), owner_of(function))
        known = len(site.signatures)
        result = self.executor.call(site, function, args, kwargs)
        if len(site.signatures) > known:
            self._compare_leaves(site, result)
        self._made += [weakref.ref(tensor) for tensor in tensors_in(result) if isinstance(tensor, LaneTensor)]
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


def owner_of(function: Callable[..., Any]) -> nn.Module | None:
    """Returns the module whose call or method a function is."""
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


def _identity(function: Callable[..., Any]) -> Hashable:
    """Returns what tells functions apart, and stays the same for a lambda that is made anew each step."""
    plain = getattr(function, "__func__", function)
    code: Hashable = getattr(plain, "__code__", None)
    if code is not None:
        return code
    return id(plain) if isinstance(plain, BuiltinFunctionType) else id(type(plain))


def _piece(name: str, call: Sequence[Any]) -> Piece:
    if not 2 <= len(call) <= 3 or not callable(call[0]):
        raise TypeError(f"{name!r} is not (function, arguments) or (function, arguments, named arguments)")
    return call[0], tuple(call[1]), dict(call[2]) if len(call) == 3 else {}


@cache
def _host() -> HostBackend:
    return HostBackend()


@cache
def _pool(
    backend: Backend, slots: tuple[tuple[str, tuple[int, ...]], ...] | None, graphs: bool
) -> _HostPool | StreamPool:
    if slots is not None:
        for name, wanted in slots:
            backend.device.check_quota(len(wanted), of=f"{name!r}")
    if backend.device.kind == "host":
        return _HostPool(backend, dict(slots) if slots is not None else None)
    from mosaic.engine.streams.parallel_pool import StreamPool

    if slots is None:
        raise InvalidPlanError(
            f"a stage on {backend.device.name} needs a plan or quotas, such as stage({{'vision': 10, 'text': 6}})"
        )
    return StreamPool(backend, dict(slots), graphs=graphs)


def _region(backend: Backend, slots: tuple[tuple[str, tuple[int, ...]], ...] | None, graphs: bool) -> Region:
    pool = _pool(backend, slots, graphs)  # type: ignore[arg-type]  # a protocol does not promise a hash
    pieces = None if isinstance(pool, _HostPool) else pool.executor.pieces
    return Region(pool, graphs=graphs, pieces=pieces)


def stage(
    plan: Plan | Mapping[str, int] | None = None, *, backend: Backend | None = None, graphs: bool = False
) -> Region:
    """Opens a block in which named pieces of work run side by side on lanes that exist beforehand.

    .. code-block:: python

        with mosaic.stage() as s:
            image = s.run("vision", self.encode_image, images)
            text = s.run("text", self.encode_text, texts)

    Results can be used inside the block (what follows one branch runs on its lane) and are plain values for every
    purpose after it.

    Args:
        plan: A plan with these names, or a quota in slots for each name; by default, on the host, every new name gets
            the next core, round and round.
        backend: Whose lanes to use; the host's by default. Lanes stay open as long as the process.
        graphs: Capture each call as a CUDA graph, and ``run_all`` as one; what cannot be captured is launched as
            without it.

    Raises:
        InvalidPlanError: The quotas do not fit on the device, or there are none for a GPU.
        BackendUnavailableError: Graphs were asked for on the host.
    """
    where = backend if backend is not None else _host()
    if graphs and where.device.kind == "host":
        raise BackendUnavailableError(
            "a stage cannot be captured", found=f"the backend {where.name!r}", needed="a CUDA backend"
        )
    if plan is None:
        return _region(where, None, graphs)
    if isinstance(plan, Plan):
        return _region(where, tuple((placed.module, placed.slots) for placed in plan.placements), graphs)
    first = 0
    slots = []
    for name, quota in plan.items():
        if quota < 1:
            raise InvalidPlanError(f"{name!r} asks for a quota of {quota} slots; use 1 or more")
        slots.append((name, tuple(range(first, first + quota))))
        first += quota
    return _region(where, tuple(slots), graphs)
