"""How a model ends that is cut into chunks: as the plain model, refused, different, or crashed."""

from __future__ import annotations

import copy
import inspect
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bench.record import Figure
from bench.sweep.chunk_chain import ChunkChain
from bench.sweep.session import Session
from bench.sweep.verdict import Case
from mosaic.graph import Part
from mosaic.hardware import find_cluster
from mosaic.parts.finding.find import find_split
from mosaic.parts.split import ModelSplit
from mosaic.ranks.pipeline.counting import count_model


class FoundError(BaseException):
    """Leaves a case's loop where it would have colocated its model."""


class _Catching(Session):
    def colocate(self, model: nn.Module, sample: Any) -> Any:
        raise FoundError(model, sample)


def model_of(case: Case):
    try:
        case.run(_Catching(on_lanes=False))
    except FoundError as found:
        return found.args
    raise ValueError("the case colocates no model")


def arguments(model: nn.Module, sample: Any) -> dict[str, Any]:
    if isinstance(sample, Mapping):
        return dict(sample)
    args = sample if isinstance(sample, tuple) else (sample,)
    return inspect.signature(model.forward).bind(*args).arguments


def cuts(split: ModelSplit) -> dict[str, list[tuple[Part, ...]]]:
    def part(module, first, end):
        return Part(module=module.name, first=first, count=end - first, total=module.count)

    apart = [(part(m, 0, m.count),) for m in split.modules]
    halves = [
        (part(m, a, b),) for m in split.modules for a, b in ((0, m.count // 2), (m.count // 2, m.count)) if a < b
    ]
    every = [(part(m, i, i + 1),) for m in split.modules for i in range(m.count)]
    found = {"apart": apart, "halves": halves, "every": every}
    layers = [(m, i) for m in split.modules for i in range(m.count)]
    for count in (2, 3, 4):
        if len(layers) >= count:
            ends = [round(len(layers) * k / count) for k in range(count + 1)]
            chunks = []
            for a, b in zip(ends, ends[1:]):
                inside = layers[a:b]
                chunks.append(tuple(
                    part(m, min(i for n, i in inside if n is m), 1 + max(i for n, i in inside if n is m))
                    for m in split.modules if any(n is m for n, _ in inside)
                ))
            found[f"mixed {count}"] = chunks
    return found


def loss_of(made: Any) -> Tensor:
    loss = made.get("loss") if isinstance(made, Mapping) else getattr(made, "loss", None)
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    leaves = [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return torch.stack([leaf.nan_to_num(0, 0, 0).square().mean().double() for leaf in leaves if leaf.numel()]).sum()


def seed():
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)


def plain(model, kwargs):
    model.zero_grad()
    seed()
    loss = loss_of(model(**kwargs))
    loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), found


def double(value):
    return pytree.tree_map(lambda t: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t, value)


def run(case: Case):
    from mosaic.errors import MosaicError
    model, sample = model_of(case)
    try:
        kwargs = arguments(model, sample)
    except TypeError as e:
        return "no plain", f"args: {e}"
    if not isinstance(model, nn.Module):
        return "no plain", "no module"
    precise = "double"
    was = copy.deepcopy(model)
    try:
        model.double()
        plain(copy.deepcopy(model), double(kwargs))
        kwargs = double(kwargs)
    except Exception as e:
        precise = f"float ({type(e).__name__}: {str(e)[:80]})"
        model = was
    try:
        loss, wanted = plain(copy.deepcopy(model), kwargs)
        loss2, wanted2 = plain(copy.deepcopy(model), kwargs)
        if not torch.equal(loss, loss2):
            return "no plain", "differs from itself"
    except Exception as e:
        return "no plain", f"{type(e).__name__}: {e}"
    try:
        split = find_split(model, kwargs, loss=loss_of)
    except MosaicError as e:
        return "refused", f"{type(e).__name__}: {e}"
    where = " ".join(f"{m.name}:{m.count}" for m in split.modules)
    cut = "count"
    try:
        count_model(copy.deepcopy(model), split, kwargs, find_cluster("host", 2).hardware)
        for cut, chunks in cuts(split).items():
            chain = ChunkChain(model, split, chunks)
            seed()
            got = chain.step(kwargs, loss_of)
            tol = 1e-10 if precise == "double" else 1e-5
            if not torch.allclose(got, loss, rtol=tol, atol=0):
                return "DIFFERENT", f"[{where}; {cut}] loss {got} plain {loss}"
            grads = chain.gradients()
            if grads.keys() != wanted.keys():
                return "DIFFERENT", f"[{where}; {cut}] gradients missing {sorted(wanted.keys() - grads.keys())[:3]} more {sorted(grads.keys()-wanted.keys())[:3]}"
            scale = max(float(g.abs().max()) for g in wanted.values()) if wanted else 1
            for n, g in grads.items():
                if g.is_sparse:
                    g = g.to_dense(); wanted[n] = wanted[n].to_dense() if wanted[n].is_sparse else wanted[n]
                if not torch.allclose(g, wanted[n], rtol=tol, atol=tol * scale):
                    return "DIFFERENT", f"[{where}; {cut}] gradient of {n} by {(g - wanted[n]).abs().max():.3g} of {scale:.3g}"
    except MosaicError as e:
        return "refused late", f"[{where}; {cut}] {type(e).__name__}: {e}"
    except Exception as e:
        import traceback
        tb = traceback.extract_tb(e.__traceback__)
        at = [f"{f.filename.rsplit('/',2)[-2]}/{f.filename.rsplit('/',1)[-1]}:{f.lineno}" for f in tb[-6:]]
        return "CRASHED", f"[{where}; {cut}] {type(e).__name__}: {str(e)[:300]} @ {' '.join(at)}"
    return "equal", f"[{where}] {precise}"
