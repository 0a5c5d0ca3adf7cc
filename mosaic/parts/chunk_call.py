"""One call of the whole model in which only a chunk's sites run."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from mosaic.errors import UnsplittableError
from mosaic.find.random_numbers import RandomState, torch_state
from mosaic.parts.blank import BlankResults, Forward, ModuleCall, hidden_of, is_kept_by_selection, without_cache
from mosaic.parts.offload import Offload
from mosaic.parts.split import ModelSplit, Value
from mosaic.parts.weights import WeightsInUse

Draws = Literal["own", "all", "none"]
"""Sites that draw random numbers: the chunk's own, all as in the plain model, or none if the model is known to draw
none; several threads may then call at a time, because generators stay untouched."""


STRATEGIES = ("keep", "recompute", "selective", "offload")


class ChunkEnded(BaseException):
    """Ends the model's forward behind the last site of a chunk."""


@dataclass(kw_only=True)
class ChunkCall:
    split: ModelSplit
    blank: BlankResults
    device: torch.device
    """Device whose generator is saved, beside the CPU's."""
    own: Collection[int]
    """Sites that run."""
    last: int | None
    """Last site of the call; None: the model's end."""
    received: Mapping[Value, torch.Tensor]
    sends: Collection[Value]
    present: Collection[str]
    """Modules that the microbatch calls."""
    draws: Draws = "own"
    strategies: Mapping[int, str] = field(default_factory=dict)
    offload: Offload | None = None
    """Stores the activations of layers whose strategy is ``offload``."""
    added: float = 0.0
    """Added to stand-ins for results of other sites, to test that the chunk does not depend on them."""
    values: dict[Value, torch.Tensor] = field(default_factory=dict)
    """Values made so far, to send."""
    in_site: bool = False
    """A site runs, or a stand-in for it: modules inside of it that are sites, too, run as they are."""
    calls: Counter[str] = field(default_factory=Counter)
    """Calls of each site's module so far."""
    _versions: dict[Value, int] = field(default_factory=dict)
    _paused: RandomState | None = None

    def enter(self, patch: ForwardPatch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a site, or stands in for it."""
        index = self._site(patch)
        self.in_site = True  # also behind an error of it
        if index in self.own:
            self.resume_random_numbers()
            site, strategy = self.split.sites[index], self.strategies.get(index, "keep")
            if site.has_effects and strategy != "offload":
                strategy = "keep"  # a second run would not repeat the first
            elif strategy == "selective" and not site.may_select:
                strategy = "recompute"
            result = run_layer(strategy, patch.run, args, kwargs, offload=self.offload)
            leaves = [result] if isinstance(result, torch.Tensor) else pytree.tree_leaves(result)
        else:
            self.pause_random_numbers()
            result, leaves = self._stand_in(index, patch, args, kwargs)
        self.in_site = False
        for number, leaf in enumerate(leaves):
            if (value := Value(index, number)) in self.sends and isinstance(leaf, torch.Tensor):
                self.values[value] = leaf
                self._versions[value] = _version(leaf)
        if index == self.last:
            raise ChunkEnded
        return result

    def _site(self, patch: ForwardPatch) -> int:
        call = self.calls[patch.path]
        self.calls[patch.path] += 1
        if call < len(patch.sites):
            return self._expected(patch.sites[call])
        if not patch.sites:
            raise UnsplittableError(
                f"{patch.path} is called with this microbatch, and was not with the sample; give a sample with every "
                "modality, so that it is known what runs where"
            )
        raise UnsplittableError(
            f"{patch.path} is called {call + 1} times with this microbatch, and was called {len(patch.sites)} times "
            "with the sample; split with a sample that calls it as often"
        )

    def _expected(self, index: int) -> int:
        site = self.split.sites[index]
        if site.module in self.present:
            return index
        names = ", ".join(self.split.by_name[site.module].own_inputs)
        raise UnsplittableError(
            f"{site.path} is called with a microbatch that has none of the tensors with which the sample called "
            f"{site.module!r} ({names}); split with a sample that calls it in the same way"
        )

    def _stand_in(
        self, index: int, patch: ForwardPatch, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, list[Any]]:
        site, call = self.split.sites[index], ModuleCall(patch.module, patch.forward, args, kwargs)
        if self.draws == "all":
            self.blank.draw(call)
        if site.is_layer and site.keeps_shape:
            leaves, tree = list(site.form[0]), site.form[1]
            leaves[0] = self.blank.in_precision_of(site.module, call)
        else:
            leaves, tree = self.blank.zeros(call)
        if self.added:
            added = self.added
            leaves = pytree.tree_map_only(torch.Tensor, lambda t: t + added if t.is_floating_point() else t, leaves)
        for number in range(len(leaves)):
            tensor = self.received.get(Value(index, number))
            if tensor is not None:
                leaves[number] = received = _Received.apply(tensor)
                if site.in_place and not number:  # what else refers to the argument sees the result, too
                    hidden = hidden_of(args, kwargs)
                    assert hidden is not None
                    leaves[number] = hidden.copy_(received)
                self.resume_random_numbers()
        result = pytree.tree_unflatten(leaves, tree)
        return result if site.refills is None else call.refill(site.refills, result), leaves

    def pause_random_numbers(self) -> None:
        """Saves the generators before random numbers of other chunks."""
        if self._paused is None and self.draws == "own":
            self._paused = torch_state(self.device)

    def resume_random_numbers(self) -> None:
        """Restores the generators to the chunk's state."""
        if self._paused is not None:
            self._paused.restore()
            self._paused = None

    def sent(self, values: Collection[Value]) -> tuple[torch.Tensor, ...]:
        """Returns the values to send, in this order, including received ones for later chunks."""
        for value in values:
            tensor = self.values.get(value)
            if tensor is None and value in self.received:  # the chunk ends before the module is called
                continue
            if tensor is None or _version(tensor) != self._versions[value]:
                path = self.split.sites[value.site].path
                problem = "was not returned" if tensor is None else "was written into by an operation behind it"
                raise UnsplittableError(
                    f"what {path} returns {problem}, and other chunks need it; let the model do with each microbatch "
                    "what it does with the sample, and not in place"
                )
            if tensor._backward_hooks:
                raise UnsplittableError(
                    f"what {self.split.sites[value.site].path} returns has a hook, and several ranks have parts of its "
                    "gradient: change the gradient by a torch.autograd.Function"
                )
        return tuple(self.received[value] if value in self.received else self.values[value] for value in values)


def _version(tensor: torch.Tensor) -> int:
    """Returns the number of in-place writes; 0 for inference tensors."""
    return 0 if tensor.is_inference() else tensor._version


class CurrentCall(threading.local):
    """The current call of a model; each thread has its own."""

    chunk_call: ChunkCall | None = None


class ForwardPatch:
    """Replaces a module's ``forward`` while chunks run; a thread without a current call runs the module itself."""

    def __init__(
        self, path: str, module: nn.Module, sites: tuple[int, ...], current: CurrentCall, in_use: WeightsInUse
    ) -> None:
        self.path = path
        self.module = module
        self.sites = sites
        self.forward: Forward = module.forward
        self._current, self._in_use = current, in_use

    def run(self, *args: Any, **kwargs: Any) -> Any:
        with self._in_use.shared():
            return self.forward(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self._current.chunk_call
        return self.run(*args, **kwargs) if call is None or call.in_site else call.enter(self, args, kwargs)


class _Received(torch.autograd.Function):
    """A received tensor as a result that later operations may write into."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def run_layer(
    strategy: str, layer: Forward, args: tuple[Any, ...], kwargs: dict[str, Any], *, offload: Offload | None = None
) -> Any:
    """Runs a layer with one of ``STRATEGIES``.

    ``recompute`` keeps its arguments alone, and ``selective`` also the results of products, convolutions and attention
    (PipeWeaver, section 6.3); backward runs the rest again. With ``offload`` all of it waits in the host's memory.
    """
    if strategy == "keep":
        return layer(*args, **kwargs)
    if strategy == "offload":
        assert offload is not None
        return offload.run(layer, args, kwargs) if torch.is_grad_enabled() else layer(*args, **kwargs)
    args = tuple(map(without_cache, args))
    kwargs = {name: without_cache(value) for name, value in kwargs.items()}
    context = _selection if strategy == "selective" else noop_context_fn
    return checkpoint(layer, *args, use_reentrant=False, context_fn=context, **kwargs)


def _selection() -> Any:
    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_kept = is_kept_by_selection(operator, args, kwargs)
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
