"""The outcome of a model that is cut into chunks, as a pipeline runs them: equal, refused, different or crashed."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from bench.record import Figure, one_line
from bench.sweep.chunk_chain import ChunkChain
from bench.sweep.outcomes import AS_TOLD, CRASHED, DIFFERENT, EQUAL, NO_PLAIN, REFUSED
from bench.sweep.partitions import partitions_of
from bench.sweep.session import Case, CatchingSession, CaughtModel
from bench.sweep.verdict import without_folders
from mosaic.errors import MosaicError
from mosaic.find.random_numbers import RandomState, random_state
from mosaic.hardware import find_cluster
from mosaic.parts.finding.find import find_split
from mosaic.parts.strategies import STRATEGIES
from mosaic.pipelining.rank_hardware import RankHardware
from mosaic.ranks.pipeline.counting import count_model

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Of losses and gradients, relative to the largest; sums of shared weights are in another order."""


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
    """Cuts a case's model in several ways, and compares; yields a figure that holds until the next one."""
    began = time.perf_counter()
    try:
        plain = _run_plain(*_model_of(case))
    except Exception as error:  # of any kind: the case says nothing about Mosaic
        yield _figure(case, NO_PLAIN, reason=f"{type(error).__name__}: {error}")
        return
    yield _figure(case, CRASHED, reason="the process died")  # unless it comes back
    outcome, reason, modules = _outcome(plain)
    yield _figure(case, outcome, reason=reason, modules=modules, plain=plain, seconds=time.perf_counter() - began)


def loss_of(made: Any) -> Tensor:
    """Returns the loss of a model's output; of one that has none, the mean squares of all that it returns."""
    loss = made.get("loss") if isinstance(made, Mapping) else getattr(made, "loss", None)
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    leaves = [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return torch.stack([leaf.nan_to_num(0, 0, 0).square().mean().double() for leaf in leaves if leaf.numel()]).sum()


def _model_of(case: Case) -> tuple[nn.Module, dict[str, Any]]:
    _seed()
    try:
        case.run(CatchingSession(on_lanes=False))
    except CaughtModel as caught:
        return caught.model, caught.arguments()
    raise ValueError("its loop colocates no model")


def _run_plain(model: nn.Module, kwargs: dict[str, Any]) -> _Plain:
    """Runs a model in double precision, or as it is where it does not run so."""
    try:
        return _in_precision(copy.deepcopy(model).double(), _doubled(kwargs), torch.float64)
    except Exception:  # of any kind: operators without double precision, or sums of both
        return _in_precision(model, kwargs, torch.float32)


def _in_precision(model: nn.Module, kwargs: dict[str, Any], precision: torch.dtype) -> _Plain:
    runs = []
    for _ in range(2):
        one = copy.deepcopy(model)
        one.zero_grad()
        _seed()
        output = one(**copy.deepcopy(kwargs))
        state = random_state(torch.device("cpu"))
        loss = loss_of(output)
        loss.backward()
        runs.append((loss.detach(), _gradients(one), state))
    if not torch.equal(runs[0][0], runs[1][0]):
        raise ValueError("it differs from itself")
    loss, gradients, state = runs[0]
    return _Plain(model=model, kwargs=kwargs, precision=precision, loss=loss, gradients=gradients, state=state)


def _outcome(plain: _Plain) -> tuple[str, str, str]:
    """Returns the outcome, why, and which modules were found."""
    try:
        try:
            return _compare(plain)
        except MosaicError as error:
            changes = _as_told(plain.model)
            told = without_folders(f"{type(error).__name__}: {error}")
            if not changes:
                return REFUSED, told, ""
            outcome, reason, modules = _compare(_in_precision(plain.model, plain.kwargs, plain.precision))
            return (AS_TOLD if outcome == EQUAL else outcome), reason or f"{', '.join(changes)}: {told}", modules
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
        _seed()
        if not chain.state_after(plain.kwargs).is_same(plain.state):
            return DIFFERENT, f"{name}: other random numbers are drawn", modules
        _seed()
        loss = chain.step(plain.kwargs, loss_of, strategy=STRATEGIES[number % 2])
        if found := _difference(plain, loss, chain.gradients()):
            return DIFFERENT, f"{name}: {found}", modules
    return EQUAL, "", modules


def _difference(plain: _Plain, loss: Tensor, gradients: Mapping[str, Tensor]) -> str:
    tolerance = TOLERANCE[plain.precision]
    if not torch.allclose(loss, plain.loss, rtol=tolerance, atol=0, equal_nan=True):
        return f"loss {loss:.9g}, plain {plain.loss:.9g}"
    if others := sorted(gradients.keys() ^ plain.gradients.keys()):
        return f"{others[0]} has a gradient in one of them only, and {len(others) - 1} more"
    scale = max((float(one.to_dense().abs().max()) for one in plain.gradients.values() if one.numel()), default=0.0)
    for name, gradient in gradients.items():
        one, other = gradient.to_dense(), plain.gradients[name].to_dense()
        if not torch.allclose(one, other, rtol=tolerance, atol=tolerance * scale, equal_nan=True):
            return f"gradient of {name} by {float((one - other).abs().max()):.3g}, the largest is {scale:.3g}"
    return ""


def _as_told(model: nn.Module) -> list[str]:
    """Changes a model as refusals tell to; returns what was changed."""
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


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def _doubled(value: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda one: one.double() if one.is_floating_point() else one, value)


def _seed() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)


def _figure(
    case: Case, outcome: str, *, reason: str, modules: str = "", plain: _Plain | None = None, seconds: float = 0.0
) -> Figure:
    return Figure(
        name=f"{case.name}: modules found",
        source="measured",
        value=float(len(modules.split(", "))) if modules else 0.0,
        reason=one_line(without_folders(reason)),
        part=case.kind,
        labels={
            "case": case.name,
            "outcome": outcome,
            "modules": modules,
            "precision": "" if plain is None else str(plain.precision).removeprefix("torch."),
            "seconds": f"{seconds:.1f}",
        },
    )
