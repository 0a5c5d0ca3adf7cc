"""One module on some of the ranks: inputs to its members, its own work there, results back, and gradients likewise.

Every rank calls the module, in the same order as the other modules; a rank that does not run it takes part in the
exchange all the same. A call is an ordinary differentiable function, so whatever runs a module (a lane, the caller's
own thread) runs a ranked one too.

Why it cannot deadlock, with calls on lanes. On each rank the loop's thread submits pieces of work (calls, their
backwards, operations between modules), and each piece waits for pieces that were submitted before it, for the same
piece on other ranks, and for slots; so does the loop's thread itself.

1. *One order.* All ranks submit the calls of all modules in one order: the program's, with calls that a rank has
   nothing for where the sample's step made them. They submit the backwards in the reverse of it: autograd runs, of all
   that is ready, what was made last, and every call can be reached from the model's results (``Tied``).
2. *Matching.* A module's messages go over a communicator of its own, from one thread, call after call, each by the
   steps of one table. So the k-th message of a module on one rank meets the k-th on the others, whatever other modules
   do. The reductions of its gradients do likewise over another one.
3. *Slots.* What computes holds slots and waits for nothing; what waits for messages holds none.

Take the first call, backward or reduction in that order which some rank has not ended. All before it have ended on all
ranks, and so, by induction, has what was submitted on any rank before it. So each rank's thread comes to submit it,
nothing on its lane is before it, its partners on the other ranks are in the same place, and its slots become free. So
it ends. Calls on streams have one launching thread, and an argument of their own (``mosaic.ranks.calls.stream_calls``).
Where every module runs on all ranks and alone, there are no routed calls (``RankedRuns.begin_alike``): the sums of
gradients are all that ranks exchange, bucket after bucket in one order over one communicator, and awaited at the
backward's end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mosaic.engine.calls.hidden import Surroundings
from mosaic.engine.calls.signature import Signature
from mosaic.engine.calls.structure import flatten, unflatten
from mosaic.ranks.calls.attributes import Attributes
from mosaic.ranks.parameters.gradients import GradientReducer
from mosaic.ranks.parameters.tied import Compute
from mosaic.ranks.rows.routing import Agreement
from mosaic.ranks.world.progress import Traffic, Waiting


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
        """Returns the template of what a module returned for a sample; keeps nothing of its graph."""
        leaves, spec = flatten(result)
        return Template(
            spec,
            tuple(torch.empty_like(leaf, device="meta") if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves),
            tuple(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves),
            next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), torch.device("cpu")),
        )

    def of_no_rows(self) -> list[Any]:
        return [
            torch.empty((0, *leaf.shape[1:]), dtype=leaf.dtype, device=self.device)
            if isinstance(leaf, torch.Tensor)
            else leaf
            for leaf in self.leaves
        ]

    def wanted_now(self) -> list[int]:
        """Returns which leaves take a gradient in the calling thread's mode."""
        return [index for index, flag in enumerate(self.differentiable) if flag] if torch.is_grad_enabled() else []


@dataclass(slots=True, kw_only=True, eq=False)
class Ranked:
    """A module on ``members`` of the ranks."""

    name: str
    """In the graph."""
    module: nn.Module
    """Its parameters may have been given up on ranks that are no members."""
    members: tuple[int, ...]
    """Ranks that run it."""
    group: dist.ProcessGroup
    """All ranks; its own communicator."""
    control: dist.ProcessGroup
    """All ranks, for what is in host memory; perhaps ``group``."""
    sample: InitVar[tuple[tuple[Any, ...], dict[str, Any]]]
    """The arguments of a call, with the batch in their leading dimensions."""
    batched: tuple[bool, ...]
    """For each argument, whether it has a row for each sample."""
    template: Template
    """Its result."""
    learned: Signature
    """Its call in the sample's step."""
    awaited: str | None
    """Why a thread's forward is waited for where it is called, or None."""
    compute: Compute
    """Runs its forward and its backward."""
    reducer: GradientReducer | None
    """Of its parameters' gradients over the members; None on other ranks, and where nothing trains."""
    traffic: Traffic
    """Counts what is sent."""
    waiting: Waiting
    """Notes that a thread waits for other ranks."""

    routes: bool = field(init=False)
    """True if rows go to its ranks; a module on all ranks runs each rank's own rows."""
    agreement: Agreement | None = field(init=False, default=None)
    """The last one of all ranks on a call."""
    writes: bool = field(init=False, default=False)
    """True if its forward was seen to write attributes, globals, or variables that it encloses."""
    spec: Any = field(init=False)
    """The nesting of arguments."""
    keywords: frozenset[str] = field(init=False)
    """Of arguments in the sample's step."""
    sample_wants: list[bool] = field(init=False)
    """For each argument, whether it took a gradient in the sample's step."""
    anchor: torch.Tensor = field(init=False)
    """An empty leaf that makes results differentiable where only its parameters are."""
    plain: Callable[..., Any] = field(init=False)
    """Makes its own call."""
    rank: int = field(init=False)
    size: int = field(init=False)
    after_backward: Callable[[Ranked], None] = field(init=False)
    """Called once a backward has started all of its reduction; by default waits for it right there."""
    on_backward: Callable[[], None] = field(init=False, default=lambda: None)
    """Called when its backward is reached, in the thread that runs it."""
    _attributes: Attributes = field(init=False)
    _parts: tuple[nn.Module, ...] = field(init=False)
    _known: set[tuple[bool, ...]] = field(init=False, default_factory=set)
    _sample: list[Any] = field(init=False)

    def __post_init__(self, sample: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.routes = len(self.members) < self.size
        self.after_backward = Ranked.reduce
        self.plain = partial(nn.Module.__call__, self.module)
        self.keywords = frozenset(sample[1])
        leaves, self.spec = flatten(sample)
        self.sample_wants = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves]
        self._sample = [
            leaf.detach()[:0].clone() if cut else leaf for leaf, cut in zip(leaves, self.batched, strict=True)
        ]
        self.anchor = torch.zeros(0, requires_grad=True, device=self.template.device)
        self._attributes = Attributes(self.module)
        self._parts = tuple(self.module.modules())  # asked for their modes at each call

    def without_rows(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns arguments without rows, for taking part in a call that this rank has nothing for."""
        args, kwargs = unflatten(list(self._sample), self.spec)
        return args, kwargs

    @property
    def is_new(self) -> bool:
        """True if it has not run here in its present mode, so that it is unknown what it writes into its attributes."""
        return self.is_member and self._mode() not in self._known

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Around its own forward, while nobody else changes it if it is new: learns which attributes it writes."""
        if not self.is_new:
            yield
            return
        mode, before, attributes = self._mode(), Surroundings(self.module), self._attributes.read()
        yield
        self._attributes.note_own(attributes)
        self.writes |= before.changed() is not None
        self._known.add(mode)

    def _mode(self) -> tuple[bool, ...]:
        return (torch.is_grad_enabled(), *(part.training for part in self._parts))

    def set_since(self) -> str:
        """Says which attributes of the module were set since it was colocated, and not by itself; empty for none."""
        return self._attributes.set_since()

    def result_of(self, leaves: Sequence[Any]) -> Any:
        return unflatten(list(leaves), self.template.spec)

    def rows_of(self, leaves: Sequence[Any]) -> int:
        return next(len(leaf) for leaf, cut in zip(leaves, self.batched, strict=True) if cut)

    def backward_begins(self) -> None:
        """Tells of it, and ends the reduction of an earlier call's gradients before new ones are added to them."""
        self.on_backward()
        if self.is_reducing:
            self.reduce()

    def backward_ends(self) -> None:
        """Starts the reduction of what the backward has not started itself; on members."""
        if self.reducer is not None:
            self.reducer.start_rest()
            self.traffic.add(self.name, "reduce", self.reducer.num_bytes)
        self.after_backward(self)

    def reduce(self) -> None:
        """Ends the reduction of its parameters' gradients; on members, after each backward."""
        if self.reducer is not None:
            self.reducer.finish()

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """Its communicators that this rank is in."""
        return [self.group] if self.reducer is None else [self.group, self.reducer.group]

    @property
    def is_member(self) -> bool:
        return self.rank in self.members

    @property
    def is_reducing(self) -> bool:
        return self.reducer is not None and self.reducer.is_running

    def close(self) -> None:
        if self.reducer is not None:
            self.reducer.close()

    @property
    def scale(self) -> float:
        """The factor of gradients on members that makes their mean over the members that over all ranks."""
        return len(self.members) / self.size
