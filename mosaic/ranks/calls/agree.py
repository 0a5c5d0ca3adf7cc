"""Ranks tell each other, before a module's rows move, how many there are, and see that the calls are alike.

A rank whose call cannot be routed says so here, so that all of them raise and none waits for rows that never come.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mosaic.engine.calls.structure import flatten
from mosaic.errors import ModuleContractError
from mosaic.ranks.world.progress import Waiting

_FACTS = 6
_ADDED = 2
"""Stands for a call with arguments that the sample's step had not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What all ranks know of a call."""

    held: tuple[int, ...]
    """Rows that each rank holds."""
    there: tuple[bool, ...]
    """Which ranks call the module; the others take part in the exchange."""
    wanted: tuple[bool, ...]
    """For each argument, whether it wants a gradient on any rank."""


def agree(
    name: str,
    group: dist.ProcessGroup,
    leaves: Sequence[Any],
    batched: Sequence[bool],
    *,
    is_there: bool,
    wants: Sequence[bool],
    added: str,
    attributes: str,
    members: Collection[int],
    trouble: ModuleContractError | None,
    waiting: Waiting,
) -> Agreement:
    """Tells all ranks of this one's call.

    Args:
        name: Name of the module.
        group: All ranks.
        leaves: The arguments; of no use where there is trouble.
        batched: For each argument of the sample's call, whether it has a row for each sample.
        is_there: Whether this rank calls the module.
        wants: For each argument, whether it wants a gradient here.
        added: Says what goes along here that the sample's step had not; empty for nothing.
        attributes: Says what was set in the module since it was colocated; empty for nothing.
        members: Ranks that run the module.
        trouble: Why this rank's call cannot be routed.
        waiting: Notes that a thread waits for other ranks.

    Raises:
        ModuleContractError: A rank's call cannot be routed, or calls differ in what has to be the same; on all ranks.
    """
    told = [0, is_there, True, 0, 0, 0] + [0] * len(batched)
    if trouble is None:
        cut = [leaf for leaf, has_rows in zip(leaves, batched, strict=True) if has_rows]
        there = _ADDED if added else int(is_there)
        told = [len(cut[0]), there, False, _said(leaves, added), _shapes(cut), zlib.crc32(attributes.encode()), *wants]
    mine = torch.tensor(told, dtype=torch.int64)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    with waiting("forward"):
        dist.all_gather(found, mine, group=group)
    table = torch.stack(found)
    if trouble is not None:
        raise trouble
    _check(name, table)
    rank, calling, told_of = dist.get_rank(group), table[:, 1].tolist(), table[:, 5].tolist()
    if len({told for each, told in enumerate(told_of) if calling[each] or each in members}) > 1:
        raise ModuleContractError(
            f"attributes of {name!r} were set to other values on some of the ranks (on rank {rank}: "
            f"{attributes or 'to none'}), and it runs on rows of all of them; pass what differs as an argument, or "
            f"leave it where it is called: colocate(..., exclude=[{name!r}])"
        )
    return Agreement(
        held=tuple(table[:, 0].tolist()),
        there=tuple(table[:, 1].bool().tolist()),
        wanted=tuple(table[:, _FACTS:].any(0).tolist()),
    )


def trouble_of(
    name: str, spec: Any, leaves: Sequence[Any], batched: Sequence[bool], known: Any
) -> ModuleContractError | None:
    """Returns why a call cannot be routed, or None.

    Args:
        name: Name of the module.
        spec: How the call's arguments nest.
        leaves: The arguments.
        batched: For each argument of the sample's call, whether it has a row for each sample.
        known: How the arguments of the sample's call nest.
    """
    way_out = f"on several ranks all calls have to be alike: colocate(..., exclude=[{name!r}])"
    if spec != known:
        return ModuleContractError(f"{name!r} is called with other arguments than in the sample's step; {way_out}")
    cut = [leaf for leaf, has_rows in zip(leaves, batched, strict=True) if has_rows]
    if not all(isinstance(leaf, torch.Tensor) and leaf.dim() for leaf in cut):
        kinds = ", ".join(type(leaf).__name__ for leaf in cut)
        return ModuleContractError(f"{name!r} is called with {kinds} where the sample's step had tensors; {way_out}")
    if len({len(leaf) for leaf in cut}) > 1:
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in cut)
        return ModuleContractError(
            f"{name!r} is called with {shapes}, which had one leading dimension in the sample's step; {way_out}"
        )
    return None


def _check(name: str, table: torch.Tensor) -> None:
    failed = table[:, 2].nonzero().flatten().tolist()
    if failed:
        ranks = ", ".join(map(str, failed))
        raise ModuleContractError(f"{name!r} could not be called on rank {ranks}, which says why")
    if (table[:, 1] == _ADDED).any() and not table[:, 1].all():
        raise ModuleContractError(
            f"{name!r} is called with arguments that the sample's step had not, and some ranks do not call it, which "
            "may have to run it for others; colocate with a sample whose step has these arguments"
        )
    calling = table[table[:, 1].bool()]
    for column, what in (
        (3, "other arguments that are no tensors (numbers, flags, strings), which have to be the same"),
        (4, "other shapes (but for the number of rows) or types; pad to one length on all ranks"),
    ):
        if len(calling[:, column].unique()) > 1:
            raise ModuleContractError(f"{name!r} is called on different ranks with {what}")


def _said(leaves: Sequence[Any], added: str = "") -> int:
    """Returns a number for all arguments that are no tensors."""
    return zlib.crc32((repr([leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]) + added).encode())


def _shapes(cut: Sequence[torch.Tensor]) -> int:
    return zlib.crc32(repr([(tuple(leaf.shape[1:]), leaf.dtype) for leaf in cut]).encode())


@dataclass(frozen=True, slots=True)
class WithAdded:
    """Makes a module's own call with keyword arguments that are not routed."""

    run: Callable[..., Any]
    """Makes the call."""
    added: Mapping[str, Any]
    """By name; the same on all ranks that call."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Makes it."""
        return self.run(*args, **kwargs, **self.added)


def put_aside(
    run: Callable[..., Any], kwargs: dict[str, Any], known: Collection[str]
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Returns what makes a module's call with those arguments that hold no rows, and the other ones.

    Args:
        run: Makes the call.
        kwargs: Its keyword arguments.
        known: Names of those in the sample's step.
    """
    added = {name: value for name, value in kwargs.items() if name not in known and _holds_no_rows(value)}
    if not added:
        return run, kwargs
    return WithAdded(run, added), {name: value for name, value in kwargs.items() if name not in added}


def said_by(run: Callable[..., Any]) -> str:
    """Returns a text for what was put aside, which has to be the same on all ranks; empty for nothing.

    Of tensors it has shape and type, since reading a value would make the host wait for a GPU.
    """
    if not isinstance(run, WithAdded):
        return ""
    leaves = [
        (leaf.dtype, tuple(leaf.shape)) if isinstance(leaf, torch.Tensor) else leaf for leaf in flatten(run.added)[0]
    ]
    return f"{sorted(run.added)} {leaves}"


def _holds_no_rows(value: Any) -> bool:
    return all(
        not isinstance(leaf, torch.Tensor) or (not leaf.dim() and not leaf.requires_grad) for leaf in flatten(value)[0]
    )
