"""``mosaic.parallel``: the explicit form, for code that the finder cannot see through."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import accumulate, cycle
from types import BuiltinFunctionType
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily
from torch.utils.weak import WeakIdKeyDictionary

from mosaic.backends.base import Backend, Lane
from mosaic.backends.table import open_backend
from mosaic.engine.calls.branch_graph import survey
from mosaic.engine.calls.hidden import HOOKED, HeldTensors, parts_of
from mosaic.engine.calls.placed_module import PlacedModule, owner_of
from mosaic.engine.calls.thread_state import on_user_stream
from mosaic.engine.calls.torch_functions import look_up
from mosaic.engine.host.executor import HostExecutor
from mosaic.engine.host.lane_tensor import LaneTensor
from mosaic.engine.streams.executor import StreamExecutor
from mosaic.engine.streams.order import HeldState
from mosaic.engine.streams.tensor import StreamTensor
from mosaic.errors import InvalidPlanError
from mosaic.find.structure import memory_of, tensors_in
from mosaic.plan import Plan

_IS_FUNCTION = "it is a function, whose memory is unknown before it runs; pass a module or a method of one"


class ParallelBlock(ABC):
    """Named pieces of work that run side by side, on lanes of the whole process; made by ``mosaic.parallel``."""

    def __init__(self, executor: HostExecutor | StreamExecutor, slots: dict[str, tuple[int, ...]]) -> None:
        self.executor = executor
        self._slots = slots
        self._sites: dict[Hashable, PlacedModule] = {}

    @abstractmethod
    def run(self, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Runs ``function(*args, **kwargs)`` on the lane of ``name`` and returns its result at once.

        On the host the first call of its kind (name, shapes, modes) runs in place, and so does work under two names
        that shares a parameter. On a GPU modules and their methods run on lanes, other functions in place.

        Raises:
            InvalidPlanError: The block was given a plan or quotas without this name.
        """

    @abstractmethod
    def __enter__(self) -> Self:
        """Opens the block."""

    @abstractmethod
    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Joins everything that was run; an error inside a piece of work is raised here at the latest."""

    def _site(self, name: str, function: Callable[..., Any]) -> PlacedModule:
        module = owner_of(function)
        key = (name, _identity_of(function), id(module))
        site = self._sites.get(key)
        if site is None or site.module is not module:  # another module may have the id of one that is gone
            if name not in self._slots:
                raise InvalidPlanError(f"{name!r} is not in the plan of this block; it has {', '.join(self._slots)}")
            site = self._sites[key] = PlacedModule(name, module, self.executor.lanes.lane(self._slots[name]))
        return site


def parallel(plan: Plan | Mapping[str, int] | None = None, *, backend: Backend | str | None = None) -> ParallelBlock:
    """Opens a block in which named pieces of work run side by side on lanes that exist beforehand.

    ```python
    with mosaic.parallel() as p:
        image = p.run("vision", self.encode_image, images)
        text = p.run("text", self.encode_text, texts)
    ```

    Results can be used inside the block (what follows one branch runs on its lane) and are plain values for every
    purpose after it.

    Args:
        plan: A plan with these names, or a quota in slots for each name; by default, on the host, every new name gets
            the next core, round and round.
        backend: Whose lanes to use, also by name; the host's by default. Lanes stay open as long as the process.

    Raises:
        InvalidPlanError: The quotas do not fit on the device, or there are none for a GPU.
    """
    where = _named("host" if backend is None else backend)  # type: ignore[arg-type]  # a protocol promises no hash
    slots = _slots_of(plan) if plan is not None else None
    return _block(where, slots)  # type: ignore[arg-type]  # a protocol promises no hash


def _slots_of(plan: Plan | Mapping[str, int]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    if isinstance(plan, Plan):
        return tuple((placed.module, placed.slots) for placed in plan.placements)
    if not isinstance(plan, Mapping):
        raise TypeError(f"plan={plan!r} is a {type(plan).__name__}; pass a plan, or slots such as {{'text': 2}}")
    for name in (name for name, quota in plan.items() if not isinstance(quota, int) or quota < 1):
        raise InvalidPlanError(f"{name!r} asks for a quota of {plan[name]!r} slots; use 1 or more")
    ends = zip(plan.items(), accumulate(plan.values()), strict=True)
    return tuple((name, tuple(range(end - quota, end))) for (name, quota), end in ends)


@cache
def _named(name: Backend | str) -> Backend:
    return open_backend(name)


@cache
def _block(backend: Backend, slots: tuple[tuple[str, tuple[int, ...]], ...] | None) -> ParallelBlock:
    for name, wanted in slots or ():
        backend.device.check_quota(len(wanted), of=f"{name!r}")
    if backend.device.kind == "host":
        return _HostBlock(backend, slots)
    if slots is None:
        raise InvalidPlanError(
            f"a block on {backend.device.name} needs a plan or quotas, such as parallel({{'vision': 9, 'text': 6}})"
        )
    return _StreamBlock(backend, dict(slots))


class _HostBlock(ParallelBlock):
    """Lanes of the host; without slots every new name gets the next core, round and round."""

    executor: HostExecutor

    def __init__(self, backend: Backend, slots: tuple[tuple[str, tuple[int, ...]], ...] | None) -> None:
        cores = [(slot,) for slot in backend.device.slots]
        self._turns = cycle(cores) if slots is None else None
        named = dict(slots or ())
        super().__init__(HostExecutor(backend.open_lanes(cores if slots is None else named.values())), named)
        self.executor.without_it = "call {!r} without run()"
        self._users: Any = WeakIdKeyDictionary()  # for each parameter the names whose results depend on it
        self._results: list[weakref.ref[LaneTensor]] = []

    def __enter__(self) -> Self:
        self.executor.begin()
        return self

    def run(self, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self._turns is not None and name not in self._slots:
            self._slots[name] = next(self._turns)
        site = self._site(name, function)
        num_signatures = len(site.signatures)
        result = self.executor.call(site, function, args, kwargs)
        if len(site.signatures) > num_signatures:
            self._keep_apart(site, result)
        self._results += [weakref.ref(tensor) for tensor in tensors_in(result) if isinstance(tensor, LaneTensor)]
        return result

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if error is None:
                for reference in self._results:
                    if (tensor := reference()) is not None:
                        tensor.join()
                self.executor.check_errors()
        finally:
            self._results.clear()
            self.executor.drain()  # what nobody used may still read parameters and modes
            self.executor.end()

    def _keep_apart(self, site: PlacedModule, result: Any) -> None:
        """Keeps names that share a parameter off their lanes, which would both add to its gradient at once."""
        for leaf in survey(tensors_in(result)).leaves.values():
            names = self._users.setdefault(leaf, set())
            names.add(site.name)
            if len(names) > 1:
                for each in self._sites.values():
                    if each.name in names:
                        each.obstacle = f"it shares a parameter with {', '.join(sorted(names - {each.name}))}"


class _StreamBlock(ParallelBlock):
    """Lanes on streams of a device.

    A piece, and a torch function between pieces, waits for other lanes that were given its parameters or buffers: two
    pieces would write running statistics at once, or read the cast of a weight that the other is making.
    """

    executor: StreamExecutor

    def __init__(self, backend: Backend, slots: dict[str, tuple[int, ...]]) -> None:
        lanes = backend.open_lanes(slots.values())
        if lanes.streams is None:
            raise TypeError(f"the backend {backend.name!r} has no lanes on streams")
        super().__init__(StreamExecutor(lanes.streams), slots)
        self._users: dict[int, Lane] = {}  # by address of parameters and buffers: the lane that was given them last
        self._watches: list[_Watch] = []

    def __enter__(self) -> Self:
        self._watches.append(_Watch(self._touch))
        self._watches[-1].__enter__()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._watches.pop().__exit__(None, None, None)
        self._users.clear()
        if error is None:
            self.executor.settle()
        else:
            self.executor.lanes.join()

    def run(self, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        site, module = self._site(name, function), owner_of(function)
        if module is None:
            site.obstacle = _IS_FUNCTION
        else:
            site.obstacle = HOOKED if HeldTensors(parts_of(module)).has_gradient_hooks() else None
            memory = {memory_of(tensor) for tensor in (*module.parameters(), *module.buffers())} - {0}
            if any(self._users.get(address, site.lane) is not site.lane for address in memory):
                self.executor.settle()
            self._users.update(dict.fromkeys(memory, site.lane))
        self.executor.orders.held.setdefault(site, HeldState(None))  # operations of a block are seen
        is_ours = isinstance(_get_current_function_mode(), _Watch)  # and no mode of the user's is above
        unwatched: AbstractContextManager[Any] = _pop_mode_temporarily() if is_ours else nullcontext()
        with unwatched:
            return self.executor.call(site, function, args, kwargs)

    def _touch(self, memory: set[int]) -> None:
        if not memory.isdisjoint(self._users) and on_user_stream():
            self.executor.settle()
            self._users.clear()


class _Watch(TorchFunctionMode):
    """Calls ``touch`` with the memory of the plain tensors of each torch function between pieces."""

    def __init__(self, touch: Callable[[set[int]], None]) -> None:
        super().__init__()
        self._touch = touch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not torch.compiler.is_compiling() and not look_up(func).reads:
            self._touch({memory_of(each) for each in tensors_in((args, kwargs)) if type(each) is not StreamTensor})
        return func(*args, **kwargs)


def _identity_of(function: Callable[..., Any]) -> Hashable:
    """Returns an identity that stays the same for a lambda that is made anew each step."""
    plain = getattr(function, "__func__", function)
    code: Hashable = getattr(plain, "__code__", None)
    if code is not None:
        return code
    return id(plain) if isinstance(plain, BuiltinFunctionType) else id(type(plain))
