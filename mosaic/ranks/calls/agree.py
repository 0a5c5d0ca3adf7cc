"""The agreement of all ranks on a routed call, before its rows move: how many there are, and that calls are alike.

A rank whose call cannot be routed says so here, so all ranks raise and none waits for rows that never come.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from mosaic.engine.calls.structure import flatten
from mosaic.errors import ModuleContractError

if TYPE_CHECKING:
    from mosaic.ranks.calls.ranked import Ranked

_FACTS = 6
_ADDED = 2
"""Marks a call with arguments that the sample's step had not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The same on all ranks."""

    held: tuple[int, ...]
    """Rows that each rank holds."""
    there: tuple[bool, ...]
    """Which ranks call the module; the others take part in the exchange."""
    wanted: tuple[bool, ...]
    """For each argument, whether it takes a gradient on any rank."""


def agree(
    ranked: Ranked,
    leaves: Sequence[Any],
    *,
    is_there: bool,
    wants: Sequence[bool],
    added: str,
    attributes: str,
    error: ModuleContractError | None,
) -> Agreement:
    """Gathers the facts of all ranks' calls.

    Args:
        ranked: The module.
        leaves: The arguments; not read where there is an error.
        is_there: Whether this rank calls the module.
        wants: For each argument, whether it takes a gradient here.
        added: A digest of arguments that the sample's step had not.
        attributes: A digest of attributes that were set in the module since it was colocated.
        error: Why this rank's call cannot be routed.

    Raises:
        ModuleContractError: A rank's call cannot be routed, or calls differ in what has to be the same; on all ranks.
    """
    facts = [0, is_there, True, 0, 0, 0] + [0] * len(ranked.batched)
    if error is None:
        cut = [leaf for leaf, has_rows in zip(leaves, ranked.batched, strict=True) if has_rows]
        values = repr([leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]) + added
        shapes = repr([(tuple(leaf.shape[1:]), leaf.dtype) for leaf in cut])
        digests = [zlib.crc32(text.encode()) for text in (values, shapes, attributes)]
        facts = [len(cut[0]), _ADDED if added else int(is_there), False, *digests, *wants]
    own = torch.tensor(facts, dtype=torch.int64)
    gathered = [torch.empty_like(own) for _ in range(ranked.size)]
    with ranked.waiting("forward"):
        dist.all_gather(gathered, own, group=ranked.control)
    if error is not None:
        raise error
    table = torch.stack(gathered)
    _check(ranked, table, attributes)
    return Agreement(
        held=tuple(table[:, 0].tolist()),
        there=tuple(table[:, 1].bool().tolist()),
        wanted=tuple(table[:, _FACTS:].any(0).tolist()),
    )


def _check(ranked: Ranked, table: torch.Tensor, attributes: str) -> None:
    name, calls = ranked.name, table[:, 1]
    failed = table[:, 2].nonzero().flatten().tolist()
    if failed:
        ranks = ", ".join(map(str, failed))
        raise ModuleContractError(f"{name!r} could not be called on rank {ranks}, which says why")
    if (calls == _ADDED).any() and not calls.all():
        raise ModuleContractError(
            f"{name!r} is called with arguments that the sample's step had not, and some ranks do not call it, which "
            "may have to run it for others; colocate with a sample whose step has these arguments"
        )
    for column, what in (
        (3, "other arguments that are no tensors (numbers, flags, strings), which have to be the same"),
        (4, "other shapes (but for the number of rows) or types; pad to one length on all ranks"),
    ):
        if len(table[calls.bool()][:, column].unique()) > 1:
            raise ModuleContractError(f"{name!r} is called on different ranks with {what}")
    digests = [digest for rank, digest in enumerate(table[:, 5].tolist()) if calls[rank] or rank in ranked.members]
    if len(set(digests)) > 1:
        raise ModuleContractError(
            f"attributes of {name!r} were set to other values on some of the ranks (on rank {ranked.rank}: "
            f"{attributes or 'to none'}), and it runs on rows of all of them; pass what differs as an argument, or "
            f"leave it where it is called: colocate(..., exclude=[{name!r}])"
        )


def error_of(ranked: Ranked, spec: pytree.TreeSpec, leaves: Sequence[Any]) -> ModuleContractError | None:
    """Returns why a call with these arguments cannot be routed, or None."""
    name = ranked.name
    remedy = f"on several ranks all calls have to be alike: colocate(..., exclude=[{name!r}])"
    if spec != ranked.spec:
        return ModuleContractError(f"{name!r} is called with other arguments than in the sample's step; {remedy}")
    cut = [leaf for leaf, has_rows in zip(leaves, ranked.batched, strict=True) if has_rows]
    if not all(isinstance(leaf, torch.Tensor) and leaf.dim() for leaf in cut):
        kinds = ", ".join(type(leaf).__name__ for leaf in cut)
        return ModuleContractError(f"{name!r} is called with {kinds} where the sample's step had tensors; {remedy}")
    if len({len(leaf) for leaf in cut}) > 1:
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in cut)
        return ModuleContractError(
            f"{name!r} is called with {shapes}, which had one leading dimension in the sample's step; {remedy}"
        )
    return None


@dataclass(frozen=True, slots=True)
class UnroutedCall:
    """A module's own call with keyword arguments that are not routed."""

    run: Callable[..., Any]
    """Makes the call."""
    added: Mapping[str, Any]
    """By name; the same on all ranks that call."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Makes it."""
        return self.run(*args, **kwargs, **self.added)


def split_routed_kwargs(
    run: Callable[..., Any], kwargs: dict[str, Any], known: Collection[str]
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Returns a module's own call with the keyword arguments that hold no rows, and the other ones.

    Args:
        run: Makes the call.
        kwargs: Its keyword arguments.
        known: Names of those in the sample's step.
    """
    added = {name: value for name, value in kwargs.items() if name not in known and _holds_no_rows(value)}
    if not added:
        return run, kwargs
    return UnroutedCall(run, added), {name: value for name, value in kwargs.items() if name not in added}


def digest_of(run: Callable[..., Any]) -> str:
    """Returns a text for arguments that are not routed, which have to be the same on all ranks; empty for none.

    Of tensors it has shape and type: reading a value would make the host wait for a GPU.
    """
    if not isinstance(run, UnroutedCall):
        return ""
    leaves = [
        (leaf.dtype, tuple(leaf.shape)) if isinstance(leaf, torch.Tensor) else leaf for leaf in flatten(run.added)[0]
    ]
    return f"{sorted(run.added)} {leaves}"


def _holds_no_rows(value: Any) -> bool:
    return all(
        not isinstance(leaf, torch.Tensor) or (not leaf.dim() and not leaf.requires_grad) for leaf in flatten(value)[0]
    )
