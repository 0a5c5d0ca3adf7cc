"""A rank's part of a model: the weights of its chunks, and their forwards."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from mosaic.errors import UnsplittableError
from mosaic.find.random_numbers import forked, random_state
from mosaic.find.restore import restored_objects
from mosaic.graph import Part
from mosaic.parts.blank import BlankResults, replaced_forwards
from mosaic.parts.chunk_call import ChunkCall, ChunkEnded, CurrentCall, Draws, ForwardPatch
from mosaic.parts.offload import Copies, Offload, copies_for
from mosaic.parts.split import ModelSplit, Value
from mosaic.parts.weights import StandIns, WeightsInUse, device_of, drop_weights, give_memory, meta_buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPlan:
    """The common plan of all microbatches that call the same modules; by default no site runs."""

    present: frozenset[str]
    own: frozenset[int] = frozenset()
    layers: tuple[int, ...] = ()
    """Its layers, in the order of the chunk's parts."""
    last: int | None = None
    """Last site of the call; None: the model's end."""
    last_shape: int | None = None
    """Last site of a call for shapes alone, which also makes values that the chunk receives and passes on."""
    entries: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    """Received values, by the module whose part sends them."""
    leaves: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    """Sent values, by the module whose part sends them."""
    sends: frozenset[Value] = frozenset()


def plan_chunk(split: ModelSplit, chunk: Sequence[Part], present: frozenset[str]) -> ChunkPlan:
    """Plans a chunk for microbatches that call these modules, of which it has one or more."""
    own = split.sites_of(chunk)
    running = [index for index in own if split.sites[index].module in present]
    if not running:
        raise ValueError(
            f"chunk {'+'.join(map(str, chunk))} has nothing to do with a microbatch that calls "
            f"{', '.join(sorted(present))}; leave it out of the schedule"
        )
    order = {part.module: place for place, part in enumerate(chunk)}
    layers = sorted(
        (index for index in own if split.sites[index].is_layer), key=lambda i: (order[split.sites[i].module], i)
    )
    leaves = _present(split, split.leaves(chunk), present)
    sends = frozenset(value for values in leaves.values() for value in values)
    return ChunkPlan(
        own=own,
        layers=tuple(layers),
        last=None if not split.sites[max(running)].path else max(running),
        last_shape=max([*running, *(value.site for value in sends)]),
        entries=_present(split, split.entries([part for part in chunk if part.module in present]), present),
        leaves=leaves,
        present=present,
        sends=sends,
    )


def _present(
    split: ModelSplit, values: dict[str, tuple[Value, ...]], present: frozenset[str]
) -> dict[str, tuple[Value, ...]]:
    return {
        module: tuple(value for value in own if split.sites[value.site].module in present)
        for module, own in values.items()
        if module in present
    }


NUM_SEEDS = 64
"""Seeds with which calls between random numbers are compared."""
MAX_KINDS = 64
"""Most kinds of microbatches that a chunk checks; with more, text is data rather than a switch."""


def kind_of(kwargs: Mapping[str, Any], read: Sequence[str] = ()) -> Hashable:
    """Returns the properties of a microbatch that may choose a path: switches, names, tensors' axes, empty tensors.

    Of tensors that Python reads, ``read``, also whether all of their elements are there, or any.
    """
    tensors = [leaf for name in read for leaf in pytree.tree_leaves(kwargs.get(name)) if isinstance(leaf, torch.Tensor)]
    kinds = sorted(((str(name), _kind(value)) for name, value in kwargs.items()), key=lambda item: item[0])
    return tuple(kinds), tuple((bool(tensor.all()), bool(tensor.any())) for tensor in tensors)


def is_alike(first: Any, second: Any, *, rtol: float = 1e-2) -> bool:
    """Returns True if two runs of a chunk gave equal tensors, up to rounding."""
    tensors, others = _tensors(first), _tensors(second)
    pairs = zip(tensors, others, strict=False)
    return len(tensors) == len(others) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=rtol, atol=1e-5, equal_nan=True) for a, b in pairs
    )


def _tensors(value: Any) -> Sequence[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor) and not leaf.is_sparse]


def _kind(value: Any) -> Hashable:
    if isinstance(value, Mapping):
        return kind_of(value)
    if isinstance(value, torch.Tensor):
        return value.ndim, value.numel() > 0
    if isinstance(value, list | tuple):
        return tuple(map(_kind, value))
    if isinstance(value, int | float) and not isinstance(value, bool):  # a large one is data rather than a switch
        return min(value, MAX_KINDS) if isinstance(value, int) else value != 0
    settings = vars(value) if hasattr(value, "__dict__") else {}
    return value if isinstance(value, bool | str | None) else (type(value).__qualname__, *map(_plain, settings.items()))


def _plain(item: tuple[str, Any]) -> Hashable:
    return item if isinstance(item[1], bool | int | float | str | None) else item[0]


Sent = dict[str, tuple[torch.Tensor, ...]]
"""Tensors between chunks, by the module whose part sends them."""


class PartedModel:
    """Runs chunks of a model, without memory for the rest.

    Between calls the model has its own ``forward`` and its own parameter objects, those of other ranks on the meta
    device. Several threads, such as lanes of a rank, may call it at the same time, if the code around the layers keeps
    no state in the model and only one thread draws random numbers. Ranks that are threads have copies of the model.

    Args:
        model: The user's model, on its device; or on the meta device, to be loaded.
        split: The split of the model.
        chunks: All chunks of the partition.
        own: Indices of the chunks on this rank; None: all.
        keeps_buffers: True if buffers of other ranks' layers stay, for chunks that may run here later.
    """

    def __init__(
        self,
        model: nn.Module,
        split: ModelSplit,
        chunks: Sequence[tuple[Part, ...]],
        own: Collection[int] | None = None,
        *,
        keeps_buffers: bool = False,
    ) -> None:
        self.model = model
        self.split = split
        self.chunks = tuple(map(tuple, chunks))
        self.own = frozenset(range(len(self.chunks)) if own is None else own)
        self.device = device_of(model, {})
        self._current, self._in_use = CurrentCall(), WeightsInUse()
        self._patches = self._make_patches()
        inside = {id(each) for patch in self._patches for each in patch.module.modules() if each is not patch.module}
        self._outer = [(path or "the model", each) for path, each in model.named_modules() if id(each) not in inside]
        mine = [self.chunks[index] for index in sorted(self.own)]
        self._names = frozenset().union(*map(split.parameters_of, mine))
        running = frozenset().union(*map(split.sites_of, mine))
        layers = [patch for patch in self._patches if any(split.sites[site].is_layer for site in patch.sites)]
        idle = [patch.module for patch in layers if running.isdisjoint(patch.sites)]  # buffers of others may be read
        drop_weights(model, keep=self._names, whole=() if keeps_buffers else idle)
        self.renew_stand_ins()
        self._blank = BlankResults(self.device, self._in_use.alone)
        self._lock = threading.Lock()
        self._num_calls = 0
        self._in_place = ExitStack()
        self._kinds: dict[int, set[Hashable]] = {}
        self._switches: Hashable = None
        self._plans: dict[tuple[int, frozenset[str]], ChunkPlan] = {}
        self._likes: dict[Hashable, Sent] = {}
        self._copies: Copies | None = None

    def forward(
        self,
        chunk: int,
        kwargs: Mapping[str, Any],
        received: Sent | None = None,
        strategies: Sequence[str] = (),
        *,
        draws: Draws = "own",
        offload: Offload | None = None,
    ) -> Any:
        """Runs a chunk with a microbatch, or with some of its units.

        Args:
            chunk: Index of a chunk of this rank.
            kwargs: Keyword arguments of the model.
            received: Tensors of earlier chunks, by module; ``join_pieces`` joins several pieces.
            strategies: Activation strategy of each of the chunk's layers, in order; empty: all are kept.
            draws: With ``all`` and the generators' state before the microbatch, numbers are the plain model's.
            offload: Takes the activations of layers whose strategy is ``offload``, as ``new_offload`` makes it.

        Returns:
            The chunk's tensors, by module; or the model's output if it ends here, without leaves of other modules.
        """
        plan = self._plan(chunk, kwargs)
        inputs: dict[Value, torch.Tensor] = {}
        for module, values in plan.entries.items():
            inputs |= zip(values, (received or {}).get(module, ()), strict=True)
        kind, kinds = (self._switches, self.kind_of(kwargs)), self._kinds.setdefault(chunk, {(None, self.split.kind)})
        if kind not in kinds and len(kinds) < MAX_KINDS:
            kinds.add(kind)
            self._check_path(chunk, plan, kwargs, inputs)
        call = self._new_call(plan, own=plan.own, received=inputs)
        call.draws = draws
        call.strategies = dict(zip(plan.layers, strategies, strict=True)) if strategies else {}
        call.offload = self.new_offload() if offload is None and "offload" in strategies else offload
        return self._run(plan, call, kwargs)

    def new_offload(self) -> Offload:
        """Returns what takes the activations of one forward that go to the host's memory."""
        if self._copies is None:
            self._copies = copies_for(self.device)
        return Offload(self._copies)

    def boundary_like(self, chunk: int, kwargs: Mapping[str, Any]) -> Sent:
        """Returns the tensors that ``forward`` of a chunk on any rank sends, without data.

        Results are cached by the shapes of ``kwargs``, unless a module's shapes depend on values; the last chunk sends
        nothing.
        """
        plan = self._plan(chunk, kwargs)
        if plan.last is None:
            return {}
        precision = torch.is_autocast_enabled(self.device.type) and torch.get_autocast_dtype(self.device.type)
        shaping = [_values(kwargs.get(name)) for name in sorted(self.split.shaping_inputs)]
        key = (chunk, precision, *shaping, *((name, _shape(value)) for name, value in sorted(kwargs.items())))
        if key in self._likes:
            return self._likes[key]
        call = self._new_call(plan, own=(), received={})
        call.last = plan.last_shape
        with torch.no_grad(), forked(self.device):
            self._call(call, kwargs)
        like = {
            module: tuple(torch.empty_like(tensor, device="meta") for tensor in call.sent(values))
            for module, values in plan.leaves.items()
        }
        if not self._blank.by_values:
            if len(self._likes) > 1000:  # values of inputs may differ in each microbatch
                self._likes.clear()
            self._likes[key] = like
        return like

    def skip_random_numbers(self, kwargs: Mapping[str, Any]) -> None:
        """Advances generators as the plain model's forward with a microbatch does, without running it.

        A step of several microbatches saves the state before each: its chunks may then run in any order.
        """
        call = self._new_call(ChunkPlan(present=self.split.present(kwargs)), own=(), received={})
        call.draws = "all"
        with torch.no_grad():
            self._call(call, kwargs)

    def check_calls(self, kwargs: Mapping[str, Any]) -> None:
        """Raises UnsplittableError if random numbers between modules decide whether one runs that others need."""
        first: Counter[str] = Counter()
        for seed in range(NUM_SEEDS):
            call = self._new_call(ChunkPlan(present=self.split.present(kwargs)), own=(), received={})
            call.draws = "none"
            with torch.no_grad(), forked(self.device):
                for set_seed in (torch.manual_seed, random.seed, np.random.seed):
                    set_seed(seed)
                before = random_state(self.device)
                self._call(call, kwargs)
                draws = not before.is_same(random_state(self.device))
            first = first or call.calls
            for path in (self.split.sites[index].path for index in sorted(self.split.sent_sites)):
                if call.calls[path] != first[path]:
                    raise UnsplittableError(
                        f"{path} is skipped at random, which no schedule knows: call it each time, and let it draw "
                        "itself whether it changes anything"
                    )
            if not draws:
                return

    def kind_of(self, kwargs: Mapping[str, Any]) -> Hashable:
        return kind_of(kwargs, self.split.read_inputs)

    def forget_results(self, switches: Hashable) -> None:
        """Clears cached results of modules after a change of modes, such as a dropout rate.

        ``switches`` are None if the modes choose the sample's path.
        """
        self._switches = switches
        self._blank.forget()
        self._likes.clear()

    def computing(self) -> AbstractContextManager[None]:
        """Returns a context for computation with the model's weights outside of ``forward``, as in a loss."""
        return self._in_use.shared()

    def give_memory(self) -> frozenset[str]:
        """Allocates this rank's weights on the meta device, to be loaded; returns their names."""
        running = frozenset().union(*(self.split.sites_of(self.chunks[index]) for index in self.own))
        for patch in self._patches:
            for name, buffer in patch.module.named_buffers():
                if buffer.is_meta and not running.isdisjoint(patch.sites):
                    raise meta_buffer(f"{patch.path}.{name}")
        allocated = give_memory(self.model, names=self._names, device=self.device)
        if allocated:
            self.renew_stand_ins()
        return allocated

    @contextmanager
    def lent_memory(self) -> Iterator[None]:
        """Allocates them temporarily, for timed steps whose results are discarded."""
        allocated = self.give_memory()
        try:
            yield
        finally:
            if allocated:
                drop_weights(self.model, keep={name for name, _ in self.model.named_parameters()} - allocated, whole=())
                self.renew_stand_ins()

    def renew_stand_ins(self) -> None:
        """Makes stand-ins for dropped weights except those in layers; glue may read the first layer's device."""
        layers = {site.path for site in self.split.sites if site.is_layer and site.layer}
        inside = [patch.module for patch in self._patches if patch.path in layers]
        self._stand_ins = StandIns(self.model, inside=inside, device=self.device)

    def _make_patches(self) -> list[ForwardPatch]:
        sites: dict[str, list[int]] = {}
        for index, site in enumerate(self.split.sites):
            if site.path:
                sites.setdefault(site.path, []).append(index)
        sites |= {path: [] for path in self.split.unreached}
        return [
            ForwardPatch(path, self.model.get_submodule(path), tuple(calls), self._current, self._in_use)
            for path, calls in sites.items()
        ]

    def _plan(self, chunk: int, kwargs: Mapping[str, Any]) -> ChunkPlan:
        key = (chunk, self.split.present(kwargs))
        if key not in self._plans:
            self._plans[key] = plan_chunk(self.split, self.chunks[chunk], key[1])
        return self._plans[key]

    def _new_call(self, plan: ChunkPlan, *, own: Collection[int], received: Mapping[Value, torch.Tensor]) -> ChunkCall:
        return ChunkCall(
            split=self.split,
            blank=self._blank,
            device=self.device,
            own=own,
            last=plan.last,
            received=received,
            sends=plan.sends,
            present=plan.present,
        )

    def _run(self, plan: ChunkPlan, call: ChunkCall, kwargs: Mapping[str, Any]) -> Any:
        output = self._call(call, kwargs)
        if plan.last is None:
            return self._without_foreign_leaves(output)
        return {module: call.sent(values) for module, values in plan.leaves.items()}

    def _check_path(
        self, chunk: int, plan: ChunkPlan, kwargs: Mapping[str, Any], inputs: Mapping[Value, torch.Tensor]
    ) -> None:
        """Raises UnsplittableError if the chunk's result depends on results of others that it does not receive."""
        results = []
        for added in (0.0, 1.0):
            copies = {value: tensor.clone() for value, tensor in inputs.items()}  # the chunk may write into it
            call = self._new_call(plan, own=plan.own, received=copies)
            call.added = added
            with torch.no_grad(), forked(self.device), self._patched(), restored_objects(self.model):
                try:
                    results.append(self._run(plan, call, kwargs))
                except Exception:  # of any kind: the real run raises it again, and other values may be impossible
                    return
        if not is_alike(*results):
            switches = ", ".join(f"{name}={each!r}" for name, each in kwargs.items() if isinstance(each, bool | str))
            raise UnsplittableError(
                f"chunk {'+'.join(map(str, self.chunks[chunk]))} needs results of others with this microbatch"
                f"{switches and f' ({switches})'} that it did not need with the sample; split with a sample that takes "
                "the same way through the model"
            )

    def _call(self, call: ChunkCall, kwargs: Mapping[str, Any]) -> Any:
        with self._patched(), self._in_use.shared():
            self._current.chunk_call = call
            call.pause_random_numbers()
            try:
                with torch.set_grad_enabled(torch.is_grad_enabled()):  # a call that ends early restores no settings
                    return copy_context().run(self.model, **self.split.copied(kwargs))
            except ChunkEnded as end:
                end.__traceback__ = None  # its frames hold tensors
                return None
            except Exception as error:  # of any kind: it is the user's code that runs
                if not call.in_site and len(call.own) < len(self.split.sites):
                    error.add_note("raised between layers, where this rank has zeros for what other ranks compute")
                raise
            finally:
                call.resume_random_numbers()
                self._current.chunk_call = None

    @contextmanager
    def _patched(self) -> Iterator[None]:
        """Installs patches and stand-ins while any thread is inside."""
        with self._lock:
            if not self._num_calls:
                if path := next((path for path, outer in self._outer if outer._backward_hooks), None):
                    raise UnsplittableError(
                        f"{path} has a backward hook, which is not called where its input comes from another rank; "
                        "set it on a module inside of the layer, one that does all of its work"
                    )
                for patch in self._patches:
                    patch.forward = patch.module.forward
                self._in_place.enter_context(self._stand_ins.placed())
                self._in_place.enter_context(replaced_forwards({patch.module: patch for patch in self._patches}))
            self._num_calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_calls -= 1
                if not self._num_calls:
                    self._in_place.close()

    def _without_foreign_leaves(self, output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            return output
        leaves, tree = pytree.tree_flatten_with_path(output)
        own_leaves = self.split.output_leaves
        own = [
            None if isinstance(leaf, torch.Tensor) and pytree.keystr(path) not in own_leaves else leaf
            for path, leaf in leaves
        ]
        return pytree.tree_unflatten(own, tree)


def _shape(value: Any) -> Hashable:
    return tuple(
        (pytree.keystr(path), *((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else [repr(leaf)]))
        for path, leaf in pytree.tree_leaves_with_path(value)
    )


def _values(value: Any) -> Hashable:
    tensors = [leaf.detach().cpu() for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return tuple(hash(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()) for tensor in tensors)
