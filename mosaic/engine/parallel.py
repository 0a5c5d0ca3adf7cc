"""``mosaic.parallel``: the explicit form, for code that the finder cannot see through."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from mosaic.backends.host.backend import HostBackend
from mosaic.engine.calls.pieces import PiecePool, piece_of
from mosaic.engine.host.parallel_pool import HostPool
from mosaic.errors import BackendUnavailableError, InvalidPlanError
from mosaic.plan import Plan

if TYPE_CHECKING:
    from mosaic.backends.base import Backend


class ParallelBlock:
    """A block in which named pieces of work run side by side; made by ``mosaic.parallel``."""

    def __init__(self, pool: PiecePool) -> None:
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

            found = p.run_all({"vision": (encode_image, (images,)), "text": (encode_text, (ids,), {"mask": mask})})

        Args:
            calls: For each name a function, its arguments, and its named arguments if it has any.

        Returns:
            The result of each name.
        """
        return self._pool.call_all({name: piece_of(name, call) for name, call in calls.items()})

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
def _pool(backend: Backend, slots: tuple[tuple[str, tuple[int, ...]], ...] | None, cuda_graphs: bool) -> PiecePool:
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
