"""The outcome of a model cut into chunks, as in a pipeline: equal, refused, different or crashed."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from bench.record import Figure
from bench.sweep.session import Case, CatchingSession, CaughtModel, seed_all, without_folders
from bench.sweep.tables import AS_TOLD, CRASHED, DIFFERENT, EQUAL, NO_PLAIN, REFUSED
from bench.sweep.verdict import figure
from mosaic.errors import MosaicError
from mosaic.find.random_numbers import RandomState, random_state
from mosaic.graph import Part
from mosaic.hardware import find_cluster
from mosaic.parts.chunk_call import STRATEGIES
from mosaic.parts.finding.find import find_split
from mosaic.parts.parted_model import PartedModel
from mosaic.parts.pieces import count_units, join_pieces, take_units
from mosaic.parts.split import ModelSplit, SplitModule
from mosaic.pipelining.rank_hardware import RankHardware
from mosaic.ranks.pipeline.counting import count_model

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Of losses and gradients, relative to the largest; sums of shared weights are in another order."""
SEED = 5
Tensors = tuple[Tensor, ...]
_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class _Plain:
    model: nn.Module
    kwargs: dict[str, Any]
    precision: torch.dtype
    loss: Tensor
    gradients: dict[str, Tensor]
    state: RandomState
    """Of the generators behind its forward."""


def judge_parted(case: Case) -> Iterator[Figure]:
    """Cuts a case's model in several ways and compares; each yielded figure replaces the one before."""
    began = time.perf_counter()
    try:
        plain = _run_plain(*_model_of(case))
    except Exception as error:  # of any kind: the case says nothing about Mosaic
        yield figure(case, NO_PLAIN, reason=f"{type(error).__name__}: {error}")
        return
    yield figure(case, CRASHED, reason="the process died")  # unless it comes back
    outcome, reason, modules = _outcome(plain)
    yield figure(
        case,
        outcome,
        reason=reason,
        counts="modules found",
        value=len(modules.split(", ")) if modules else 0,
        modules=modules,
        precision=str(plain.precision).removeprefix("torch."),
        seconds=f"{time.perf_counter() - began:.1f}",
    )


def loss_of(output: Any) -> Tensor:
    """Returns the loss of a model's output, or the mean squares of all its tensors if it has none."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return torch.stack([leaf.nan_to_num(0, 0, 0).square().mean().double() for leaf in leaves if leaf.numel()]).sum()


def partitions_of(split: ModelSplit) -> dict[str, list[tuple[Part, ...]]]:
    """Returns partitions by description: apart, in the middle, at each layer, and as mixed chains."""
    layers = [(module, layer) for module in split.modules for layer in range(module.count)]
    ends = list(itertools.accumulate((module.count for module in split.modules), initial=0))
    middles = [first + module.count // 2 for first, module in zip(ends, split.modules, strict=False)]
    cuts = {
        "modules apart": ends,
        "modules in halves": sorted({*ends, *middles}),
        "each layer apart": range(len(layers) + 1),
    }
    for count in range(2, min(4, len(layers)) + 1):
        cuts[f"a chain of {count}"] = [round(len(layers) * number / count) for number in range(count + 1)]
    return {
        name: [_chunk(layers[first:end]) for first, end in itertools.pairwise(places)] for name, places in cuts.items()
    }


def _chunk(layers: list[tuple[SplitModule, int]]) -> tuple[Part, ...]:
    groups = [(module, list(pairs)) for module, pairs in itertools.groupby(layers, key=lambda pair: pair[0])]
    return tuple(
        Part(module=module.name, first=pairs[0][1], count=len(pairs), total=module.count) for module, pairs in groups
    )


class ChunkChain:
    """Forward and backward of a microbatch through all chunks of a model in one process.

    Each chunk is on a rank of its own: a copy of the model that holds the weights of one chunk.
    """

    def __init__(self, model: nn.Module, split: ModelSplit, chunks: Sequence[tuple[Part, ...]]) -> None:
        self._split = split
        self._chunks = chunks
        self._ranks = [PartedModel(copy.deepcopy(model), split, chunks, own=[i]) for i in range(len(chunks))]

    def step(
        self,
        kwargs: Mapping[str, Any],
        loss: Callable[[Any], Tensor],
        *,
        strategy: str = "keep",
        sizes: Mapping[str, int] | None = None,
    ) -> Tensor:
        """Runs forwards and backwards as the pipeline does; gradients add up in the ranks' parameters.

        Skips chunks of modules for which the microbatch has no input. Modules with ``sizes`` are cut into pieces of
        these sizes, and draw no random numbers.

        Raises:
            AssertionError: Ranks expect other shapes than they receive.
        """
        # For each forward, by chunk and piece, its tensors beside the leaves of those that receive them.
        tape: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
        senders: dict[str, int] = {}  # by entry
        sent: dict[str, list[Tensors]] = {}  # by entry, of each piece
        state = random_state(_CPU)
        result: Tensor | None = None
        for index, chunk in enumerate(self._chunks):
            if not {part.module for part in chunk} & self._split.present(kwargs):
                continue
            pieces = list(self._pieces(kwargs, chunk[0].module, sizes or {}))
            arrived = {name: sent[name] for name in self._split.entries(chunk) if name in sent}
            outputs: dict[str, list[Tensors]] = {}
            for number, piece in enumerate(pieces):
                received = {}
                for name, tensors in arrived.items():
                    first = number if len(pieces) > 1 else 0
                    own = [tensors[number]] if len(pieces) > 1 else tensors
                    leaves = [tuple(map(_leaf, each)) for each in own]
                    for at, pair in enumerate(zip(own, leaves, strict=True), first):
                        tape.setdefault((senders[name], at), []).extend(zip(*pair, strict=True))
                    received[name] = join_pieces(leaves)
                seed_all(100 + index)  # as no other rank has them
                state.restore()
                strategies = [strategy] * sum(part.count for part in chunk)
                draws = {} if sizes else {"draws": "all"}
                output = self._ranks[index].forward(index, piece, received, strategies, **draws)
                if not self._split.leaves(chunk):
                    result = loss(output)
                    continue
                expected = _shapes(self._ranks[-1 - index].boundary_like(index, piece))  # as another rank knows them
                assert expected == _shapes(output), f"chunk {index} sends {_shapes(output)}, others expect {expected}"
                for name, tensors in output.items():
                    outputs.setdefault(name, []).append(tensors)
            sent |= outputs
            senders |= dict.fromkeys(outputs, index)
        assert result is not None
        result.backward()
        for _, read in sorted(tape.items(), reverse=True):
            pairs = [(tensor, leaf.grad) for tensor, leaf in read if leaf.grad is not None]
            if pairs:
                torch.autograd.backward([t for t, _ in pairs], [grad for _, grad in pairs])
        return result.detach()

    def _pieces(self, kwargs: Mapping[str, Any], module: str, sizes: Mapping[str, int]) -> Iterator[Mapping[str, Any]]:
        if module not in sizes:
            yield kwargs
            return
        units = count_units(self._split, kwargs, module)
        for first in range(0, units, sizes[module]):
            yield take_units(self._split, kwargs, module, range(first, min(first + sizes[module], units)))

    def state_after(self, kwargs: Mapping[str, Any]) -> RandomState:
        """Returns the generators' state of each rank after a microbatch that starts from the current state.

        Raises:
            AssertionError: Ranks have different states.
        """
        before = random_state(_CPU)
        states = []
        for index, rank in enumerate(self._ranks):
            seed_all(100 + index)
            before.restore()
            rank.skip_random_numbers(kwargs)
            states.append(random_state(_CPU))
        assert all(state.is_same(states[0]) for state in states), "ranks draw different numbers"
        return states[0]

    def gradients(self) -> dict[str, Tensor]:
        """Returns gradients by parameter, summed over ranks."""
        sums: dict[str, Tensor] = {}
        for rank in self._ranks:
            for name, parameter in rank.model.named_parameters():
                if parameter.grad is not None:
                    sums[name] = sums[name] + parameter.grad if name in sums else parameter.grad
        return sums


def _shapes(tensors: Mapping[str, Tensors]) -> dict[str, list[Any]]:
    return {name: [(tuple(tensor.shape), tensor.dtype) for tensor in own] for name, own in tensors.items()}


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _model_of(case: Case) -> tuple[nn.Module, dict[str, Any]]:
    seed_all(SEED)
    try:
        case.run(CatchingSession(on_lanes=False))
    except CaughtModel as caught:
        return caught.model, caught.arguments()
    raise ValueError("its loop colocates no model")


def _run_plain(model: nn.Module, kwargs: dict[str, Any]) -> _Plain:
    """Runs a model in double precision if possible, and unchanged otherwise."""
    try:
        doubled = pytree.tree_map_only(Tensor, lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, kwargs)
        return _in_precision(copy.deepcopy(model).double(), doubled, torch.float64)
    except Exception:  # of any kind: operators without double precision, or sums of both
        return _in_precision(model, kwargs, torch.float32)


def _in_precision(model: nn.Module, kwargs: dict[str, Any], precision: torch.dtype) -> _Plain:
    runs = []
    for _ in range(2):
        copied = copy.deepcopy(model)
        copied.zero_grad()
        seed_all(SEED)
        output = copied(**copy.deepcopy(kwargs))
        state = random_state(_CPU)
        loss = loss_of(output)
        loss.backward()
        gradients = {name: p.grad for name, p in copied.named_parameters() if p.grad is not None}
        runs.append((loss.detach(), gradients, state))
    if not torch.equal(runs[0][0], runs[1][0]):
        raise ValueError("it differs from itself")
    loss, gradients, state = runs[0]
    return _Plain(model=model, kwargs=kwargs, precision=precision, loss=loss, gradients=gradients, state=state)


def _outcome(plain: _Plain) -> tuple[str, str, str]:
    """Returns the outcome, its reason, and the modules that were found."""
    try:
        try:
            return _compare(plain)
        except MosaicError as error:
            changes = _change_as_told(plain.model)
            refusal = without_folders(f"{type(error).__name__}: {error}")
            if not changes:
                return REFUSED, refusal, ""
            outcome, reason, modules = _compare(_in_precision(plain.model, plain.kwargs, plain.precision))
            return (AS_TOLD if outcome == EQUAL else outcome), reason or f"{', '.join(changes)}: {refusal}", modules
    except MosaicError as error:
        return REFUSED, f"{type(error).__name__}: {error}", ""
    except Exception as error:  # of any kind: the plain loop raises none
        return CRASHED, f"{type(error).__name__}: {error}", ""


def _compare(plain: _Plain) -> tuple[str, str, str]:
    split = find_split(plain.model, plain.kwargs, loss=loss_of)
    count_model(copy.deepcopy(plain.model), split, plain.kwargs, RankHardware(cluster=find_cluster("host", 2)))
    modules = ", ".join(f"{module.name} of {module.count}" for module in split.modules)
    for number, (name, chunks) in enumerate(partitions_of(split).items()):
        chain = ChunkChain(plain.model, split, chunks)
        seed_all(SEED)
        if not chain.state_after(plain.kwargs).is_same(plain.state):
            return DIFFERENT, f"{name}: other random numbers are drawn", modules
        seed_all(SEED)
        loss = chain.step(plain.kwargs, loss_of, strategy=STRATEGIES[number % len(STRATEGIES)])
        if difference := _difference(plain, loss, chain.gradients()):
            return DIFFERENT, f"{name}: {difference}", modules
    return EQUAL, "", modules


def _difference(plain: _Plain, loss: Tensor, gradients: Mapping[str, Tensor]) -> str:
    tolerance = TOLERANCE[plain.precision]
    if not torch.allclose(loss, plain.loss, rtol=tolerance, atol=0, equal_nan=True):
        return f"loss {loss:.9g}, plain {plain.loss:.9g}"
    if others := sorted(gradients.keys() ^ plain.gradients.keys()):
        return f"{others[0]} has a gradient in one of them only, and {len(others) - 1} more"
    scale = max((float(grad.to_dense().abs().max()) for grad in plain.gradients.values() if grad.numel()), default=0.0)
    for name, gradient in gradients.items():
        ours, theirs = gradient.to_dense(), plain.gradients[name].to_dense()
        if not torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance * scale, equal_nan=True):
            return f"gradient of {name} by {float((ours - theirs).abs().max()):.3g}, the largest is {scale:.3g}"
    return ""


def _change_as_told(model: nn.Module) -> list[str]:
    """Changes a model as refusals advise; returns the changes."""
    changes = []
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.training:
            module.eval()
            changes.append("BatchNorm in eval()")
        if getattr(module, "gradient_checkpointing", False) is True:
            module.gradient_checkpointing = False
            changes.append("no gradient_checkpointing")
        for holder in (module, getattr(module, "config", None)):
            for drop in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
                if getattr(holder, drop, 0.0) > 0:
                    setattr(holder, drop, 0.0)
                    changes.append(f"{drop} 0")
    return list(dict.fromkeys(changes))
