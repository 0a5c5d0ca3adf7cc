"""``mosaic.parallel``: the explicit form, for code that the finder cannot see through."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from types import BuiltinFunctionType, TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily

from mosaic.backends.host.backend import HostBackend
from mosaic.backends.streams.lanes import StreamLane
from mosaic.engine.calls.branch_graph import find_leaves
from mosaic.engine.calls.placed_module import PlacedModule, owner_of
from mosaic.engine.calls.torch_functions import look_up
from mosaic.engine.graphs import ModuleGraphs
from mosaic.engine.host.executor import Executor
from mosaic.engine.host.lane_tensor import LaneTensor
from mosaic.engine.streams.executor import StreamExecutor
from mosaic.engine.streams.order import HeldState, LaneOrder, Orders
from mosaic.engine.streams.tensor import StreamTensor, on_user_stream
from mosaic.errors import BackendUnavailableError, InvalidPlanError
from mosaic.find.structure import memory_of, tensors_in
from mosaic.plan import Plan

if TYPE_CHECKING:
    from mosaic.backends.base import Backend


class ParallelBlock:
    """A block in which named pieces of work run side by side; made by ``mosaic.parallel``."""

    def __init__(self, pool: _HostPool | _StreamPool) -> None:
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
) -> _HostPool | _StreamPool:
    for name, wanted in slots or ():
        backend.device.check_quota(len(wanted), of=f"{name!r}")
    if backend.device.kind == "host":
        return _HostPool(backend, dict(slots) if slots is not None else None)
    if slots is None:
        raise InvalidPlanError(
            f"a block on {backend.device.name} needs a plan or quotas, such as parallel({{'vision': 10, 'text': 6}})"
        )
    return _StreamPool(backend, dict(slots), cuda_graphs=cuda_graphs)


class _Pool:
    """The lanes of a block's names; lives as long as the process."""

    def __init__(self, executor: Executor | StreamExecutor, slots: Mapping[str, tuple[int, ...]] | None) -> None:
        self.executor = executor
        self._slots = slots
        self._sites: dict[Hashable, PlacedModule] = {}

    def _site(self, name: str, module: nn.Module | None, identity: Hashable = None) -> PlacedModule:
        """Returns the site of a function under a name; another module may have the id of one that is gone."""
        key = (name, identity, id(module))
        site = self._sites.get(key)
        if site is None or site.module is not module:
            site = self._sites[key] = PlacedModule(name, module, self.executor.lanes.lane(self._slots_of(name)))
        return site

    def _slots_of(self, name: str) -> tuple[int, ...]:
        if self._slots is None or name not in self._slots:
            raise InvalidPlanError(f"{name!r} is not in the plan of this block; it has {', '.join(self._slots or ())}")
        return self._slots[name]


class _HostPool(_Pool):
    """Lanes of the host; without slots every new name gets the next core, round and round."""

    executor: Executor

    def __init__(self, backend: Backend, slots: Mapping[str, tuple[int, ...]] | None) -> None:
        self._spare = [(slot,) for slot in backend.device.slots]
        super().__init__(Executor(backend.open_lanes(self._spare if slots is None else slots.values())), slots)
        self.executor.way_out = "call {!r} without run()"
        self._by_turns: dict[str, tuple[int, ...]] | None = {} if slots is None else None
        self._leaves: dict[str, weakref.WeakValueDictionary[int, torch.Tensor]] = {}
        self._results: list[weakref.ref[LaneTensor]] = []

    def begin(self) -> None:
        self.executor.begin()

    def call(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one piece of work on the lane of its name."""
        site = self._site(name, owner_of(function), _identity_of(function))
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

    def _slots_of(self, name: str) -> tuple[int, ...]:
        if self._by_turns is None:
            return super()._slots_of(name)
        return self._by_turns.setdefault(name, self._spare[len(self._by_turns) % len(self._spare)])

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


class _StreamPool(_Pool):
    """Lanes on streams of a device; modules, where asked for, run by CUDA graphs.

    Nothing but arguments orders the lanes of a block. Two pieces with a module in common would write its running
    statistics at once, and under autocast one would read the cast that the other is making of a weight; so might the
    code between pieces. Inside of a block torch functions are seen: whoever touches what a lane was given waits for
    that lane.
    """

    executor: StreamExecutor

    def __init__(self, backend: Backend, slots: Mapping[str, tuple[int, ...]], *, cuda_graphs: bool) -> None:
        lanes = backend.open_lanes(slots.values())
        if lanes.streams is None:
            raise TypeError(f"the backend {backend.name!r} has no lanes on streams")
        super().__init__(StreamExecutor(lanes.streams), slots)
        self.graphs = ModuleGraphs(lanes.streams.api) if cuda_graphs else None
        self._shared = _SharedMemory(self.executor.orders, settle=self.executor.settle)

    def begin(self) -> None:
        self._shared.begin()

    def end(self, *, failed: bool) -> None:
        """Makes the caller's stream wait for the lanes."""
        self._shared.end()
        if failed:
            self.executor.lanes.join()
        else:
            self.executor.settle()

    def call(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a piece of work on the lane of its name; a module by a CUDA graph, if graphs are on."""
        site = self._site(name, owner_of(function))
        if site not in self.executor.held:
            self.executor.held[site] = HeldState(None)  # operations of a block are seen
        assert isinstance(site.lane, StreamLane)
        order = self.executor.orders.of(site.lane)
        if isinstance(function, nn.Module):
            self._shared.note_module(function, order)
            run = function if self.graphs is None else partial(self.graphs.call, site, function)
        else:
            run = partial(self._shared.watched, order, function)
            if self.graphs is not None:
                self.graphs.eager_calls[name, "it is a function and no module"] += 1
        with self._shared.unwatched(), self._shared.alone() if _is_compiled(function) else nullcontext():
            return self.executor.call(site, run, args, kwargs)


class _SharedMemory:
    """The memory that pieces of a block use besides their arguments, by lane.

    Of a module it is known before its call. Any other function is watched while it runs.
    """

    def __init__(self, orders: Orders, *, settle: Callable[[], None]) -> None:
        self._orders = orders
        self._settle = settle
        self._users: dict[int, set[LaneOrder]] = {}
        self._watches: list[_Watch] = []

    def begin(self) -> None:
        watch = _Watch(self._touched_between)
        watch.__enter__()
        self._watches.append(watch)

    def end(self) -> None:
        """Ends a block; the caller awaits the lanes."""
        self._watches.pop().__exit__(None, None, None)
        self._users.clear()

    def unwatched(self) -> AbstractContextManager[Any]:
        """Leaves what runs inside alone, unless a mode of the user's is above."""
        return _pop_mode_temporarily() if isinstance(_get_current_function_mode(), _Watch) else nullcontext()

    def note_module(self, module: nn.Module, order: LaneOrder) -> None:
        """Orders a lane that is going to run a module behind others that were given some of it."""
        self._touch({memory_of(tensor) for tensor in (*module.parameters(), *module.buffers())}, order)

    def watched(self, order: LaneOrder, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Calls a function and orders its lane behind others that were given what it uses."""
        own: set[int] = {0, *(memory_of(tensor) for tensor in tensors_in((args, kwargs)))}

        def touched(tensors: list[torch.Tensor]) -> Callable[[Any], None]:
            inputs = {memory_of(tensor) for tensor in tensors}
            self._touch(inputs - own, order)
            return lambda result: own.update({memory_of(tensor) for tensor in tensors_in(result)} - inputs)

        with _Watch(touched):
            return function(*args, **kwargs)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lets nothing run beside what runs inside."""
        self._settle()
        yield
        self._settle()

    def _touch(self, memory: set[int], order: LaneOrder) -> None:
        for address in memory - {0}:
            users = self._users.setdefault(address, set())
            if order not in users:
                for other in users:
                    self._orders.order(other.stream, before=order.stream)
                users.add(order)

    def _touched_between(self, tensors: list[torch.Tensor]) -> None:
        if self._users and on_user_stream() and any(memory_of(tensor) in self._users for tensor in tensors):
            self._settle()
            self._users.clear()


class _Watch(TorchFunctionMode):
    """Tells of the plain tensors that a torch function is given, and of its result to what that returned."""

    def __init__(self, touched: Callable[[list[torch.Tensor]], Callable[[Any], None] | None]) -> None:
        super().__init__()
        self._touched = touched

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or look_up(func).reads:
            return func(*args, **kwargs)
        tensors = [tensor for tensor in tensors_in((args, kwargs)) if type(tensor) is not StreamTensor]
        returned = self._touched(tensors)
        result = func(*args, **kwargs)
        if returned is not None:
            returned(result)
        return result


def _is_compiled(function: Callable[..., Any]) -> bool:
    """Returns True if torch compiled a function, or some of its module: it shows no torch functions."""
    owner = owner_of(function)
    parts = owner.modules() if owner is not None and owner is not function else ()
    return hasattr(function, "_torchdynamo_orig_callable") or any(
        part._compiled_call_impl is not None or hasattr(part, "_orig_mod") for part in parts
    )


def _identity_of(function: Callable[..., Any]) -> Hashable:
    """Returns an identity that stays the same for a lambda that is made anew each step."""
    plain = getattr(function, "__func__", function)
    code: Hashable = getattr(plain, "__code__", None)
    if code is not None:
        return code
    return id(plain) if isinstance(plain, BuiltinFunctionType) else id(type(plain))
