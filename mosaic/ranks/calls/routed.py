"""A module that runs on some of the ranks.

Every rank calls the module, in the same order as the other modules; a rank that does not run it takes part in its
messages all the same. ``exchange`` has the messages, ``call`` one call, ``executor`` the order of calls.

Why calls on lanes cannot deadlock. On each rank the loop's thread submits work (calls, their backwards, operations
between modules). Each piece waits for earlier pieces, for the same piece on other ranks, and for slots.

1. *One order.* All ranks submit the calls of all modules in one order: that of the program. A rank that has nothing
   for a module takes part where the sample's step calls it. All ranks submit the backwards in the reverse order:
   autograd runs, of all that is ready, what was made last, and reaches every call from the model's results (``Tied``).
2. *Matching.* A module's messages use a communicator of their own, from one thread, call after call. The k-th message
   of a module on one rank meets the k-th on the others. The reductions of its gradients use another communicator.
3. *Slots.* Computing holds slots and waits for nothing; waiting for messages holds no slots.

Take the first call, backward or reduction in that order which some rank has not ended. All before it have ended on all
ranks. So each rank's thread submits it, nothing on its lane is before it, its partners on the other ranks are in the
same place, and its slots become free: it ends. Calls on streams have one launching thread (``streams``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import InitVar, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from mosaic.engine.calls.hidden import Surroundings, modes_of
from mosaic.engine.calls.signature import Signature
from mosaic.find.restore import same
from mosaic.find.structure import flatten, unflatten
from mosaic.ranks.parameters.gradients import GradientReducer
from mosaic.ranks.rows.routing import RowRouting
from mosaic.ranks.world.groups import carrier_of
from mosaic.ranks.world.progress import RankProgress, SentPhase, Traffic

_OF_TORCH = frozenset(vars(nn.Module()))
_COMPARED = (bool, int, float, str, type(None), torch.dtype)
"""Types of values with the same text in all processes."""

_Reading = list[dict[str, Any]]
"""The attributes of each part."""


@dataclass(frozen=True, slots=True)
class Template:
    """The result of a call except for the number of rows, for ranks that do not run the module."""

    spec: Any
    """The nesting of results."""
    leaves: tuple[Any, ...]
    """A tensor on the meta device for each tensor, anything else as it is."""
    differentiable: tuple[bool, ...]
    """For each leaf, whether it wants a gradient when the module trains."""
    device: torch.device
    """Device of its tensors."""

    @staticmethod
    def of(result: Any) -> Template:
        leaves, spec = flatten(result)
        return Template(
            spec,
            tuple(torch.empty_like(leaf, device="meta") if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves),
            tuple(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves),
            next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), torch.device("cpu")),
        )

    def of_rows(self, rows: int, device: torch.device | None = None) -> list[Any]:
        return [
            torch.empty((rows, *leaf.shape[1:]), dtype=leaf.dtype, device=device or self.device)
            if isinstance(leaf, torch.Tensor)
            else leaf
            for leaf in self.leaves
        ]

    def wanted(self) -> list[int]:
        """Returns the leaves that take a gradient in the calling thread's mode."""
        return [index for index, flag in enumerate(self.differentiable) if flag] if torch.is_grad_enabled() else []


class Facts(NamedTuple):
    """One rank's part of the kind of a call."""

    rows: int
    is_there: bool
    """True if the rank calls the module."""
    error: str
    """The reason why its call cannot be routed; empty for none."""
    added: str
    """Arguments that the sample's step had not."""
    values: str
    """Arguments that are no tensors."""
    shapes: str
    """Of the arguments that have rows, without the number of rows, and their types."""
    attributes: str
    """The attributes that were set in the module since it was colocated."""
    wants: tuple[bool, ...]
    """For each argument, whether it takes a gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The facts of a call on which all ranks agree."""

    facts: tuple[Facts, ...]
    """Of each rank's call."""
    routing: RowRouting
    row_bytes: int
    """Bytes of one row of all arguments that go with the number of the facts."""
    wants: tuple[bool, ...]
    """For each argument, whether it takes a gradient on any rank."""
    source: int | None
    """A rank that has the arguments without rows for ranks that do not call the module; None where all call it."""


@dataclass(kw_only=True, eq=False)
class RoutedModule:
    """A module on ``members`` of the ranks.

    Attributes:
        routes: Whether rows travel to its ranks; otherwise all ranks run it, each its own rows.
        agreement: That of all ranks on the call before.
        agreements: Those on all kinds of calls, by the numbers of the ranks' facts.
        numbers: The numbers of this rank's facts.
        writes: Whether a forward wrote attributes, globals, or variables that it encloses.
        sample_wants: For each argument, whether it took a gradient in the sample's step.
        without_rows: Arguments of a call that this rank has no rows for.
        anchor: An empty leaf that makes results differentiable where only its parameters are.
        plain: Makes its own call.
        is_member: Whether this rank runs it.
    """

    name: str
    module: nn.Module
    """Other ranks than the members may have given up its parameters."""
    members: tuple[int, ...]
    """Ranks that run it."""
    slots: tuple[int, ...]
    """Those that it runs on."""
    progress: RankProgress
    traffic: Traffic
    """Counts the bytes that are sent."""
    group: dist.ProcessGroup
    """All ranks; a communicator of its own."""
    control: dist.ProcessGroup
    """All ranks, for tensors in host memory; perhaps ``group``."""
    sample: InitVar[tuple[tuple[Any, ...], dict[str, Any]]]
    """The arguments of a call, with the batch in their leading dimensions."""
    batched: tuple[bool, ...]
    """For each argument, whether it has a row for each sample."""
    template: Template
    """Its result."""
    learned: Signature
    """Its call in the sample's step."""
    awaited: str | None
    """Why the caller waits for its forward, or None."""
    reducer: GradientReducer | None
    """Of its parameters' gradients over the members; None on other ranks, and where nothing trains."""

    def __post_init__(self, sample: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.is_member = self.rank in self.members
        self.routes = len(self.members) < self.size
        self.agreement: Agreement | None = None
        self.agreements: dict[tuple[int, ...], Agreement] = {}
        self.numbers: dict[Facts, int] = {}
        self.writes = False
        self.plain = partial(nn.Module.__call__, self.module)
        self.keywords = frozenset(sample[1])
        leaves, self.spec = flatten(sample)
        self.sample_wants = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves]
        empty = [leaf.detach()[:0].clone() if cut else leaf for leaf, cut in zip(leaves, self.batched, strict=True)]
        self.without_rows: tuple[tuple[Any, ...], dict[str, Any]] = unflatten(empty, self.spec)
        self.anchor = torch.zeros(0, requires_grad=True, device=self.template.device)
        self._attributes = _Attributes(self.module)
        self._modes = modes_of(self.module)
        self._known: set[tuple[bool, ...]] = set()

    def rows_of(self, leaves: Sequence[Any]) -> int:
        return next(len(leaf) for leaf, cut in zip(leaves, self.batched, strict=True) if cut)

    def read_mode(self) -> tuple[bool, ...]:
        """Returns whether gradients are computed and, where it runs here, which of its parts train."""
        return (torch.is_grad_enabled(), *(modes_of(self.module) if self.is_member else ()))

    def is_new(self, mode: tuple[bool, ...]) -> bool:
        """Returns whether it has not run here in a mode, so that the attributes that it writes are unknown."""
        return self.is_member and mode not in self._known

    @contextmanager
    def learning(self, mode: tuple[bool, ...]) -> Iterator[None]:
        """Learns which attributes its own forward writes, in the first call of each mode."""
        if not self.is_new(mode):
            yield
            return
        before, attributes = Surroundings(self.module), self._attributes.read()
        yield
        self._attributes.note_own(attributes)
        self.writes |= before.changed() is not None
        self._known.add(mode)

    def draws(self, mode: tuple[bool, ...]) -> bool:
        """Returns whether a call in a mode may draw random numbers on this rank."""
        return self.is_member and (self.learned.draws != 0 or mode[1:] != self._modes)

    def set_since(self) -> str:
        """Describes the attributes that others have set since the module was colocated; empty for none."""
        return self._attributes.set_since()

    # Messages and gradients.

    def waiting(self, phase: SentPhase) -> AbstractContextManager[None]:
        """Returns a block in which a thread waits for other ranks."""
        return self.progress.waiting(self.name, phase)

    def carrier_of(self, tensor: torch.Tensor) -> dist.ProcessGroup:
        return carrier_of(tensor, self.group, self.control)

    def start_reduction(self) -> None:
        """Starts the reduction of the gradients that the backward has not started itself; on members."""
        if self.reducer is not None:
            self.reducer.start_rest()
            self.traffic.add(self.name, "reduce", self.reducer.num_bytes)

    def reduce(self) -> None:
        """Ends the reduction of its parameters' gradients; on members, after each backward."""
        if self.reducer is not None:
            self.reducer.finish()

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """Its communicators that this rank is in."""
        return [self.group] if self.reducer is None else [self.group, self.reducer.group]

    @property
    def is_reducing(self) -> bool:
        return self.reducer is not None and self.reducer.is_running

    @property
    def scale(self) -> float:
        """The factor of gradients on members that makes their mean over the members that over all ranks."""
        return len(self.members) / self.size


class _Attributes:
    """The plain attributes of a module, which ranks compare; not what objects among them hold."""

    def __init__(self, module: nn.Module) -> None:
        self._parts = [(f"{path}." if path else "", vars(part)) for path, part in module.named_modules()]
        self._own: set[str] = set()
        self._first = self.read()

    def read(self) -> _Reading:
        """Returns their values now."""
        return [{key: own[key] for key in [*own] if key not in _OF_TORCH} for _, own in self._parts]

    def note_own(self, before: _Reading) -> None:
        """Notes what the module's forward has written since an earlier ``read``."""
        self._own.update(self._changed(before))

    def set_since(self) -> str:
        """Describes what was set since the first reading, and not by the module itself; the same text on all ranks."""
        changed = {name: value for name, value in self._changed(self._first).items() if name not in self._own}
        return ", ".join(f"{name} = {value!r}" for name, value in sorted(changed.items()) if type(value) in _COMPARED)

    def _changed(self, before: _Reading) -> dict[str, Any]:
        changed = {}
        for (prefix, own), first in zip(self._parts, before, strict=True):
            for key in [key for key, value in [*own.items()] if key not in _OF_TORCH and value is not first.get(key)]:
                if key not in first or not same(own[key], first[key]):
                    changed[prefix + key] = own[key]
        return changed
