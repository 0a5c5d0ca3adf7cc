"""A module that runs on some of the ranks, and its messages.

Every rank calls the module, in the same order as the other modules; a rank that does not run it takes part in its
messages all the same. ``call`` is one call, ``executor`` has the order of calls.

Ranks agree on a call once for each new kind of it: they gather its facts (how many rows each rank holds, shapes, types,
flags), check that these fit together, and number them. From then on they gather the numbers alone. A rank whose call
cannot be routed sends the number of no facts, so all ranks gather facts and raise, and none waits.

Why calls on lanes cannot deadlock. On each rank the loop's thread submits work (calls, their backwards, operations
between modules). Each piece waits for earlier pieces, for the same piece on other ranks, and for slots.

1. *One order.* All ranks submit the calls of all modules in the program's order; a rank that has nothing for a module
   takes part where the sample's step calls it. They submit the backwards in the reverse order: autograd runs, of all
   that is ready, what was made last, and reaches every call from the model's results (``Tied``).
2. *Matching.* A module's messages use a communicator of their own, from one thread, call after call. The k-th message
   of a module on one rank meets the k-th on the others. The reductions of its gradients use another communicator.
3. *Slots.* Computing holds slots and waits for nothing; waiting for messages holds no slots.

Take the first of these in that order which some rank has not ended. All before it have ended on all ranks, so each
rank's thread submits it, its partners are in the same place, and its slots become free: it ends.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import InitVar, dataclass
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from mosaic.engine.calls.hidden import Surroundings, modes_of
from mosaic.engine.calls.signature import Signature
from mosaic.errors import ModuleContractError
from mosaic.find.restore import same
from mosaic.find.structure import flatten, unflatten
from mosaic.profiler import Subject
from mosaic.ranks.parameters.gradients import GradientReducer
from mosaic.ranks.rows.routing import RowRouting
from mosaic.ranks.world.groups import carrier_of
from mosaic.ranks.world.progress import RankProgress, SentPhase

_NEW = -1
"""The number of facts on which ranks have not agreed yet."""
_MAX_AGREEMENTS = 256
"""Agreements that are remembered: numbers of rows, or values of arguments, may never repeat."""
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

    rows: int = 0
    is_there: bool = False
    """True if the rank calls the module."""
    error: str = ""
    """The reason why its call cannot be routed; empty for none."""
    added: str = ""
    """Arguments that the sample's step had not."""
    values: str = ""
    """Arguments that are no tensors."""
    shapes: str = ""
    """Of the arguments that have rows, without the number of rows, and their types."""
    attributes: str = ""
    """The attributes that were set in the module since it was colocated."""
    wants: tuple[bool, ...] = ()
    """For each argument, whether it takes a gradient."""


class Agreement(NamedTuple):
    """The outcome of all ranks' facts of a call."""

    routing: RowRouting
    wants: tuple[bool, ...]
    """For each argument, whether it takes a gradient on any rank."""
    source: int | None
    """A rank that has the arguments without rows for ranks that do not call the module; None where all call it."""


@dataclass(kw_only=True, eq=False)
class RoutedModule:
    """A module on ``members`` of the ranks; other ranks may have given up its parameters.

    Attributes:
        routes: Whether rows travel to its ranks; otherwise all ranks run it, each its own rows.
        writes: Whether a forward wrote attributes, globals, or variables that it encloses.
        sample_wants: For each argument, whether it took a gradient in the sample's step.
        without_rows: Arguments of a call that this rank has no rows for.
        anchor: An empty leaf that makes results differentiable where only its parameters are.
    """

    subject: InitVar[Subject]
    """The module, and its call in the sample's step."""
    members: tuple[int, ...]
    slots: tuple[int, ...]
    """Those that it runs on."""
    progress: RankProgress
    sent_bytes: Counter[tuple[str, SentPhase]]
    """Those of all modules; one thread counts a module's."""
    group: dist.ProcessGroup
    """All ranks; a communicator of its own."""
    control: dist.ProcessGroup
    """All ranks, for tensors in host memory; perhaps ``group``."""
    batched: tuple[bool, ...]
    """For each argument, whether it has a row for each sample."""
    template: Template
    """Its result."""
    learned: Signature
    """Its call in the sample's step."""
    reducer: GradientReducer | None
    """Of its parameters' gradients over the members; None on other ranks, and where nothing trains."""

    def __post_init__(self, subject: Subject) -> None:
        self.name, self.module = subject.name, subject.module
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.is_member = self.rank in self.members
        self.routes = len(self.members) < self.size
        self.writes = False
        self.plain = partial(nn.Module.__call__, self.module)
        self.keywords = frozenset(subject.kwargs)
        leaves, self.spec = flatten((subject.args, subject.kwargs))
        self.sample_wants = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves]
        empty = [leaf.detach()[:0].clone() if cut else leaf for leaf, cut in zip(leaves, self.batched, strict=True)]
        self.without_rows: tuple[tuple[Any, ...], dict[str, Any]] = unflatten(empty, self.spec)
        self.anchor = torch.zeros(0, requires_grad=True, device=self.template.device)
        self._agreements: dict[tuple[int, ...], Agreement] = {}  # by the numbers of the ranks' facts
        self._numbers: dict[Facts, int] = {}
        self.attributes = _Attributes(self.module)
        self._modes = modes_of(self.module)
        self._learned_modes: set[tuple[bool, ...]] = set()

    def rows_of(self, leaves: Sequence[Any]) -> int:
        return next(len(leaf) for leaf, cut in zip(leaves, self.batched, strict=True) if cut)

    def read_mode(self) -> tuple[bool, ...]:
        """Returns whether gradients are computed and, where it runs here, which of its parts train."""
        return (torch.is_grad_enabled(), *(modes_of(self.module) if self.is_member else ()))

    def is_new(self, mode: tuple[bool, ...]) -> bool:
        """Returns whether it has not run here in a mode, so that the attributes that it writes are unknown."""
        return self.is_member and mode not in self._learned_modes

    @contextmanager
    def learning(self, mode: tuple[bool, ...]) -> Iterator[None]:
        """Learns which attributes its own forward writes, in the first call of each mode."""
        if not self.is_new(mode):
            yield
            return
        before, attributes = Surroundings(self.module), self.attributes.read()
        yield
        self.attributes.note_own(attributes)
        self.writes |= before.changed() is not None
        self._learned_modes.add(mode)

    def draws(self, mode: tuple[bool, ...]) -> bool:
        """Returns whether a call in a mode may draw random numbers on this rank."""
        return self.is_member and (self.learned.draws != 0 or mode[1:] != self._modes)

    # Messages.

    def exchange(
        self, facts: Facts, leaves: Sequence[Any], error: ModuleContractError | None
    ) -> tuple[Agreement, list[Any]]:
        """Agrees on a call with all ranks; returns the agreement, and the arguments with this rank's part of the rows.

        Raises:
            ModuleContractError: A rank's call cannot be routed (``error`` is this rank's reason), or calls differ in
                what has to be the same; on all ranks.
        """
        numbers = self._gather(torch.tensor([self._numbers.get(facts, _NEW)]))
        agreement = self._agreements.get(tuple(number for (number,) in numbers))
        if agreement is None:
            agreement = self._agree(facts, error)
        rows = iter(self.move(agreement.routing, list(compress(leaves, self.batched)), "forward"))
        own = [next(rows) if cut else leaf for leaf, cut in zip(leaves, self.batched, strict=True)]
        if agreement.source is not None:
            self._share(own, leaves, agreement.source)
        return agreement, own

    def _agree(self, facts: Facts, error: ModuleContractError | None) -> Agreement:
        """Gathers the facts of all ranks, checks and numbers them."""
        if len(self._agreements) == _MAX_AGREEMENTS:  # on all ranks alike
            self._agreements.clear()
            self._numbers.clear()
        number = self._numbers.setdefault(facts, len(self._numbers))
        text = json.dumps([number, *facts]).encode()
        (longest,) = max(self._gather(torch.tensor([len(text)])))
        padded = torch.tensor(list(text.ljust(longest)), dtype=torch.uint8)
        numbers, table = [], []
        for gathered in self._gather(padded):
            other_number, *values, wants = json.loads(bytes(gathered))
            numbers.append(other_number)
            table.append(Facts._make([*values, tuple(wants)]))
        if error is not None:
            raise error
        _check(self, table)
        there = [each.is_there for each in table]
        agreement = self._agreements[tuple(numbers)] = Agreement(
            routing=RowRouting(held=tuple(each.rows for each in table), members=self.members),
            wants=tuple(map(any, zip(*(each.wants for each in table), strict=True))),
            source=there.index(True) if any(there) and not all(there) else None,
        )
        return agreement

    def _gather(self, own: torch.Tensor) -> list[list[int]]:
        """Returns the numbers in a small tensor in host memory of each rank."""
        gathered = [torch.empty_like(own) for _ in range(self.size)]
        with self.waiting("forward"):
            _swap(self.control, [own] * self.size, gathered, tag=0)
        gathered[self.rank] = own
        return [each.tolist() for each in gathered]

    def _share(self, own: list[Any], leaves: Sequence[Any], source: int) -> None:
        """Broadcasts the arguments that are not part of the batch to ranks that do not call the module."""
        for index, (leaf, cut) in enumerate(zip(leaves, self.batched, strict=True)):
            if isinstance(leaf, torch.Tensor) and not cut:
                value, group = leaf.detach().clone(), self.carrier_of(leaf)
                with self.waiting("forward"):
                    dist.broadcast(value, src=dist.get_global_rank(group, source), group=group, async_op=True).wait()
                if self.rank != source and not leaf.requires_grad:
                    own[index] = value

    def move(
        self,
        routing: RowRouting | None,
        tensors: Sequence[torch.Tensor],
        phase: SentPhase,
        *,
        is_back: bool = False,
    ) -> list[torch.Tensor]:
        """Moves the rows of some tensors to the module's ranks, or back to the ranks that hold them, in one message.

        Without a routing each rank keeps its own. Messages go over the module's own communicator, so they keep their
        order.
        """
        if routing is None or not routing.num_moved or not tensors:
            return list(tensors)
        sends, receives = routing.sends(self.rank), routing.receives(self.rank)
        if is_back:
            sends, receives = receives, sends
        moved: dict[int, torch.Tensor] = {}
        for group in dict.fromkeys((self.control, self.group)):
            places = [place for place, tensor in enumerate(tensors) if self.carrier_of(tensor) is group]
            if places:
                own = [tensors[place] for place in places]
                tag = 1 + 2 * (phase == "backward") + is_back if group is self.control else None
                with self.waiting(phase):
                    moved.update(zip(places, _all_to_all(group, own, sends, receives, tag), strict=True))
                self.sent_bytes[self.name, phase] += (sum(sends) - sends[self.rank]) * sum(map(_row_bytes, own))
        return [moved[place] for place in range(len(tensors))]

    def waiting(self, phase: SentPhase) -> AbstractContextManager[None]:
        """Returns a block in which a thread waits for other ranks."""
        return self.progress.waiting(self.name, phase)

    def carrier_of(self, tensor: torch.Tensor) -> dist.ProcessGroup:
        return carrier_of(tensor, self.group, self.control)

    # Gradients of its parameters.

    def start_reduction(self) -> None:
        """Starts the reduction of the gradients that the backward has not started itself."""
        if self.reducer is not None:
            self.reducer.start_rest()
            self.sent_bytes[self.name, "reduce"] += self.reducer.num_bytes

    def reduce(self) -> None:
        """Ends the reduction of its parameters' gradients, after each backward."""
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


def _check(routed: RoutedModule, table: Sequence[Facts]) -> None:
    """Raises ModuleContractError, on all ranks, where calls differ in what has to be the same."""
    for rank, facts in enumerate(table):
        if facts.error:
            raise ModuleContractError(f"{routed.name!r} could not be called on rank {rank}: {facts.error}")
    calling = [facts for facts in table if facts.is_there]
    running = [facts for rank, facts in enumerate(table) if facts.is_there or rank in routed.members]
    if len(calling) < len(table) and any(facts.added for facts in calling):
        problem = (
            "is called with arguments that the sample's step had not, and some ranks do not call it, which may have to "
            "run it for others; colocate with a sample whose step has these arguments"
        )
    elif len({(facts.added, facts.values) for facts in calling}) > 1:
        problem = (
            "is called on different ranks with other arguments that are no tensors (numbers, flags, strings), which "
            "have to be the same"
        )
    elif calling and len({facts.shapes for facts in running}) > 1:
        problem = (
            "is called on different ranks with other shapes (but for the number of rows) or types; pad to one length "
            "on all ranks"
        )
    elif len({facts.attributes for facts in running}) > 1:
        problem = (
            f"has attributes that were set to other values on some of the ranks (on rank {routed.rank}: "
            f"{table[routed.rank].attributes or 'to none'}), and it runs on rows of all of them; pass what differs as "
            f"an argument, or leave it where it is called: colocate(..., exclude=[{routed.name!r}])"
        )
    else:
        return
    raise ModuleContractError(f"{routed.name!r} {problem}")


def _swap(
    group: dist.ProcessGroup, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], tag: int
) -> None:
    """Sends a tensor in host memory to each other rank, and fills those that come; quicker than gloo's collectives.

    Messages of ranks in different places of a step have different tags, so they never meet.
    """
    others = [other for other in range(group.size()) if other != group.rank()]
    works = [group.recv([incoming[other]], other, tag) for other in others if incoming[other].numel()]
    works += [group.send([outgoing[other]], other, tag) for other in others if outgoing[other].numel()]
    for work in works:
        work.wait()


def _all_to_all(
    group: dist.ProcessGroup,
    tensors: Sequence[torch.Tensor],
    sends: Sequence[int],
    receives: Sequence[int],
    tag: int | None,
) -> list[torch.Tensor]:
    """Sends rows of some tensors to each rank, as bytes side by side; returns the rows that come."""
    data = list(map(_bytes_of, tensors))
    sent = data[0] if len(data) == 1 else torch.cat(data, dim=1)
    received = sent.new_empty(sum(receives), sent.shape[1])
    if tag is not None:
        outgoing, incoming = sent.split(list(sends)), received.split(list(receives))
        incoming[group.rank()].copy_(outgoing[group.rank()])
        _swap(group, outgoing, incoming, tag)
    else:  # NCCL's own stream has the whole device, whatever SMs the current stream is confined to
        dist.all_to_all_single(received, sent, list(receives), list(sends), group=group, async_op=True).wait()
    pieces = [received]
    if len(tensors) > 1:  # copies are aligned
        split = received.split(list(map(_row_bytes, tensors)), dim=1)
        pieces = [piece.clone(memory_format=torch.contiguous_format) for piece in split]
    return [
        piece.view(tensor.dtype).view(len(piece), *tensor.shape[1:])
        for piece, tensor in zip(pieces, tensors, strict=True)
    ]


def _row_bytes(tensor: torch.Tensor) -> int:
    return tensor.element_size() * tensor.shape[1:].numel()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8).view(len(tensor), _row_bytes(tensor))


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
